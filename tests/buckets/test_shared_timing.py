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

from tests.buckets.golden import Given, whole
from tests.buckets.ways import on_ranks
from tpkernels import GradientBuckets
from tpkernels.buckets import neighbours

ROUNDS = 20
SIZES = [(700,)] * 6
MINE = -7.0  # what a rank writes into gradients that are its own again


class Case:
    """Parameters, their buckets, and what each round was to leave in them.

    Hooks pause for some milliseconds at gradients, on each rank at others.
    """

    def __init__(self, **options):
        self.module, self.scatters = Given(sizes=SIZES), "reduce" in options
        self._generator = random.Random(dist.get_rank())
        self.buckets = GradientBuckets(self.module, dist.group.WORLD, bucket_bytes=4000, **options)
        for parameter in self.module.parameters():
            parameter.register_hook(self.pause)

    def pause(self, *_):
        if self._generator.random() < 0.5:
            time.sleep(self._generator.random() * 0.004)

    def receive(self, number):
        self.module.receive(whole(self.module, dist.get_rank(), number))

    def sums(self, *numbers, average=True):
        """Of what all ranks receive in these steps."""
        ranks = dist.get_world_size()
        received = [whole(self.module, rank, number) for rank in range(ranks) for number in numbers]
        terms = (torch.stack(each).sum(0) for each in zip(*received, strict=True))
        return [total / (ranks if average else 1) for total in terms]

    def assert_right(self, expected):
        """After `finish`; from then on gradients are this rank's, and none may change them."""
        received = self.buckets.gradient_shards() if self.scatters else self.module.gradients()
        assert all(map(torch.equal, received, self.buckets.shard(expected) if self.scatters else expected))
        for gradient in self.module.gradients():
            gradient.fill_(MINE)
        self.pause()
        assert all((gradient == MINE).all() for gradient in self.module.gradients())


def rounds(options, backwards=1):
    case = Case(**options)
    for number in range(ROUNDS):
        case.buckets.zero()
        case.pause()
        steps = range(number * backwards, (number + 1) * backwards)
        for step in steps:
            with case.buckets.no_sync() if step != steps[-1] else nullcontext():
                case.receive(step)
        case.pause()
        case.buckets.finish()
        case.assert_right(case.sums(*steps, average=options.get("average", True)))
    assert case.buckets.launched_in_backward


@pytest.mark.parametrize(
    ("options", "backwards"),
    [({}, 1), ({"reduce": "reduce_scatter"}, 1), ({"average": False}, 2), ({"check_nan": True}, 1)],
    ids=["average", "shards", "no_sync", "check_nan"],
)
@on_ranks(4)
def test_no_rank_reads_or_writes_out_of_turn(options, backwards):
    rounds(options, backwards)


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
    for number in range(ROUNDS):
        buckets.zero()
        module.receive([torch.full((elements,), float(number * ranks + rank))])
        buckets.finish()
        found = [module.p0.grad[end].tolist() for end in ends]
        assert found == [[number * ranks + (ranks - 1) / 2] * 8] * ranks


@pytest.mark.parametrize(("function", "args"), [(rounds, ({},)), (large, ())], ids=["rounds", "large"])
def test_ranks_may_be_stopped_for_a_while(ranks2, function, args):
    with stopped_now_and_then(ranks2.pool.start()):
        ranks2.run(function, *args)


@on_ranks(2)
def test_rank_that_waits_is_woken():
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
    assert min(waits) < 7.5


@on_ranks(4)
def test_each_rank_may_leave_other_parameters_out_in_each_round():
    """So that buckets are complete in another order everywhere."""
    case, ranks = Case(), range(4)
    generator = random.Random(1)  # the same everywhere
    for number in range(ROUNDS):
        all_given = [whole(case.module, rank, number) for rank in ranks]
        given = [[g if not number or generator.random() < 0.5 else None for g in each] for each in all_given]
        case.buckets.zero()
        case.module.receive(given[dist.get_rank()])
        case.buckets.finish()
        terms, zeros = zip(*given, strict=True), torch.zeros(SIZES[0])
        case.assert_right([sum((g for g in each if g is not None), zeros) / 4 for each in terms])
