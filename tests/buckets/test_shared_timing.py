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
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.golden import Fail, Given, two_by_two, whole
from tests.checks import error_of
from tpkernels import GradientBuckets
from tpkernels.buckets import neighbours

ROUNDS = 20
SIZES = [(700,)] * 6
MINE = -7.0  # what a rank writes into gradients that are its own again
RIGHT = [True] * ROUNDS


class Case:
    """Parameters, their buckets, and what each round was to leave in them.

    Hooks pause for some milliseconds at gradients, on each rank at others.
    """

    def __init__(self, group=None, **options):
        self.module, self.scatters = Given(sizes=SIZES), "reduce" in options
        self._generator = random.Random(dist.get_rank())
        if "tensor_parallel_group" in options:
            for parameter in list(self.module.parameters())[::2]:
                parameter.sequence_parallel = True
        group = dist.group.WORLD if group is None else group
        self.buckets = GradientBuckets(self.module, group, bucket_bytes=4000, **options)
        for parameter in self.module.parameters():
            parameter.register_hook(self.pause)

    def pause(self, *_):
        if self._generator.random() < 0.5:
            time.sleep(self._generator.random() * 0.004)

    def receive(self, number, **options):
        self.module.receive(whole(self.module, dist.get_rank(), number), **options)

    def sums(self, ranks, *numbers, average=True):
        """Of what these ranks receive in these steps."""
        received = [whole(self.module, rank, number) for rank in ranks for number in numbers]
        terms = (torch.stack(each).sum(0) for each in zip(*received, strict=True))
        return [total / (len(ranks) if average else 1) for total in terms]

    def is_right(self, expected):
        """After `finish`; from then on gradients are this rank's, and none may change them."""
        received = self.buckets.gradient_shards() if self.scatters else self.module.gradients()
        right = all(map(torch.equal, received, self.buckets.shard(expected) if self.scatters else expected))
        for gradient in self.module.gradients():
            gradient.fill_(MINE)
        self.pause()
        return right and all((gradient == MINE).all() for gradient in self.module.gradients())


def rounds(options, backwards=1):
    case, found = Case(**options), []
    for number in range(ROUNDS):
        case.buckets.zero()
        case.pause()
        steps = range(number * backwards, (number + 1) * backwards)
        for step in steps:
            with case.buckets.no_sync() if step != steps[-1] else nullcontext():
                case.receive(step)
        case.pause()
        case.buckets.finish()
        average = options.get("average", True)
        found.append(case.is_right(case.sums(range(dist.get_world_size()), *steps, average=average)))
    assert case.buckets.launched_in_backward
    return found


@pytest.mark.parametrize(
    ("options", "backwards"),
    [({}, 1), ({"reduce": "reduce_scatter"}, 1), ({"average": False}, 2), ({"check_nan": True}, 1)],
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


def large():
    """Rounds whose end of a shard is right after `finish`: its owner takes a while to reach it."""
    rank, ranks, elements = dist.get_rank(), dist.get_world_size(), 2**21
    module = Given(sizes=[(elements,)])
    buckets = GradientBuckets(module, dist.group.WORLD)
    ends = [slice(first - 8, first) for first in range(elements // ranks, elements + 1, elements // ranks)]
    right = []
    for number in range(ROUNDS):
        buckets.zero()
        module.receive([torch.full((elements,), float(number * ranks + rank))])
        buckets.finish()
        found = [module.p0.grad[end].tolist() for end in ends]
        right.append(found == [[number * ranks + (ranks - 1) / 2] * 8] * ranks)
    return right


@pytest.mark.parametrize(("function", "args"), [(rounds, ({},)), (large, ())], ids=["rounds", "large"])
def test_ranks_may_be_stopped_for_a_while(ranks2, function, args):
    with stopped_now_and_then(ranks2.pool.start()):
        assert ranks2.run(function, *args) == [RIGHT] * 2


def woken():
    """The shortest of some waits for a rank that is a little late, and by itself would look much later."""
    case, waits = Case(), []
    for number in range(4):
        case.buckets.zero()
        if dist.get_rank() == 1:
            time.sleep(0.03)
        case.receive(number)
        started = time.monotonic()
        with patch.object(neighbours, "LOOK_SECONDS", 10.0):
            case.buckets.finish()
        waits.append(time.monotonic() - started)
    return min(waits)


def test_rank_that_waits_is_woken(ranks2):
    assert max(ranks2.run(woken)) < 7.5


def in_two_groups(options):
    """Tensor-parallel ranks add up every other gradient."""
    rank, (over_tensor, over_data) = dist.get_rank(), two_by_two()
    case, found = Case(over_data, tensor_parallel_group=over_tensor, **options), []
    for number in range(ROUNDS):
        case.buckets.zero()
        case.receive(number)
        case.pause()
        case.buckets.finish()
        alone, marked = case.sums([rank, (rank + 2) % 4], number), case.sums(range(4), number)
        found.append(case.is_right([2 * mean if i % 2 == 0 else alone[i] for i, mean in enumerate(marked)]))
    assert case.buckets.launched_in_backward
    return found


@pytest.mark.parametrize("options", [{}, {"reduce": "reduce_scatter"}], ids=["all", "shards"])
def test_marked_buckets_go_through_two_groups(ranks4, options):
    assert ranks4.run(in_two_groups, options) == [RIGHT] * 4


def added_to():
    """Backwards add to averages of steps before."""
    case, ranks, found = Case(), range(dist.get_world_size()), []
    for number in range(ROUNDS):
        case.receive(number)
        case.pause()
        case.buckets.finish()
        expected = [case.sums(ranks, step) for step in range(number + 1)]
        found.append(all(map(torch.equal, case.module.gradients(), map(sum, zip(*expected, strict=True)))))
    return found


def other_parameters_each_round():
    """Each rank leaves others out, so that buckets are complete in another order everywhere."""
    case, ranks, found = Case(), range(dist.get_world_size()), []
    generator = random.Random(1)  # the same everywhere
    for number in range(ROUNDS):
        used = [[number == 0 or generator.random() < 0.5 for _ in SIZES] for _ in ranks]
        given = [
            [
                gradient if uses else None
                for gradient, uses in zip(whole(case.module, rank, number), used[rank], strict=True)
            ]
            for rank in ranks
        ]
        case.buckets.zero()
        case.module.receive(given[dist.get_rank()])
        case.buckets.finish()
        terms = [
            [torch.zeros(SIZES[0]) if g is None else g for g in each] for each in zip(*given, strict=True)
        ]
        found.append(case.is_right([sum(each) / len(ranks) for each in terms]))
    return found


@pytest.mark.parametrize("function", [added_to, other_parameters_each_round])
def test_rounds_may_follow_in_other_ways(ranks4, function):
    assert ranks4.run(function) == [RIGHT] * 4


def given_up():
    """Now and then a rank fails in the middle of backward. Of each round: whether NaN came, or the sums."""
    case, rank, ranks, found = Case(), dist.get_rank(), dist.get_world_size(), []
    for number in range(ROUNDS - 2):
        case.buckets.zero()
        fails = number % 3 == 1 and number % ranks == rank
        kind, _ = error_of(case.receive, number, through=Fail.apply if fails else torch.clone)
        if kind != "nothing":
            found.append(kind)
            continue
        case.pause()
        case.buckets.finish()
        is_nan = any(gradient.isnan().any() for gradient in case.module.gradients())
        is_right = case.is_right(case.sums(range(ranks), number))
        found.append("NaN" if is_nan else is_right)
    return found


def test_rank_that_gives_up_sends_nan_and_the_next_round_is_right(ranks4):
    for rank, found in enumerate(ranks4.run(given_up)):
        assert found == [
            True if number % 3 != 1 else "ValueError" if number % 4 == rank else "NaN"
            for number in range(ROUNDS - 2)  # the last is a good one
        ]
