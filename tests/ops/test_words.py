"""Rows in fp8 travel as words: a gather brings them bit for bit, over each transport, whoever waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.parallel_behaviour import message_of
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


def gathered_words(transport: str, backend: str, overlap: bool, rows: int) -> tuple[list[int], list[int]]:
    """(rows of each chunk as it arrives, how many words are wrong), of two calls awaited in two ways."""
    prepare(Setting())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = torch.cat([words_of_rank(each, rows) for each in range(ranks)])
    shard, group, sizes, wrong = words_of_rank(rank, rows), dist.group.WORLD, [], []
    with using(transport, backend):
        for _ in range(3):  # slots are used in turn
            gathering = start_rows("op", "words", shard, group, features=64, overlap=overlap)
            found = torch.zeros_like(expected)
            for where, chunk in arrivals(gathering, overlap):
                found[where] = chunk
                sizes.append(chunk.shape[0])
            full = gathering.wait()
            assert full.dtype == torch.int32
            wrong += [int((found != expected).sum()), int((full != expected).sum())]
            gathering = start_rows("op", "words", shard, group, features=64, overlap=overlap)
            wrong.append(int((gathering.wait() != expected).sum()))
    return sizes, wrong


def summed_words(transport: str) -> str:
    """What is said of a sum of words, where kernels compute."""
    words = words_of_rank(dist.get_rank(), 4)
    with using(transport, "triton"):
        group = dist.group.WORLD
        return message_of(
            lambda: start_sum(
                "op", words.__getitem__, 4, COLS, words, group, scatter=True, overlap=True
            ).wait()
        )


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")


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
def test_words_arrive_bit_for_bit(ranks, transport, backend, overlap):
    for sizes, wrong in ranks.run(gathered_words, transport, backend, overlap, 8):
        assert wrong == [0] * 9
        assert sum(sizes) == 3 * 8 * ranks.world_size
        assert (len(sizes) > 3) is overlap, "chunks, or all at once"


@pytest.mark.parametrize("transport", ["shared", "stand-in"])
def test_words_have_no_sum(ranks2, transport):
    for message in ranks2.run(summed_words, transport):
        assert "kernels that wait take bfloat16, float16 and float32, got torch.int32" in message
