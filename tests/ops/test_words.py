"""Rows in fp8 travel as words: a gather brings them bit for bit, over each transport, whoever waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.transport_cases import using
from tpkernels.ops.tensor_parallel.parallel import arrivals, start_rows, start_sum

# as fp32: minus zero, a subnormal number, infinity, a NaN that signals and two that do not, and what rounds
AWKWARD = [-(2**31), 1, 0x7F80_0000, 0x7F80_0001, -1, 0x7FFF_FFFF, 2**24 + 1, -(2**24) - 1]
COLS = 20  # 80 bytes, as of 64 features and scales


def words_of_rank(rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(-(2**31), 2**31, (rows, COLS), generator=generator).to(torch.int32)
    words[0, : len(AWKWARD)] = torch.tensor(AWKWARD, dtype=torch.int32)
    return words


@pytest.mark.parametrize(
    ("world", "transport", "backend", "overlap"),
    [
        ("ranks2", "c10d", "torch", False),
        ("ranks2", "c10d", "triton", True),
        ("ranks2", "shared", "torch", False),
        ("ranks2", "shared", "triton", True),
        ("ranks2", "stand-in", "triton", False),
        ("ranks2", "stand-in", "triton", True),
        ("ranks4", "shared", "torch", True),
    ],
)
@on_ranks()
def test_words_arrive_bit_for_bit(transport, backend, overlap):
    """In chunks or all at once, and of two calls that are awaited in two ways."""
    prepare(Setting())
    rank, ranks, rows, group = dist.get_rank(), dist.get_world_size(), 8, dist.group.WORLD
    expected = torch.cat([words_of_rank(each, rows) for each in range(ranks)])
    options = {"features": 64, "overlap": overlap}
    with using(transport, backend):
        for _ in range(3):  # slots are used in turn
            gathering = start_rows("op", "words", words_of_rank(rank, rows), group, **options)
            found, chunks = torch.zeros_like(expected), 0
            for where, chunk in arrivals(gathering, overlap):
                found[where] = chunk
                chunks += 1
            assert found.equal(expected)
            assert (chunks > 1) is overlap
            assert gathering.wait().equal(expected)
            again = start_rows("op", "words", words_of_rank(rank, rows), group, **options)
            assert again.wait().equal(expected)


@pytest.mark.parametrize("transport", ["shared", "stand-in"])
@on_ranks(2)
def test_words_have_no_sum(transport):
    """Where kernels compute."""
    words, options = words_of_rank(dist.get_rank(), 4), {"scatter": True, "overlap": True}
    expected = "kernels that wait take bfloat16, float16 and float32, got torch.int32"
    with using(transport, "triton"), pytest.raises((TypeError, ValueError), match=expected):
        start_sum("op", words.__getitem__, 4, COLS, words, dist.group.WORLD, **options).wait()


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")
