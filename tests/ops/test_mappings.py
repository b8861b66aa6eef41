"""The seven regions, forward and backward, to the bit."""

import pytest
import torch

from tests.ops import region_cases


@pytest.mark.parametrize("world", ["ranks1", "ranks2", "ranks4"])
def test_regions_mean_what_they_say(request, world):
    shapes = [(8, 4), (4, 3, 8), (12,), (4, 0)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
    for wrong in request.getfixturevalue(world).run(region_cases.wrong_regions, shapes, dtypes):
        assert not wrong


def test_parts_are_their_own_memory(ranks2):
    assert all(ranks2.run(region_cases.parts_are_their_own_memory))


def test_results_can_be_written_into(ranks2):
    assert ranks2.run(region_cases.written_into_differ) == [[], []]


def test_compiled_regions_give_the_same_bits(ranks2):
    assert ranks2.run(region_cases.compiled_regions_differ, timeout=180) == [[], []]


def test_a_whole_gradient_is_split(ranks2):
    assert all(ranks2.run(region_cases.whole_gradient_is_split))


@pytest.mark.parametrize(
    "name", ["scatter_to_region", "scatter_to_sequence_region", "reduce_scatter_to_sequence_region"]
)
def test_sizes_that_ranks_do_not_divide_are_refused(ranks2, name):
    for message in ranks2.run(region_cases.uneven, name):
        assert "divisible by the 2 ranks" in message
