"""What ranks run in tests of the seven regions: each against its meaning in plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import schedule
from tpkernels.ops.tensor_parallel import mappings


def _everybody(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Each rank's tensor, known to all: whole numbers, so that sums are exact in any dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).float() for _ in range(dist.get_world_size())]


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _ours(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda whole: whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _mine(tensors: list[Tensor]) -> Tensor:
    return tensors[dist.get_rank()]


def _part_of_mine(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: _ours(dim)(_mine(tensors))


def _all(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: torch.cat(tensors, dim)


def _part_of_sum(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: _ours(dim)(_sum(tensors))


MEANING = {  # of everybody's x forward, of everybody's dy backward
    "copy_to_region": (_mine, _sum),
    "reduce_from_region": (_sum, _mine),
    "scatter_to_region": (_part_of_mine(-1), _all(-1)),
    "gather_from_region": (_all(-1), _part_of_mine(-1)),
    "scatter_to_sequence_region": (_part_of_mine(0), _all(0)),
    "gather_from_sequence_region": (_all(0), _part_of_sum(0)),
    "reduce_scatter_to_sequence_region": (_part_of_sum(0), _all(0)),
}


def wrong_regions(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[str]:
    """Which results differ from their meaning in any bit."""
    with patch.object(schedule, "LEAST_BYTES", 32):  # cut even tiny shards
        return _wrong_regions(shapes, dtypes)


def _wrong_regions(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> list[str]:
    wrong = []
    for name, (forward, backward) in MEANING.items():
        for shape in shapes:
            for dtype in dtypes:
                everybody = [t.to(dtype) for t in _everybody(shape, 1)]
                x = _mine(everybody).clone().requires_grad_(dtype.is_floating_point)
                before = x.detach().clone()
                y = getattr(mappings, name)(x, dist.group.WORLD)
                expected = forward(everybody)
                if not torch.equal(y, expected) or y.dtype != dtype:
                    wrong.append(f"{name} {shape} {dtype}: forward")
                if not torch.equal(x, before):
                    wrong.append(f"{name} {shape} {dtype}: input changed")
                if dtype.is_floating_point:
                    dys = [t.to(dtype) for t in _everybody(tuple(expected.shape), 2)]
                    (dx,) = torch.autograd.grad(y, x, _mine(dys))
                    if not torch.equal(dx, backward(dys)):
                        wrong.append(f"{name} {shape} {dtype}: backward")
    return wrong


def whole_gradient_is_split() -> bool:
    """gather_from_sequence_region with a gradient that all ranks have whole."""
    x = torch.randn(3, 2, requires_grad=True)
    y = mappings.gather_from_sequence_region(x, dist.group.WORLD, tensor_parallel_output_grad=False)
    dy = torch.arange(float(y.numel())).view_as(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    return torch.equal(dx, _ours(0)(dy))


def parts_are_their_own_memory() -> bool:
    """Writing into a part leaves the whole as it was, of a single row too, whose parts are contiguous."""
    ranks = dist.get_world_size()
    for scatter in (mappings.scatter_to_region, mappings.scatter_to_sequence_region):
        x = torch.ones((1, 2 * ranks) if scatter is mappings.scatter_to_region else (ranks, 2))
        scatter(x, dist.group.WORLD).zero_()
        if not x.eq(1).all():
            return False
    return True


def written_into_differ() -> list[str]:
    """Which regions' results cannot be written into, or give other gradients when they are."""
    wrong = []
    for name in MEANING:
        if name == "copy_to_region":  # its result is its input, as in Megatron
            continue
        for shape in ((4, 8), (4, 3, 8)):
            gradients = []
            for in_place in (False, True):
                x = _mine(_everybody(shape, 3)).requires_grad_()
                y = getattr(mappings, name)(x, dist.group.WORLD)
                try:
                    torch.relu_(y).sum().backward() if in_place else y.relu().sum().backward()
                except RuntimeError as error:
                    wrong.append(f"{name} {shape}: {error}")
                gradients.append(x.grad)
            if any(g is None for g in gradients) or not torch.equal(*gradients):
                wrong.append(f"{name} {shape}: gradient")
    return wrong


def compiled_regions_differ() -> list[str]:
    """Which regions compute other bits under torch.compile than eagerly, before a product or a view."""
    wrong = []
    for name, then in product(MEANING, (lambda y: y * 2, lambda y: y.view(-1))):
        region = getattr(mappings, name)
        torch._dynamo.reset()

        def run(
            x: Tensor, region: Callable[..., Tensor] = region, then: Callable[[Tensor], Tensor] = then
        ) -> Tensor:
            return then(region(x, dist.group.WORLD))

        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (4, 8):
            x = torch.randn(rows, 4, 8, requires_grad=True)
            results = []
            for function in (run, compiled):
                y = function(x)
                results.append([y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))])
            if not all(map(torch.equal, *results)):
                wrong.append(f"{name} of {rows} rows")
    return wrong


def uneven(name: str) -> str:
    try:
        getattr(mappings, name)(torch.randn(3, 5), dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return "no error"
