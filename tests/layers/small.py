"""A small block of layers, what to feed it, and what its shards are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ops.parallel_cases import excess, same, whole_results
from tpkernels import ColumnParallelLinear, ParallelMLP, RMSNorm, RowParallelLinear, initialize_model_parallel
from tpkernels.comm import schedule
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import tensor_world

K, N = 24, 48
GATE = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}

Cut = Callable[[Tensor], Tensor]


def cut(dim: int, stride: int = 1) -> Cut:
    """This rank's shard."""

    def shard(full: Tensor) -> Tensor:
        world = tensor_world()
        return torch.cat(full.tensor_split(world.size * stride, dim)[world.rank :: world.size], dim)

    return shard


def cut_of(parameter: Tensor) -> Cut:
    attributes = Attributes.of(parameter)
    if not attributes.tensor_model_parallel:
        return same
    return cut(attributes.partition_dim, attributes.partition_stride)


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """What arrived, summed over ranks where the parameter says so."""
    if hasattr(parameter, "main_grad"):
        assert parameter.grad is None
        return parameter.main_grad - 1
    gradient = parameter.grad
    if gradient is not None and parameter.sequence_parallel:
        dist.all_reduce(gradient, group=tensor_world().group)
    return gradient


class Setting(Protocol):
    dtype: torch.dtype
    sequence_parallel: bool


def errors(
    setting: Setting,
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    full: Callable[..., Tensor],
    x: Tensor,
    dy: Tensor,
    *,
    cut_y: Cut | None = None,
    fused: bool = False,
    joined: tuple[str, ...] = (),
) -> dict[str, float]:
    """Of the output and all gradients, as parts of what is allowed; parameters get full numbers first.

    run: `model`, on this rank's tokens; full: the same of full tensors, x and the parameters by name
    cut_y: by default as the tokens are; fused: into main_grad; joined: gradients compared as one
    """
    tokens = cut(0) if setting.sequence_parallel else same
    wide = torch.promote_types(setting.dtype, torch.float32)
    named, cuts = {"x": x}, {"x": tokens, "y": cut_y or tokens}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        attributes, sizes = Attributes.of(parameter), list(parameter.shape)
        if attributes.tensor_model_parallel:
            sizes[attributes.partition_dim] *= tensor_world().size
        named[name], cuts[name] = drawn(tuple(sizes), 10 + number, setting.dtype) / 4, cut_of(parameter)
        with torch.no_grad():
            parameter.copy_(cuts[name](named[name]))
        if fused and parameter.ndim == 2:
            vars(parameter)["main_grad"] = torch.ones_like(parameter, dtype=wide)
    own_x = tokens(x).clone(memory_format=torch.preserve_format).requires_grad_()
    y = run(own_x)
    y.backward(cuts["y"](dy))
    ours = {"y": y.detach(), "x": own_x.grad}
    ours |= {name: gradient_of(parameter) for name, parameter in model.named_parameters()}
    truth, own = (whole_results(full, named, dy, dtype) for dtype in (torch.float64, setting.dtype))
    found = {name: (each, cuts[name](truth[name]), cuts[name](own[name])) for name, each in ours.items()}
    if joined:
        each = zip(*(found.pop(name) for name in joined), strict=True)
        found[" and ".join(joined)] = tuple(map(torch.cat, each))
    return excess(setting, found)  # type: ignore[arg-type]


def require_within(errors_of: Callable[[Setting], dict[str, float]], settings: list[Setting]) -> None:
    """Many settings in one call, which costs more than a tiny layer does."""
    for setting in settings:
        for name, error in errors_of(setting).items():
            assert error < 1, f"{setting}: {name} is off by {error} of what is allowed"


class Block(nn.Module):
    """Everything that layers have, once."""

    def __init__(self, *, fused: bool = False, sequence_parallel: bool = True) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "gradient_accumulation_fusion": fused}
        self.norm = RMSNorm(K, sequence_parallel=sequence_parallel)
        self.up = ColumnParallelLinear(K, N, gather_output=False, activation="gelu", **options)
        self.down = RowParallelLinear(N, K, input_is_parallel=True, **options)
        self.mlp = ParallelMLP(K, N, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(self.norm(x))[0])[0]
        return x + self.mlp(x)[0]


def joined_world(tensor: int | None = None) -> None:
    """All ranks share the layers, or `tensor` at a time; even tiny shards are cut into chunks."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(tensor or dist.get_world_size())


def built(*, fused: bool = False, sequence_parallel: bool = True) -> Block:
    joined_world()
    torch.manual_seed(7)
    return Block(fused=fused, sequence_parallel=sequence_parallel)


def tokens(seed: int = 1) -> Tensor:
    return cut(0)(drawn((8, 3, K), seed))


def outcome(model: Callable[[Tensor], Tensor], module: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters, summed over the batches."""
    module.zero_grad()
    results = []
    for batch in batches:
        x = batch.clone().requires_grad_()
        y = model(x)
        y.square().sum().backward()
        results += [y.detach(), x.grad]
    return results + [p.grad.clone() for p in module.parameters() if p.grad is not None]
