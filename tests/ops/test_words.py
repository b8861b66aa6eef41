"""Rows in fp8 travel as words: a gather brings them bit for bit, over each transport, whoever waits."""

from __future__ import annotations

import pytest
import torch

from tests.ops import words_cases as cases

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

WAYS = [
    ("c10d", "torch"),
    ("c10d", "triton"),
    ("shared", "torch"),
    ("shared", "triton"),
    ("stand-in", "triton"),
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "sequential"])
@pytest.mark.parametrize(
    ("world", "transport", "backend"),
    [("ranks2", *way) for way in WAYS] + [("ranks4", "shared", "torch")],
)
def test_words_arrive_bit_for_bit(request, world, transport, backend, overlap):
    ranks, rows = request.getfixturevalue(world), 8
    for sizes, wrong in ranks.run(cases.gathered_words, transport, backend, overlap, rows):
        assert wrong == [0] * 9
        assert sum(sizes) == 3 * rows * ranks.world_size
        assert (len(sizes) > 3) is overlap, "chunks, or all at once"


@pytest.mark.parametrize("transport", ["shared", "stand-in"])
def test_words_have_no_sum(ranks2, transport):
    for message in ranks2.run(cases.summed_words, transport):
        assert "kernels that wait take bfloat16, float16 and float32, got torch.int32" in message
