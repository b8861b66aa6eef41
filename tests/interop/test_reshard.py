"""Weights that move between layouts arrive to the bit, and what cannot be moved is refused on all ranks."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.interop.models import built
from tests.on_ranks import of_all, on_ranks
from tpkernels import create_parallel_state, plan_groups, reshard, use
from tpkernels.comm.transports import select
from tpkernels.interop.full_state_dict import full_state_dict

KINDS = ("llama", "gpt2", "odd")


def built_over(kind, tensor, seed):
    """The same model for every number of tensor-parallel ranks, with a state of its own."""
    state = create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))
    with use(state):
        return built(kind, seed)


def content(model):
    """Full tensors, on all ranks."""
    return of_all(full_state_dict(model))[0]


def unequal(found, expected):
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


def moving_by(way):
    return patch.object(select, "requested_transport", way)


@on_ranks(4)
@pytest.mark.parametrize("way", ["auto", "c10d"])
def test_layouts_in_turn_have_equal_bits(way):
    for kind in KINDS:
        expected = content(model := built_over(kind, 4, seed=1))
        for tensor in (1, 2, 4):
            other = built_over(kind, tensor, seed=2)
            assert unequal(content(other), expected)
            with moving_by(way):
                moved = reshard(model, to=other)
            assert unequal(content(other), expected) == []
            read, received = (sum(each) for each in zip(*of_all((moved.read, moved.received)), strict=True))
            # a rank of TP 1 holds all that it needs
            assert (read > 0, received > 0) == (tensor != 2 and way == "auto", tensor != 2 and way == "c10d")
            model = other
