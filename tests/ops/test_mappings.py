"""The seven regions, forward and backward, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import shard
from tpkernels.comm import schedule
from tpkernels.ops.tensor_parallel import mappings


def _everybody(shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """Each rank's tensor, known to all: whole numbers, so that sums are exact in any dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).float() for _ in range(dist.get_world_size())]


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _mine(tensors: list[Tensor]) -> Tensor:
    return tensors[dist.get_rank()]


def _part_of_mine(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: shard(_mine(tensors), dim)


def _all(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: torch.cat(tensors, dim)


def _part_of_sum(dim: int) -> Callable[[list[Tensor]], Tensor]:
    return lambda tensors: shard(_sum(tensors), dim)


MEANING = {  # of everybody's x forward, of everybody's dy backward
    "copy_to_region": (_mine, _sum),
    "reduce_from_region": (_sum, _mine),
    "scatter_to_region": (_part_of_mine(-1), _all(-1)),
    "gather_from_region": (_all(-1), _part_of_mine(-1)),
    "scatter_to_sequence_region": (_part_of_mine(0), _all(0)),
    "gather_from_sequence_region": (_all(0), _part_of_sum(0)),
    "reduce_scatter_to_sequence_region": (_part_of_sum(0), _all(0)),
}


@patch.object(schedule, "LEAST_BYTES", 32)  # cut even tiny shards
def assert_regions_mean_what_they_say(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
    for (name, (forward, backward)), shape, dtype in product(MEANING.items(), shapes, dtypes):
        everybody, case = [t.to(dtype) for t in _everybody(shape, 1)], f"{name} {shape} {dtype}"
        x = _mine(everybody).clone().requires_grad_(dtype.is_floating_point)
        before = x.detach().clone()
        y = getattr(mappings, name)(x, dist.group.WORLD)
        expected = forward(everybody)
        assert torch.equal(y, expected), case
        assert y.dtype == dtype, case
        assert torch.equal(x, before), f"{case}: input changed"
        if dtype.is_floating_point:
            dys = [t.to(dtype) for t in _everybody(tuple(expected.shape), 2)]
            (dx,) = torch.autograd.grad(y, x, _mine(dys))
            assert torch.equal(dx, backward(dys)), f"{case}: backward"


@on_ranks(2)
def test_a_gradient_that_all_ranks_have_whole_is_split():
    x = torch.randn(3, 2, requires_grad=True)
    y = mappings.gather_from_sequence_region(x, dist.group.WORLD, tensor_parallel_output_grad=False)
    dy = torch.arange(float(y.numel())).view_as(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, shard(dy, 0))


@on_ranks(2)
def test_writing_into_a_part_leaves_the_whole_as_it_was():
    """Of a single row too, whose parts are contiguous."""
    for name, shape in (("scatter_to_region", (1, 4)), ("scatter_to_sequence_region", (2, 2))):
        x = torch.ones(shape)
        getattr(mappings, name)(x, dist.group.WORLD).zero_()
        assert x.eq(1).all()


@on_ranks(2)
def test_results_can_be_written_into():
    for name, shape in product(MEANING, [(4, 8), (4, 3, 8)]):
        if name == "copy_to_region":  # its result is its input, as in Megatron
            continue
        gradients = []
        for relu in (torch.relu, torch.relu_):
            x = _mine(_everybody(shape, 3)).requires_grad_()
            relu(getattr(mappings, name)(x, dist.group.WORLD)).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients), f"{name} {shape}"


def everywhere(*xs: Tensor) -> list[Tensor]:
    """Each region, whose result is multiplied and viewed."""
    results = []
    for x, name in zip(xs, MEANING, strict=True):
        y = getattr(mappings, name)(x, dist.group.WORLD)
        results += [y * 2, y.view(-1)]
    return results


@on_ranks(2)
def test_one_graph_of_all_regions_computes_the_same_bits_for_any_number_of_rows():
    torch._dynamo.reset()
    compiled = torch.compile(everywhere, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 8):
        found = []
        given = [torch.randn(rows, 4, 8) for _ in MEANING]
        for function in (everywhere, compiled):
            leaves = [t.clone().requires_grad_() for t in given]
            ys = function(*leaves)
            torch.autograd.backward(ys, [y.detach().cos() for y in ys])
            found.append(list(zip(ys[0::2], ys[1::2], [leaf.grad for leaf in leaves], strict=True)))
        for name, eager, ours in zip(MEANING, *found, strict=True):
            assert all(map(torch.equal, eager, ours)), f"{name} of {rows} rows"


@on_ranks(2)
def test_sizes_that_ranks_do_not_divide_are_refused():
    for name in ("scatter_to_region", "scatter_to_sequence_region", "reduce_scatter_to_sequence_region"):
        with pytest.raises(ValueError, match="divisible by the 2 ranks"):
            getattr(mappings, name)(torch.randn(3, 5), dist.group.WORLD)


@on_ranks()
def test_regions_mean_what_they_say():
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
    assert_regions_mean_what_they_say([(8, 4), (4, 3, 8), (12,), (4, 0)], dtypes)
