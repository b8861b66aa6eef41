"""With TP-invariance buckets refuse what would be added in an order that depends on ranks or places."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.ways import both_ways
from tests.checks import error_of
from tests.segments import tp_invariance
from tpkernels import GradientBuckets

ELEMENTS = 7 * 600


def reduced(reduce):
    """The same seven gradients of each rank, over and over: how many results each has."""
    weight = nn.Parameter(torch.zeros(ELEMENTS))
    buckets = GradientBuckets([("weight", weight)], dist.group.WORLD, average=False, reduce=reduce)
    values = torch.randn(7, generator=torch.Generator().manual_seed(dist.get_rank()))
    (weight * values.repeat(ELEMENTS // 7)).sum().backward()
    buckets.finish()
    shards = [torch.empty_like(shard) for shard in buckets.gradient_shards() * dist.get_world_size()]
    dist.all_gather(shards, buckets.gradient_shards()[0].contiguous())
    full = torch.cat(shards)[:ELEMENTS] if reduce == "reduce_scatter" else weight.grad
    return max(len(full[first::7].unique()) for first in range(7))


@both_ways
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_sums_of_two_ranks_do_not_depend_on_places(reduce, ranks2):
    assert ranks2.run(reduced, reduce) == [1, 1]


@both_ways
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_sums_of_more_do_where_gloo_adds(reduce, ranks4):
    """Why they are refused. Should this ever fail, gloo adds in one order, and they need not be."""
    places = min(ranks4.run(reduced, reduce))
    assert places > 1 if ranks4.way == "c10d" else places == 1


def refused(marked):
    weight = nn.Parameter(torch.zeros(8))
    weight.sequence_parallel = marked
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    group, tensor_group = (alone, dist.group.WORLD) if marked else (dist.group.WORLD, alone)
    with tp_invariance(4):
        return error_of(GradientBuckets, [("weight", weight)], group, tensor_parallel_group=tensor_group)


@both_ways
def test_more_than_two_data_ranks_are_refused_where_backends_add(ranks2, ranks4):
    assert ranks2.run(refused, False) == [("nothing", "")] * 2
    for kind, message in ranks4.run(refused, False):
        if ranks4.way == "shared":  # added up in the order of ranks
            assert kind == "nothing", message
            continue
        assert kind == "ValueError"
        assert "1 or 2 data-parallel ranks with TP-invariance, got 4 (TPKERNELS_TRANSPORT=c10d)" in message


def test_marked_parameters_are_refused(ranks2):
    for kind, message in ranks2.run(refused, True):
        assert kind == "ValueError"
        assert "'weight' is marked sequence_parallel: its gradient would be added over tensor-" in message
