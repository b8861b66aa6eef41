"""Which ways move a shape, how a choice of one is named, and which results are wrong."""

from unittest.mock import patch

import pytest
import torch

from tpkernels.comm import tensor_parallel
from tpkernels.ops.tensor_parallel import ways
from tpkernels.ops.tensor_parallel.ways import Way, mismatch

MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("purpose", "width", "in_memory", "names"),
    [
        ("gathers", 8, False, ["1 collective", "2 collectives"]),
        ("gathers", 0, False, ["1 collective"]),
        ("gathers", 0, True, ["1 collective", "symmetric"]),
        ("reduces", 0, True, ["1 collective", "symmetric", "symmetric in 1 round"]),
        (
            *("gathers", 8, True),
            ["1 collective", "2 collectives", "symmetric", "symmetric in 1 round", "symmetric in 2 rounds"],
        ),
    ],
)
def test_ways_that_are_possible_follow_from_sizes(purpose, width, in_memory, names):
    """Rounds are those that divide two ranks, and more than one only where a product follows."""
    moved = ways.Moved("op", purpose, 16, 24, torch.float32, torch.device("cuda"), width)
    found = ways.possible_ways(moved, 2, Way(1), (), in_memory=in_memory)
    assert sorted(way.name for way in found) == names


@pytest.mark.parametrize("by_backend", [False, True])
def test_over_collectives_all_is_summed_in_one_way_of_ours(by_backend):
    moved = ways.Moved("op", "reduces", 16, 24, torch.float32, torch.device("cuda"), 8, to_all=True)
    found = ways.possible_ways(moved, 2, Way(2), (), in_memory=False, by_backend=by_backend)
    assert [way.name for way in found] == ["2 collectives", *["the backend's sum"] * by_backend]


def test_a_way_is_kept_apart_by_who_may_sum():
    """What was timed among more ways is not taken where one of them is not allowed, nor the reverse."""
    moved = ways.Moved("op", "reduces", 16, 24, torch.float32, torch.device("cuda"), 8)
    keys = {ways.key_of(moved._replace(to_all=to_all), 2, 1) for to_all in (False, True)}
    with patch.object(tensor_parallel, "backend_sums", "timed"):
        keys |= {ways.key_of(moved._replace(to_all=to_all), 2, 1) for to_all in (False, True)}
    assert len(keys) == 4


def test_a_way_timed_with_tf32_is_kept_apart():
    """A product that is faster hides less of a transfer."""
    moved, before = (
        ways.Moved("op", "gathers", 16, 24, torch.float32, torch.device("cuda"), 8),
        MATMUL.fp32_precision,
    )
    try:
        MATMUL.fp32_precision = "tf32"
        assert ways.key_of(moved, 2, 1) == "op gathers float32/tf32 16x24x8 2 ranks 1 machines"
        assert ways.key_of(moved._replace(dtype=torch.bfloat16), 2, 1).startswith("op gathers bfloat16 16x")
    finally:
        MATMUL.fp32_precision = before


def test_numbers_that_overflow_decide_nothing():
    """In the first steps of fp16 the caller's own numbers do; what is left tells right from wrong."""
    expected = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    assert not mismatch(torch.tensor([1.0, float("nan"), 3.0, 2.0]), expected)
    assert "off by" in mismatch(torch.tensor([1.0, float("inf"), float("nan"), 3.0]), expected)
    assert "off by" in mismatch(torch.tensor([1.0, 0.0, 0.0, float("nan")]), expected)
