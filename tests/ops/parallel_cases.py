"""What ranks run in tests of ops over a group: each computes its shard, and compares with the whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.cases import ACT
from tpkernels.comm import pieces
from tpkernels.ops.column_linear import column_linear
from tpkernels.ops.row_linear import row_linear

# ‖ours - truth‖ / ‖truth‖, in float64: of results, not of single products, hence twice the kernels' bound
BOUND = {torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = True
    overlap: bool = True
    bias: bool = True
    activation: str | None = None
    main_grad: bool = False
    save_gathered: bool = False
    small_pieces: bool = True  # cut even tiny shards
    leading: tuple[int, ...] = (16,)
    features: tuple[int, int] = (24, 32)
    delay: float = 0.0  # seconds: of each rank a different share


def shard(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def errors(results: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Relative distance of each result from the truth; NaN where there is one."""
    found = {}
    for name, (ours, truth) in results.items():
        assert ours.shape == truth.shape, f"{name}: {tuple(ours.shape)}, not {tuple(truth.shape)}"
        scale = truth.double().norm().clamp_min(1e-30)
        found[name] = float((ours.double() - truth).norm() / scale)
    return found


def prepare(setting: Setting) -> None:
    if setting.small_pieces:
        pieces.LEAST_BYTES = 64
    if setting.delay:
        time.sleep(setting.delay * dist.get_rank() / dist.get_world_size())


def operands(setting: Setting, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and dy, whole, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    k, n = setting.features

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(setting.dtype)

    return random(*setting.leading, k), random(n, k) / 4, random(n), random(*setting.leading, n)


def truth_of(setting: Setting, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dw, db of the unsharded linear in float64."""
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    y = ACT[setting.activation](
        torch.nn.functional.linear(leaves[0], leaves[1], leaves[2] if setting.bias else None)
    )
    grads = torch.autograd.grad(y, leaves, dy.double(), allow_unused=True)
    return [y.detach(), *(torch.zeros(0) if grad is None else grad for grad in grads)]


def column(setting: Setting, seed: int = 0) -> dict[str, float]:
    prepare(setting)
    x, w, b, dy = operands(setting, seed)
    y, dx, dw, db = truth_of(setting, x, w, b, dy)
    ours_x = (shard(x, 0) if setting.sequence_parallel else x).clone().requires_grad_()
    ours_w, ours_b = (shard(t, 0).clone().requires_grad_() for t in (w, b))
    main_grad = torch.ones_like(ours_w, dtype=torch.float32) if setting.main_grad else None
    ours = column_linear(
        ours_x,
        ours_w,
        ours_b if setting.bias else None,
        dist.group.WORLD,
        activation=setting.activation,
        sequence_parallel=setting.sequence_parallel,
        overlap=setting.overlap,
        main_grad=main_grad,
        save_gathered=setting.save_gathered,
    )
    prepare(setting)
    ours.backward(shard(dy, -1))
    results = {
        "y": (ours.detach(), shard(y, -1)),
        "dx": (ours_x.grad, shard(dx, 0) if setting.sequence_parallel else dx),
        "dw": (ours_w.grad if main_grad is None else main_grad - 1, shard(dw, 0)),
    }
    if main_grad is not None:
        assert ours_w.grad is None
    if setting.bias:
        results["db"] = (ours_b.grad, shard(db, 0))
    return errors(results)


def row(setting: Setting, seed: int = 0) -> dict[str, float]:
    prepare(setting)
    x, w, b, dy = operands(setting, seed)
    y, dx, dw, db = truth_of(setting, x, w, b, dy)
    ours_x, ours_w = (shard(t, -1).clone().requires_grad_() for t in (x, w))
    ours_b = b.clone().requires_grad_()
    main_grad = torch.ones_like(ours_w, dtype=torch.float32) if setting.main_grad else None
    ours = row_linear(
        ours_x,
        ours_w,
        ours_b if setting.bias else None,
        dist.group.WORLD,
        sequence_parallel=setting.sequence_parallel,
        overlap=setting.overlap,
        main_grad=main_grad,
    )
    prepare(setting)
    ours.backward(shard(dy, 0) if setting.sequence_parallel else dy)
    results = {
        "y": (ours.detach(), shard(y, 0) if setting.sequence_parallel else y),
        "dx": (ours_x.grad, shard(dx, -1)),
        "dw": (ours_w.grad if main_grad is None else main_grad - 1, shard(dw, -1)),
    }
    if setting.bias:
        results["db"] = (ours_b.grad, db)
    return errors(results)


CASES: dict[str, Callable[..., dict[str, float]]] = {"column": column, "row": row}


def run_all(name: str, settings: list[tuple[Setting, int]]) -> list[dict[str, float]]:
    """Many settings in one call: a call of a pool costs more than a tiny product does."""
    return [CASES[name](setting, seed) for setting, seed in settings]
