"""What goes wrong among ranks that share buckets is told to all of them, soon, and by its first cause."""

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.buckets.golden import assert_gradients, batch, chain, expected_gradients, loss_of, own_batch, wrap
from tests.buckets.test_bucket_options import Fail
from tests.buckets.ways import under
from tests.checks import error_of
from tests.ranks import RankFailure, RankPool
from tpkernels import bucketed_all_reduce_
from tpkernels.ops import row_linear

SOON = 6.0  # seconds on a busy machine, far below the time-out of a group; about a second on an idle one
CANNOT = "has failed and cannot be used any more: "


def step(module, buckets, number=0):
    buckets.zero()
    loss_of(module(own_batch(number))).backward()
    buckets.finish()


def trained():
    """Buckets that launch in backward."""
    module = chain()
    buckets = wrap(module)
    for number in range(2):
        step(module, buckets, number)
    buckets.zero()
    return module, buckets


@contextmanager
def interruptible():
    """Ranks ignore Ctrl-C otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt_soon(seconds=0.3):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    return time.monotonic() + seconds


def killed(when):
    module, buckets = trained()
    if dist.get_rank() == 1:
        dist.barrier()  # the other has published all of its buckets
        if when == "mid-way":  # the first bucket is complete, the second is not
            module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            module[2].bias.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss_of(module(own_batch())).backward()
        os.kill(os.getpid(), signal.SIGKILL)
    loss_of(module(own_batch())).backward()
    dist.barrier()
    started = time.monotonic()
    kind, text = error_of(buckets.finish)
    assert time.monotonic() - started < SOON
    assert kind == "RuntimeError"
    bucket = "bucket 0 of 4 ('3." if when == "first" else "bucket 1 of 4 ('2."
    assert f"all_reduce of {bucket}" in text, text
    assert text.endswith("Cause: the process of rank 1 of it has ended")
    for call in (buckets.finish, buckets.zero, lambda: bucketed_all_reduce_([torch.ones(1)])):
        kind, text = error_of(call)
        assert kind == "RuntimeError"
        assert CANNOT + "rank 0: RuntimeError: GradientBuckets: all_reduce of bucket" in text
    assert "ranks of process group '0' have failed" in error_of(loss_of(module(own_batch())).backward)[1]


@pytest.mark.parametrize("when", ["first", "mid-way"])
def test_dead_rank_is_named_with_the_bucket_that_it_lacks(when):
    with RankPool(2) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        ranks.run(under, "shared", killed, when)
    assert [*caught.value.exceptions] == [1], caught.value  # rank 0 saw what it was to see


def late():
    module = chain()
    buckets = wrap(module, timeout=timedelta(seconds=1))
    step(module, buckets)
    buckets.zero()
    if dist.get_rank() == 1:
        time.sleep(2.5)
    loss_of(module(own_batch())).backward()
    started = time.monotonic()
    errors = [error_of(buckets.finish), error_of(buckets.finish)]
    assert time.monotonic() - started < SOON
    return errors


@pytest.mark.way("shared")
def test_late_rank_is_told_that_others_gave_up(ranks2):
    cause = "the wait for rank 1 of it timed out after 1."
    for (_, first), (_, second) in ranks2.run(late):
        assert "GradientBuckets: all_reduce of bucket 0 of 4 ('3." in first
        assert cause in first
        assert CANNOT in second
        assert cause in second


def interrupted():
    """Rank 0 by Ctrl-C, while it waits for the other."""
    module, buckets = trained()
    rank, caught, errors = dist.get_rank(), None, []
    if rank == 0:
        loss_of(module(own_batch())).backward()
        with interruptible():
            try:
                at = interrupt_soon()
                buckets.finish()
            except KeyboardInterrupt:
                caught = time.monotonic() - at
    else:
        time.sleep(1.0)
        loss_of(module(own_batch())).backward()
        started = time.monotonic()
        errors.append(error_of(buckets.finish))
        assert time.monotonic() - started < SOON
    for call in (buckets.finish, buckets.zero, lambda: bucketed_all_reduce_([torch.ones(1)])):
        errors.append(error_of(call))
    return caught, errors


@pytest.mark.way("shared")
def test_interrupt_ends_the_wait_and_reaches_the_others(ranks2):
    (caught, errors), (_, (first, *others)) = ranks2.run(interrupted)
    assert caught < 0.5
    assert "Cause: rank 0: KeyboardInterrupt" in first[1]
    for kind, text in errors + others:
        assert kind == "RuntimeError"
        assert CANNOT + "rank 0: KeyboardInterrupt" in text


def interrupted_in(call):
    """In `zero` after half a backward, or in `detach`, while the other rank is busy with something else."""
    module, buckets = trained()
    if dist.get_rank() == 0:
        hidden = module[1](module[0](own_batch()))
        error_of(loss_of(module[3](module[2](Fail.apply(hidden)))).backward)
        with interruptible():
            at = interrupt_soon()
            with pytest.raises(KeyboardInterrupt):
                getattr(buckets, call)()
        assert time.monotonic() - at < 0.5
        del buckets
        gc.collect()
        assert time.monotonic() - at < 2.0  # nobody is waited for again
        assert error_of(loss_of(module(own_batch())).backward)[0] == "nothing"  # its parameters are free
        return ""
    time.sleep(1.0)
    loss_of(module(own_batch())).backward()
    return error_of(buckets.finish)[1]


@pytest.mark.way("shared")
@pytest.mark.parametrize("call", ["zero", "detach"])
def test_interrupt_ends_other_waits(ranks2, call):
    _, text = ranks2.run(interrupted_in, call)
    assert "Cause: rank 0: KeyboardInterrupt" in text


def counted_while_waiting():
    """How far another thread of Python gets while this rank waits for a second."""
    module, buckets = trained()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    loss_of(module(own_batch())).backward()
    count, done = 0, threading.Event()

    def look():
        nonlocal count
        while not done.wait(0.001):
            count += 1

    looking = threading.Thread(target=look)
    looking.start()
    buckets.finish()
    done.set()
    looking.join()
    return count


@pytest.mark.way("shared")
def test_other_threads_run_while_a_rank_waits(ranks2):
    waiting, _ = ranks2.run(counted_while_waiting)
    assert waiting > 50


def elsewhere():
    """One rank in `finish`, the other in another call of the group."""
    module, buckets = trained()
    if dist.get_rank() == 1:
        ones = torch.ones(4, 4)
        return error_of(row_linear, ones, ones, None, dist.group.WORLD)
    loss_of(module(own_batch())).backward()
    return error_of(buckets.finish)


@pytest.mark.way("shared")
def test_ranks_that_part_ways_are_told_both_calls(ranks2):
    started = time.monotonic()
    for kind, text in ranks2.run(elsewhere):
        assert kind == "RuntimeError"
        assert "ranks have left the common order of calls: call " in text
        assert "'ranks tell each other: gradients of a step, buckets of call " in text
    assert time.monotonic() - started < 2 * SOON


def refused_rounds():
    """One rank hears of NaN in backward, the other in finish(); then one gives up. The group stays good."""
    module = chain()
    buckets = wrap(module, check_nan=True)
    rank, errors = dist.get_rank(), []

    def one(factor=1.0, layers=4, fail=False):
        hidden = own_batch()
        for layer in module[:layers]:
            hidden = layer(hidden)
            hidden = Fail.apply(hidden) if fail and layer is module[1] else hidden
        (loss_of(hidden) * factor).backward()
        buckets.finish()

    step(module, buckets)
    for wrong in (
        {"factor": torch.nan} if rank == 0 else {"layers": 3},
        {"fail": True} if rank == 0 else {},
    ):
        buckets.zero()
        errors.append(error_of(one, **wrong)[0])
        step(module, buckets)
        assert_gradients(module, expected_gradients(module))
    bucketed_all_reduce_([torch.ones(1)])
    return errors


@pytest.mark.way("shared")
def test_group_is_well_after_rounds_that_were_refused(ranks2):
    assert ranks2.run(refused_rounds) == [["RuntimeError", "ValueError"], ["RuntimeError", "RuntimeError"]]


def left_early():
    """Rank 1 lets go after its backward: what it has sent counts."""
    module, buckets = trained()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other waits, for it has its shards to add up
    loss_of(module(own_batch())).backward()
    if dist.get_rank() == 1:
        del buckets
        gc.collect()
        for parameter in module.parameters():
            parameter.grad.fill_(torch.nan)  # its own again
        return None
    buckets.finish()
    assert_gradients(module, expected_gradients(module))
    buckets.zero()
    loss_of(module(own_batch())).backward()
    return error_of(buckets.finish)[1]


@pytest.mark.way("shared")
def test_what_a_rank_sent_before_it_let_go_counts(ranks2):
    text, _ = ranks2.run(left_early)
    assert text.endswith("Cause: rank 1 of it has let go of its GradientBuckets")


def converted_and_back():
    """finish() refuses a parameter on rank 1, which then gives the round up. What each rank finds."""
    module = chain()
    buckets = wrap(module)
    weight = module[0].weight
    loss_of(module(own_batch())).backward()
    if dist.get_rank() == 1:
        weight.data = weight.data.float()
        _, found = error_of(buckets.finish)
        weight.data = weight.data.double()
    else:
        buckets.finish()
        found = {bool(parameter.grad.isnan().all()) for parameter in module.parameters()}
    for number in range(1, 3):
        step(module, buckets, number)
        assert_gradients(module, expected_gradients(module, (number,)))
    return found


@pytest.mark.way("shared")
def test_rank_that_is_refused_alone_gives_up(ranks2):
    first, second = ranks2.run(converted_and_back)
    assert first == {True}
    assert "'0.weight' was converted or moved" in second


def readable():
    module, buckets = trained()
    loss_of(module(own_batch())).backward()
    buckets.finish()
    expected = expected_gradients(module)
    buckets.detach()
    dist.barrier()
    assert_gradients(module, expected)
    loss_of(module(own_batch())).backward()  # adds to what is its own
    alone = torch.autograd.grad(loss_of(module(batch(dist.get_rank()))), list(module.parameters()))
    assert_gradients(module, [both + own for both, own in zip(expected, alone, strict=True)])


@pytest.mark.way("shared")
def test_gradients_outlive_detach(ranks2):
    ranks2.run(readable)


def end_of_a_process(leaves):
    """How long an engine that nobody has waited for takes to let go, its buckets in flight."""
    module, buckets = trained()
    engine, seconds = buckets._engine, 0.0
    if dist.get_rank() == 0:
        loss_of(module(own_batch())).backward()
        started = time.monotonic()
        engine.detach()  # as at the end of a process, where Python waits no more
        seconds = time.monotonic() - started
    elif leaves:
        engine.detach()
    dist.barrier()
    return seconds


@pytest.mark.way("shared")
@pytest.mark.parametrize(("leaves", "longest"), [(True, 1.0), (False, SOON)])
def test_no_process_waits_long_at_its_end(ranks2, leaves, longest):
    assert max(ranks2.run(end_of_a_process, leaves)) < longest
