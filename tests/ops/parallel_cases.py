"""What ranks run in tests of ops over a group: each computes its shard, and compares with the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.cases import ACT
from tpkernels.comm import schedule
from tpkernels.comm.calls import calls_of
from tpkernels.comm.schedule import LEAST_BYTES
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear

# ‖ours - truth‖ / ‖truth‖ in float64: twice the kernels' own, for each rank's part of a sum is rounded, too
BOUND = {torch.float32: 6e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float64: 1e-14}


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = True
    overlap: bool = True
    bias: bool = True
    activation: str | None = None
    main_grad: bool | str = False  # a word: of 16 bits
    save_gathered: bool = False
    small_pieces: bool = True  # cut even tiny shards; else they go with the header of their call
    leading: tuple[int, ...] = (16,)
    features: tuple[int, int] = (24, 32)
    delay: float = 0.0  # seconds: of each rank a different share

    @property
    def options(self) -> dict[str, Any]:
        return {"sequence_parallel": self.sequence_parallel, "overlap": self.overlap}


def shard(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


Results = dict[
    str, tuple[Tensor | None, Tensor, Tensor]
]  # ours, the truth, unsharded torch's own in the dtype


def excess(setting: Setting, results: Results) -> dict[str, float]:
    """Each result's error, as a part of what is allowed: the bound, or twice torch's own error."""
    found = {}
    for name, (ours, truth, own) in results.items():
        assert ours is not None, name
        assert ours.shape == truth.shape, f"{name}: {tuple(ours.shape)}, not {tuple(truth.shape)}"
        scale = float(truth.norm()) or 1.0
        error, theirs = (float((t.double() - truth).norm()) / scale for t in (ours, own))
        found[name] = error / max(BOUND[setting.dtype], 2 * theirs)
    return found


def prepare(setting: Setting) -> None:
    schedule.LEAST_BYTES = 64 if setting.small_pieces else LEAST_BYTES
    calls_of(dist.group.WORLD).kinds.clear()  # their transports were chosen by it
    if setting.delay:
        time.sleep(setting.delay * dist.get_rank() / dist.get_world_size())


def operands(setting: Setting, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and dy, whole, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    k, n = setting.features

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setting.dtype)

    return random(*setting.leading, k), random(n, k) / 4, random(n), random(*setting.leading, n)


Function = Callable[..., Tensor]
Part = tuple[Tensor | None, Callable[[Tensor], Tensor]]  # ours, and how it is cut from the whole


def whole_results(
    function: Function, named: dict[str, Tensor], dy: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """y and the gradients of an unsharded function, in `dtype`."""
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in named.items()}
    y = function(**leaves)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def compare(
    setting: Setting, function: Function, named: dict[str, Tensor], dy: Tensor, ours: dict[str, Part]
) -> dict[str, float]:
    """Our results against our parts of the whole ones."""
    truth = whole_results(function, named, dy, torch.float64)
    own = whole_results(function, named, dy, setting.dtype)
    return excess(
        setting, {name: (found, part(truth[name]), part(own[name])) for name, (found, part) in ours.items()}
    )


def split(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda t: shard(t, dim)


def same(t: Tensor) -> Tensor:
    return t


def equal(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(map(torch.equal, ours, expected))


def close(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return len(ours) == len(expected) and all(
        float((a - b).norm()) <= tolerance * float(b.norm()) for a, b in zip(ours, expected, strict=True)
    )


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def accumulated(setting: Setting, weight: Tensor) -> Tensor | None:
    """A main_grad; of fp32 it holds something already."""
    if isinstance(setting.main_grad, str):
        return torch.zeros_like(weight)
    return torch.ones_like(weight, dtype=torch.float32) if setting.main_grad else None


def added(weight: Tensor, main_grad: Tensor | None) -> Tensor | None:
    if main_grad is None:
        return weight.grad
    assert weight.grad is None
    return main_grad - 1 if main_grad.dtype == torch.float32 else main_grad


def column(setting: Setting, seed: int = 0) -> dict[str, float]:
    prepare(setting)
    x, w, b, dy = operands(setting, seed)
    tokens = split(0) if setting.sequence_parallel else same
    ours_x, ours_w, ours_b = leaf(tokens(x)), leaf(shard(w, 0)), leaf(shard(b, 0))
    main_grad = accumulated(setting, ours_w)
    options = setting.options | {"main_grad": main_grad, "save_gathered": setting.save_gathered}
    bias, group = ours_b if setting.bias else None, dist.group.WORLD
    ours = column_linear(ours_x, ours_w, bias, group, activation=setting.activation, **options)
    prepare(setting)
    ours.backward(shard(dy, -1))

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ACT[setting.activation](torch.nn.functional.linear(x, w, b if setting.bias else None))

    results = {"y": (ours.detach(), split(-1)), "x": (ours_x.grad, tokens)}
    results["w"] = (added(ours_w, main_grad), split(0))
    if setting.bias:
        results["b"] = (ours_b.grad, split(0))
    return compare(setting, whole, {"x": x, "w": w, "b": b}, dy, results)


def row(setting: Setting, seed: int = 0) -> dict[str, float]:
    prepare(setting)
    x, w, b, dy = operands(setting, seed)
    tokens = split(0) if setting.sequence_parallel else same
    ours_x, ours_w, ours_b = leaf(shard(x, -1)), leaf(shard(w, -1)), leaf(b)
    main_grad = accumulated(setting, ours_w)
    bias, group = ours_b if setting.bias else None, dist.group.WORLD
    ours = row_linear(ours_x, ours_w, bias, group, main_grad=main_grad, **setting.options)
    prepare(setting)
    ours.backward(tokens(dy))

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w, b if setting.bias else None)

    results = {"y": (ours.detach(), tokens), "x": (ours_x.grad, split(-1))}
    results["w"] = (added(ours_w, main_grad), split(-1))
    if setting.bias:
        results["b"] = (ours_b.grad, same)
    return compare(setting, whole, {"x": x, "w": w, "b": b}, dy, results)


def mlp(setting: Setting, seed: int = 0) -> dict[str, float]:
    """activation: a gated one makes the case gated"""
    prepare(setting)
    gate = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}.get(str(setting.activation))
    k, f = setting.features
    x, w_up, b_up, _ = operands(setting, seed)
    _, w_gate, _, _ = operands(setting, seed + 1000)
    _, w_down, b_down, dy = operands(replace(setting, features=(f, k)), seed + 2000)
    named = {"x": x, "w_up": w_up, "w_down": w_down, "b_down": b_down}
    named |= {"w_gate": w_gate} if gate else {"b_up": b_up}

    def whole(x: Tensor, w_up: Tensor, w_down: Tensor, b_down: Tensor, **rest: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        if gate:
            h = ACT[gate](linear(x, rest["w_gate"])) * linear(x, w_up)
        else:
            h = ACT[setting.activation](linear(x, w_up, rest["b_up"]))
        return linear(h, w_down, b_down)

    tokens = split(0) if setting.sequence_parallel else same
    part_of = {"x": tokens, "w_up": split(0), "w_gate": split(0), "b_up": split(0), "w_down": split(1)}
    ours = {name: leaf(part_of.get(name, same)(t)) for name, t in named.items()}
    order = ["w_up", "w_gate", "w_down"] if gate else ["w_up", "w_down"]
    main_grads = {name: accumulated(setting, ours[name]) for name in order}
    options = setting.options | {"activation": setting.activation, "w_gate_shard": ours.get("w_gate")}
    if setting.main_grad:
        options["main_grads"] = list(main_grads.values())
    weights = [ours.get(name) for name in ("w_up", "b_up", "w_down", "b_down")]
    y = parallel_mlp(ours["x"], *weights, dist.group.WORLD, **options)
    prepare(setting)
    y.backward(tokens(dy))
    results = {"y": (y.detach(), tokens)}
    for name, own in ours.items():
        results[name] = (added(own, main_grads[name]) if name in order else own.grad, part_of.get(name, same))
    return compare(setting, whole, named, dy, results)


CASES: dict[str, Callable[..., dict[str, float]]] = {"column": column, "row": row, "mlp": mlp}


def run_all(name: str, settings: Sequence[Setting]) -> list[dict[str, float]]:
    """Many settings in one call: a call of a pool costs more than a tiny product does."""
    return [CASES[name](setting, seed) for seed, setting in enumerate(settings)]


def assert_within(by_rank: Sequence[Sequence[dict[str, float]]], settings: Sequence[object]) -> None:
    """Errors, as parts of what is allowed, of each setting on each rank."""
    for rank, found in enumerate(by_rank):
        for setting, results in zip(settings, found, strict=True):
            too_far = {key: value for key, value in results.items() if not value < 1}
            assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"
