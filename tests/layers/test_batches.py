"""What a model is called with is the same on all ranks of a tensor group, or named."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.layers.small import Block
from tests.on_ranks import on_ranks
from tpkernels import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    check,
    initialize_model_parallel,
    parallelize,
)
from tpkernels.layers import batches, replicas

WORDS = (
    r"^inputs of {root}: other data on the ranks of a tensor group: give each the same batch, by a sampler "
    r"over state.rank_in\('dp'\) of state.size\('dp'\). rank 0 has '{name}' .*; rank 1 has '{name}' "
)


@dataclass
class Batch:
    ids: Tensor
    extra: dict[str, list[Tensor]]


class Masked(nn.Module):
    """Masks act between layers, where no rank sees another's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(8, 4)
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **_: Any) -> Tensor:
        ids = input_ids.ids if isinstance(input_ids, Batch) else input_ids
        return self.down(self.up(self.table(ids))[0])[0]


class Features(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(4, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.column(x)[0]


def sequential() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), Features())


def checked(root: nn.Module) -> nn.Module:
    check(root)
    return root


def call(root: nn.Module, *args: Any, words: str | None = None, **kwargs: Any) -> None:
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        root(*args, **kwargs)


@on_ranks(2)
def test_other_inputs_are_named():
    initialize_model_parallel(2)
    torch.manual_seed(0)
    rank, ids = dist.get_rank(), torch.arange(6)
    own, x = torch.ones(6, dtype=torch.bool) * rank, torch.ones(2, 4)
    hidden = torch.ones(6, 1, 4, requires_grad=True)
    own_hidden, mask = torch.ones(3, 1, 4) + rank, torch.ones(6, 6) * rank
    nested = Batch(ids, {"masks": [ids, own]})
    split = parallelize(nn.Sequential(nn.Linear(4, 8)), plan={"0": "head"})
    cases: list[tuple[nn.Module, str, str, tuple[Any, ...], dict[str, Any]]] = [
        (checked(Masked()), "Masked", "attention_mask", (ids,), {"attention_mask": own}),
        (checked(Masked()), "Masked", "attention_mask", (ids, own), {}),
        (checked(Masked()), "Masked", r"input_ids.extra\['masks'\]\[1\]", (nested,), {}),
        (checked(Masked()), "Masked", r"batch\['pixels'\]", (ids,), {"batch": OrderedDict(pixels=x + rank)}),
        (checked(sequential()), "Sequential", "input", (x + rank,), {}),
        (checked(torch.compile(Features(), backend="eager")), "Features", "x", (x + rank,), {}),
        (Features(), "ColumnParallelLinear", "input_", (x + rank,), {}),
        (RowParallelLinear(4, 8), "RowParallelLinear", "input_", (x + rank,), {}),
        (ParallelMLP(4, 8), "ParallelMLP", "input_", (x + rank,), {}),
        (ParallelAttention(4, 2), "ParallelAttention", "attention_mask", (hidden, mask), {}),
        (
            ParallelAttention(4, 2, sequence_parallel=True),
            "ParallelAttention",
            "attention_mask",
            (own_hidden, mask),
            {},
        ),
        (split, "Sequential", "input", (x + rank,), {}),
    ]
    for root, said, name, args, kwargs in cases:
        call(root, *args, **kwargs, words=WORDS.format(root=said, name=name))
    with torch.no_grad():  # integers also where nothing is learned
        call(checked(Masked()), ids, own, words=WORDS.format(root="Masked", name="attention_mask"))


@on_ranks(2)
def test_in_later_calls_it_is_told_in_the_4th_and_every_100th():
    initialize_model_parallel(2)
    model, ids = checked(Masked()), torch.arange(6)
    words = WORDS.format(root="Masked", name="attention_mask")
    for number in range(1, 5):
        call(model, ids, ids + dist.get_rank() * (number > 2), words=words if number == 4 else None)
    with patch.object(replicas, "steps_between_checks", 3):
        call(model, ids, ids + dist.get_rank())
        call(model, ids, ids + dist.get_rank(), words=words)  # the 6th
        call(copy.deepcopy(model), ids, ids + dist.get_rank(), words=words)  # its first
    with patch.object(replicas, "steps_between_checks", 0):
        call(checked(Masked()), ids, ids + dist.get_rank())


@on_ranks(2)
def test_inputs_that_are_meant_to_differ_are_left_alone():
    initialize_model_parallel(2)
    rank = dist.get_rank()
    x, ids = torch.ones(2, 4) + rank, torch.arange(6)
    mesh = init_device_mesh("cpu", (2,))
    split = DTensor.from_local(x, mesh, [Shard(0)])
    for module in (Block(), checked(Block())):
        module(torch.ones(2, 3, 24) + rank)  # a norm is the first to take this rank's tokens
    for module in (Features(sequence_parallel=True), checked(Features(sequence_parallel=True))):
        module(x)
    row = RowParallelLinear(8, 4, input_is_parallel=True)
    row(x)
    checked(row)(x)
    checked(Masked())(ids, {"split": split, "text": "no tensor"})
    checked(Features())(x.clone().requires_grad_())
    with torch.no_grad():
        checked(Masked())(ids, past_key_values=[(x, x)])


@on_ranks(4)
def test_experts_over_data_ranks_are_left_alone():
    initialize_model_parallel(2)
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    Features(state=groups[dist.get_rank() % 2])(torch.ones(2, 4) + dist.get_rank())


@on_ranks(2)
def test_wrappers_and_checkpoints_are_one_call():
    initialize_model_parallel(2)
    model = sequential()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wrapped = DistributedDataParallel(model, process_group=alone)
    check(wrapped)
    checkpoint(wrapped, torch.ones(2, 4), use_reentrant=False).sum().backward()
    found = [hook for m in wrapped.modules() for hook in m._forward_pre_hooks.values()]
    assert [hook._calls for hook in found] == [1]  # none of layers that get activations


def test_of_a_huge_tensor_some_elements_are_taken():
    huge = torch.zeros(1).expand(8, 2**12, 2**12)
    taken = batches._some_of(huge)
    assert batches._MOST_ELEMENTS / 4 < taken.numel() <= batches._MOST_ELEMENTS
    assert taken.untyped_storage().nbytes() == 4
    small = torch.arange(6.0).view(2, 3)
    assert batches._some_of(small).equal(small)
