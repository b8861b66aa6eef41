"""Kernels that store into the slots of other ranks: interpreted, between processes that share memory."""

import random
import re

import pytest
import torch

from tests.ops import pushes
from tests.ranks import RankFailure, RankPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these kernels run in the interpreter")

CALLS = 6


def delays_of(ranks: int, seed: int) -> list[list[float]]:
    numbers = random.Random(seed)
    return [[numbers.choice([0.0, 0.01, 0.08]) for _ in range(CALLS)] for _ in range(ranks)]


@pytest.mark.parametrize("way", ["shared", "stand-in"])
@pytest.mark.parametrize("push", [pushes.writer_pushes, pushes.kernel_pushes])
def test_sums_have_the_bits_of_the_oracle_whatever_the_delays(way, push, ranks2: RankPool):
    args = [(way, push, 4, 2, CALLS, delays) for delays in delays_of(2, 1)]
    assert ranks2.run_each(pushes.sums, args) == [[True] * CALLS] * 2


def test_sums_on_four_ranks_have_the_bits_of_the_oracle(ranks4: RankPool):
    args = [("shared", pushes.kernel_pushes, 2, 1, 3, delays) for delays in delays_of(4, 2)]
    assert ranks4.run_each(pushes.sums, args) == [[True] * 3] * 4


@pytest.mark.parametrize("way", ["shared", "stand-in"])
def test_numbers_of_calls_may_pass_what_flags_can_hold(way, ranks2: RankPool):
    args = (way, pushes.kernel_pushes, 2, 1, 6, [0.0], 2**31 - 4)
    assert ranks2.run(pushes.sums, *args) == [[True] * 6] * 2


def test_500_sums_back_to_back(ranks2: RankPool):
    args = ("shared", pushes.kernel_pushes, 1, 1, 500, [0.0])
    assert ranks2.run(pushes.sums, *args) == [[True] * 500] * 2


def test_500_gathers_back_to_back(ranks2: RankPool):
    assert ranks2.run(pushes.gathers, 500) == [[True] * 500] * 2


@pytest.mark.parametrize("fault", pushes.FAULTS)
def test_planted_faults_show(fault, ranks2: RankPool):
    (exact, said), (_, said_by_culprit) = ranks2.run(pushes.faulty_sums, fault)
    assert exact[:2] == [True, True]
    if fault == "swapped_chunks":  # a flag of the first chunk is never raised, the next rank's is
        assert "it: rows of rank 1 (chunk 2) did not arrive: it died, came too late" in said
    else:
        assert (exact[2:], said) == ([False, False], "")
        assert said_by_culprit == ""


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (0, r"in call 1: it: rows of rank 1 \(chunk 2\) did not arrive"),
        (
            2,
            r"in call 3: it on rank 0: call 4 may begin once rank 1 has read call 2.* its process has ended",
        ),
    ],
)
def test_a_killed_peer_is_an_error_in_time(calls, said):
    with RankPool(2) as own, pytest.raises(RankFailure, match="rank 1: killed by signal 9") as failure:
        own.run(pushes.killed_peer, calls)
    survivor = str(failure.value.exceptions[0])
    assert re.match(f"after [0-9]\\.[0-9] s {said}", survivor), survivor


def test_ranks_say_whether_a_kernel_pushes(ranks2: RankPool):
    for by_kernel, in_turn in ranks2.run(pushes.described_sums):
        assert by_kernel == "row_linear: shards of the sum by a kernel (8, 16) torch.float32"
        assert in_turn == "row_linear: shards of the sum (8, 16) torch.float32"


def test_a_rank_that_does_not_push_as_the_others_do_is_refused(ranks2: RankPool):
    for message in ranks2.run(pushes.only_one_rank_pushes):
        assert "ranks disagree: rank 0 has row_linear: shards of the sum by a kernel (" in message
        assert "; rank 1 has row_linear: shards of the sum (" in message
