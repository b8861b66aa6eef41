"""Ranks that share buckets, at times of their own: each reads and writes only what is its turn.

After `finish` each rank overwrites its gradients at once, which a late read of another would see; and looks
at them again before the next round, when a late write of another would show.
"""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.buckets.given import Given, whole
from tests.checks import error_of
from tpkernels import GradientBuckets
from tpkernels.comm.transports.processes import LOOK_SECONDS

ROUNDS = 30
SIZES = [(700,)] * 6
MINE = -7.0  # what a rank writes into gradients that are its own again


class Pauses:
    """Of up to some milliseconds, at every gradient, on each rank others."""

    def __init__(self, longest=0.004):
        self._longest = longest
        self._generator = random.Random(dist.get_rank())

    def pause(self, *_):
        if self._generator.random() < 0.5:
            time.sleep(self._generator.random() * self._longest)

    def at_gradients_of(self, module):
        for parameter in module.parameters():
            parameter.register_hook(self.pause)


def sums(ranks, module, *steps, average=True):
    """Of what these ranks receive in these steps."""
    received = [whole(module, rank, step) for rank in ranks for step in steps]
    return [
        torch.stack(terms).sum(0) / (len(ranks) if average else 1) for terms in zip(*received, strict=True)
    ]


def equal(received, expected):
    return [torch.equal(left, right) for left, right in zip(received, expected, strict=True)]


def overwrite(module):
    for gradient in module.gradients():
        gradient.fill_(MINE)


def rounds(options, backwards=1):
    """In which rounds a gradient was wrong, and in which one was changed afterwards."""
    ranks, module, pauses = range(dist.get_world_size()), Given(sizes=SIZES), Pauses()
    scatters = "reduce" in options
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=4000, **options)
    pauses.at_gradients_of(module)
    wrong, changed = [], []
    for number in range(ROUNDS):
        buckets.zero()
        pauses.pause()
        steps = range(number * backwards, (number + 1) * backwards)
        for step in steps:
            with buckets.no_sync() if step != steps[-1] else nullcontext():
                module.receive(whole(module, dist.get_rank(), step))
        pauses.pause()
        buckets.finish()
        expected = sums(ranks, module, *steps, average=options.get("average", True))
        received = buckets.gradient_shards() if scatters else module.gradients()
        if not all(equal(received, buckets.shard(expected) if scatters else expected)):
            wrong.append(number)
        overwrite(module)
        pauses.pause()
        if not all((gradient == MINE).all() for gradient in module.gradients()):
            changed.append(number)
    return wrong, changed, buckets.launched_in_backward > 0


RIGHT = [], [], True


@pytest.mark.way("shared")
@pytest.mark.parametrize(
    ("options", "backwards"),
    [
        ({}, 1),
        ({"reduce": "reduce_scatter"}, 1),
        ({"average": False}, 2),
        ({"check_nan": True}, 1),
    ],
    ids=["average", "shards", "no_sync", "check_nan"],
)
def test_no_rank_reads_or_writes_out_of_turn(ranks4, options, backwards):
    assert ranks4.run(rounds, options, backwards) == [RIGHT] * 4


@contextmanager
def stopped_now_and_then(processes):
    """By signals, at any instruction."""
    done = threading.Event()

    def disturb():
        generator = random.Random(0)
        while not done.is_set():
            process = generator.choice(processes)
            os.kill(process, signal.SIGSTOP)
            time.sleep(generator.random() * 0.02)
            os.kill(process, signal.SIGCONT)
            time.sleep(generator.random() * 0.01)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        yield
    finally:
        done.set()
        disturbing.join()


@pytest.mark.way("shared")
def test_ranks_may_be_stopped_for_a_while(ranks2):
    with stopped_now_and_then(ranks2.pool.start()):
        assert ranks2.run(rounds, {}) == [RIGHT] * 2


def large():
    """Rounds in which the end of a shard was wrong after `finish`: its owner takes a while to reach it."""
    rank, ranks, elements = dist.get_rank(), dist.get_world_size(), 2**21
    module = Given(sizes=[(elements,)])
    buckets = GradientBuckets(module, dist.group.WORLD)
    ends = [slice(first - 8, first) for first in range(elements // ranks, elements + 1, elements // ranks)]
    wrong = []
    for number in range(ROUNDS):
        buckets.zero()
        module.receive([torch.full((elements,), float(number * ranks + rank))])
        buckets.finish()
        found = [module.p0.grad[end].tolist() for end in ends]
        if found != [[number * ranks + (ranks - 1) / 2] * 8] * ranks:
            wrong.append(number)
    return wrong


@pytest.mark.way("shared")
def test_buckets_are_done_when_they_are_said_to_be(ranks2):
    with stopped_now_and_then(ranks2.pool.start()):
        assert ranks2.run(large) == [[], []]


def woken():
    """The shortest of some waits for a rank that is a little late."""
    module = Given(sizes=SIZES)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=4000)
    waits = []
    for number in range(10):
        buckets.zero()
        if dist.get_rank() == 1:
            time.sleep(0.03)
        module.receive(whole(module, 0, number))
        started = time.monotonic()
        buckets.finish()
        waits.append(time.monotonic() - started)
    return min(waits)


@pytest.mark.way("shared")
def test_rank_that_waits_is_woken(ranks2):
    assert max(ranks2.run(woken)) < 0.75 * LOOK_SECONDS  # after which it would look by itself


def in_two_groups(options):
    """Rounds in which some gradients were wrong, where tensor-parallel ranks add up every other one."""
    rank, pauses = dist.get_rank(), Pauses()
    over_tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    over_data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    module = Given(sizes=SIZES)
    for parameter in list(module.parameters())[::2]:
        parameter.sequence_parallel = True
    buckets = GradientBuckets(
        module, over_data, tensor_parallel_group=over_tensor, bucket_bytes=4000, **options
    )
    pauses.at_gradients_of(module)
    wrong = []
    for number in range(ROUNDS):
        buckets.zero()
        module.receive(whole(module, rank, number))
        pauses.pause()
        buckets.finish()
        alone, marked = sums([rank, (rank + 2) % 4], module, number), sums(range(4), module, number)
        expected = [2 * mean if i % 2 == 0 else alone[i] for i, mean in enumerate(marked)]
        scatters = "reduce" in options
        received = buckets.gradient_shards() if scatters else module.gradients()
        if not all(equal(received, buckets.shard(expected) if scatters else expected)):
            wrong.append(number)
        overwrite(module)
    return wrong, buckets.launched_in_backward > 0


@pytest.mark.way("shared")
@pytest.mark.parametrize("options", [{}, {"reduce": "reduce_scatter"}], ids=["all", "shards"])
def test_marked_buckets_go_through_two_groups(ranks4, options):
    assert ranks4.run(in_two_groups, options) == [([], True)] * 4


def added_to():
    """Backwards add to averages of steps before."""
    module, pauses = Given(sizes=SIZES), Pauses()
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=4000)
    pauses.at_gradients_of(module)
    expected, wrong = [torch.zeros(size) for size in SIZES], []
    for number in range(ROUNDS // 2):
        module.receive(whole(module, dist.get_rank(), number))
        pauses.pause()
        buckets.finish()
        new = sums(range(dist.get_world_size()), module, number)
        expected = [total + more for total, more in zip(expected, new, strict=True)]
        if not all(equal(module.gradients(), expected)):
            wrong.append(number)
    return wrong


@pytest.mark.way("shared")
def test_averages_may_be_added_to_at_any_time(ranks4):
    assert ranks4.run(added_to) == [[]] * 4


def other_parameters_each_round():
    """Each rank leaves others out, so that buckets are complete in another order everywhere."""
    rank, ranks, pauses = dist.get_rank(), dist.get_world_size(), Pauses()
    module = Given(sizes=SIZES)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=4000)
    pauses.at_gradients_of(module)
    generator, wrong = random.Random(1), []  # the same everywhere
    for number in range(ROUNDS):
        used = [[number == 0 or generator.random() < 0.5 for _ in SIZES] for _ in range(ranks)]
        buckets.zero()
        given = zip(whole(module, rank, number), used[rank], strict=True)
        module.receive([gradient if uses else None for gradient, uses in given])
        buckets.finish()
        expected = [
            torch.stack([whole(module, other, number)[i] * used[other][i] for other in range(ranks)]).sum(0)
            / ranks
            for i in range(len(SIZES))
        ]
        if not all(equal(module.gradients(), expected)):
            wrong.append(number)
        overwrite(module)
    return wrong


@pytest.mark.way("shared")
def test_ranks_may_use_other_parameters_in_each_round(ranks4):
    assert ranks4.run(other_parameters_each_round) == [[]] * 4


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


def given_up():
    """Now and then a rank fails in the middle of backward. Of each round: whether NaN came, or the sums."""
    rank, ranks, pauses = dist.get_rank(), dist.get_world_size(), Pauses()
    module = Given(sizes=SIZES)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=4000)
    pauses.at_gradients_of(module)
    found = []
    for number in range(ROUNDS // 2):
        buckets.zero()
        fails = number % 3 == 1 and number % ranks == rank
        kind, _ = error_of(module.receive, whole(module, rank, number), Fail.apply if fails else torch.clone)
        if kind != "nothing":
            found.append(kind)
            continue
        pauses.pause()
        buckets.finish()
        if any(gradient.isnan().any() for gradient in module.gradients()):
            found.append("NaN")
        else:
            found.append(all(equal(module.gradients(), sums(range(ranks), module, number))))
        overwrite(module)
    return found


@pytest.mark.way("shared")
def test_rank_that_gives_up_sends_nan_and_the_next_round_is_right(ranks4):
    for rank, found in enumerate(ranks4.run(given_up)):
        assert found == [
            True if number % 3 != 1 else "ValueError" if number % 4 == rank else "NaN"
            for number in range(ROUNDS // 2)
        ]
