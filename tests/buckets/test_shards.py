"""Gradients of shards are not reduced over ranks that hold other shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import chain
from tests.buckets.ways import on_ranks
from tpkernels import GradientBuckets
from tpkernels.buckets.supported import problem_over


def named(holders: tuple[int, ...] = (), *, split: bool = False, marked: bool = False):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.tensor_model_parallel, parameter.sequence_parallel = split, marked
    parameter.tensor_parallel_ranks = holders
    return [("w", parameter)]


def problem(pairs, ranks, tensor_parallel_ranks=(), average=True):
    found = problem_over(pairs, ranks, tensor_parallel_ranks=tensor_parallel_ranks, average=average)
    return "" if found is None else found[1]


def test_the_data_parallel_group_is_named_to_who_gives_another():
    text = problem(named((2, 3), split=True), [0, 1, 2, 3])
    assert text.startswith("GradientBuckets over ranks 0, 1, 2, 3 would average different shards")
    assert "tensor-parallel ranks 2, 3 each hold other rows or columns of 'w'" in text
    assert 'state.process_group("dp") or mesh["dp"]' in text
    assert "there is nothing to average" in problem(named((0, 1, 2, 3), split=True), [1, 2])
    # of shards without layers the group that was given tells
    assert "ranks 0, 1 each hold" in problem(named(split=True), range(4), tensor_parallel_ranks=[0, 1])
    # a large group is not listed whole
    assert "over ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., 63 would" in problem(named((0, 1), split=True), range(64))
    assert "and would average; pass" in problem(named((0, 1), marked=True), [0, 1])
    assert "and would sum again; pass" in problem(named(marked=True), [0, 1], [0, 1], average=False)


@pytest.mark.parametrize(
    ("marks", "ranks", "given", "average"),
    [
        ({"split": True}, [0, 2], [0, 1], True),  # data-parallel ranks
        ({"split": True}, [0], [0, 1], True),  # a group of one
        ({"split": True}, [0, 1], (), True),  # nobody knows of which ranks it is a shard
        ({}, [0, 1], [0, 1], True),  # equal copies
        ({"marked": True}, [0, 2], [0, 1], True),
        ({"marked": True}, [0, 1], (), False),  # their sum, by itself
    ],
)
def test_what_is_right_is_taken(marks, ranks, given, average):
    assert problem(named(**marks), ranks, given, average) == ""


@on_ranks(2)
def test_a_tensor_parallel_group_on_some_ranks_is_told_on_all():
    """One rank passes a tensor-parallel group, which is the whole world here; the other none."""
    group = dist.group.WORLD
    given = group if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match=r"tensor_parallel_group=of 2 ranks.*tensor_parallel_group=None"):
        GradientBuckets(chain(1), group, tensor_parallel_group=given)


@on_ranks(2)
def test_all_ranks_refuse_alike():
    """Rank 0 has a model whose weight is a shard."""
    module = chain(1)
    if dist.get_rank() == 0:
        module[0].weight.tensor_model_parallel, module[0].weight.tensor_parallel_ranks = True, (0, 1)
    words = "on rank 0: GradientBuckets over ranks 0, 1 would average different shards"
    with pytest.raises(ValueError, match=words):
        GradientBuckets(module, dist.group.WORLD)
