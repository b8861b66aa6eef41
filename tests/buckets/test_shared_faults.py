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

from tests.buckets.golden import (
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    failing,
    loss_of,
    own_batch,
    step,
    trained,
    wrap,
)
from tests.buckets.ways import on_ranks, under
from tests.checks import error_of
from tests.patience import patient
from tests.ranks import RankFailure, RankPool
from tpkernels import bucketed_all_reduce_
from tpkernels.ops import row_linear

SOON = patient(6.0)  # seconds, far below the time-out of a group; about a second on an idle machine
CANNOT = "has failed and cannot be used any more: "


def store():
    """Where ranks tell each other of events."""
    return dist.distributed_c10d._get_default_store()


def fresh():
    """Buckets that launch in backward, before a step."""
    module, buckets = trained()
    buckets.zero()
    return module, buckets


def after_failure(buckets):
    """What calls of the group say."""
    calls = (buckets.finish, buckets.zero, lambda: bucketed_all_reduce_([torch.ones(1)]))
    return [error_of(call) for call in calls]


def killed(when):
    module, buckets = fresh()
    if dist.get_rank() == 1:
        dist.barrier()  # the other has published all of its buckets
        if when == "mid-way":  # the first bucket is complete, the second is not
            for parameter in module[2].parameters():
                parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            backward(module)
        os.kill(os.getpid(), signal.SIGKILL)
    backward(module)
    dist.barrier()
    kind, text = error_of(buckets.finish)
    assert kind == "RuntimeError"
    bucket = "bucket 0 of 4 ('3." if when == "first" else "bucket 1 of 4 ('2."
    assert f"all_reduce of {bucket}" in text, text
    assert text.endswith("Cause: the process of rank 1 of it has ended")
    for kind, text in after_failure(buckets):
        assert kind == "RuntimeError"
        assert CANNOT + "rank 0: RuntimeError: GradientBuckets: all_reduce of bucket" in text
    assert "ranks of process group '0' have failed" in error_of(backward, module)[1]


@pytest.mark.parametrize("when", ["first", "mid-way"])
def test_dead_rank_is_named_with_the_bucket_that_it_lacks(when):
    with RankPool(2) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        ranks.run(under, "shared", killed, when)
    assert [*caught.value.exceptions] == [1], caught.value  # rank 0 saw what it was to see


def late(seconds):
    module = chain()
    buckets = wrap(module, timeout=timedelta(seconds=seconds))
    step(module, buckets)
    buckets.zero()
    if dist.get_rank() == 1:
        store().wait(["rank 0 gave up"])
    backward(module)
    errors = [error_of(buckets.finish)]
    store().set("rank 0 gave up", "now")
    return [*errors, error_of(buckets.finish)]


def test_late_rank_is_told_that_others_gave_up(ranks2):
    seconds = patient(0.5)
    for (_, first), (_, second) in ranks2.run(late, seconds):
        assert "GradientBuckets: all_reduce of bucket 0 of 4 ('3." in first
        assert "the wait for rank 1 of it timed out after " in first
        assert CANNOT in second
        assert "the wait for rank 1 of it timed out after " in second


@contextmanager
def interrupted(seconds=0.3):
    """By Ctrl-C, which ranks ignore otherwise, while this rank waits: as soon as that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < seconds + patient(0.5)


def interrupted_in_finish():
    """Rank 0, while it waits for the other."""
    module, buckets = fresh()
    errors = []
    if dist.get_rank() == 0:
        backward(module)
        with interrupted():
            buckets.finish()
        store().set("interrupted", "now")
    else:
        store().wait(["interrupted"])
        backward(module)
        errors.append(error_of(buckets.finish))
    return errors + after_failure(buckets)


def test_interrupt_ends_the_wait_and_reaches_the_others(ranks2):
    own, (first, *others) = ranks2.run(interrupted_in_finish)
    assert "Cause: rank 0: KeyboardInterrupt" in first[1]
    for kind, text in own + others:
        assert kind == "RuntimeError"
        assert CANNOT + "rank 0: KeyboardInterrupt" in text


def interrupted_in(call):
    """In `zero` after half a backward, or in `detach`, while the other rank is busy with something else."""
    module, buckets = fresh()
    if dist.get_rank() == 0:
        error_of(failing(module).backward)
        with interrupted():
            getattr(buckets, call)()
        del buckets
        gc.collect()  # nobody is waited for again
        store().set("interrupted", "now")
        backward(module)  # its parameters are free
        return ""
    store().wait(["interrupted"])
    backward(module)
    return error_of(buckets.finish)[1]


@pytest.mark.parametrize("call", ["zero", "detach"])
def test_interrupt_ends_other_waits(ranks2, call):
    _, text = ranks2.run(interrupted_in, call)
    assert "Cause: rank 0: KeyboardInterrupt" in text


@on_ranks(2)
def test_other_threads_run_while_a_rank_waits():
    """Rank 1 comes once another thread of Python has got somewhere while rank 0 waits."""
    module, buckets = fresh()
    if dist.get_rank() == 1:
        store().wait(["a thread has run"])
    backward(module)

    def run():
        time.sleep(0.1)  # until the other thread waits
        for _ in range(50):
            time.sleep(0.001)
        store().set("a thread has run", "now")

    running = threading.Thread(target=run)
    running.start()
    buckets.finish()
    running.join()


def elsewhere():
    """One rank in `finish`, the other in another call of the group."""
    module, buckets = fresh()
    if dist.get_rank() == 1:
        ones = torch.ones(4, 4)
        return error_of(row_linear, ones, ones, None, dist.group.WORLD)
    backward(module)
    return error_of(buckets.finish)


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

    def finished(loss):
        loss.backward()
        buckets.finish()

    step(module, buckets)
    for nan in (True, False):
        buckets.zero()
        loss = failing(module) if rank == 0 and not nan else loss_of(module(own_batch()))
        if nan:
            loss = loss * torch.nan if rank == 0 else loss_of(module[:3](own_batch()))
        errors.append(error_of(finished, loss)[0])
        step(module, buckets)
        assert_gradients(module, expected_gradients(module))
    bucketed_all_reduce_([torch.ones(1)])
    return errors


def test_group_is_well_after_rounds_that_were_refused(ranks2):
    assert ranks2.run(refused_rounds) == [["RuntimeError", "ValueError"], ["RuntimeError", "RuntimeError"]]


@on_ranks(2)
def test_what_a_rank_sent_before_it_let_go_counts():
    """Rank 1 lets go after its backward: what it has sent counts."""
    module, buckets = fresh()
    if dist.get_rank() == 1:
        backward(module)
        store().set("rank 1 sent all", "now")
        del buckets  # waits, for it has its shards to add up
        gc.collect()
        for parameter in module.parameters():
            parameter.grad.fill_(torch.nan)  # its own again
        return
    store().wait(["rank 1 sent all"])
    backward(module)
    buckets.finish()
    assert_gradients(module, expected_gradients(module))
    with pytest.raises(RuntimeError, match=r"Cause: rank 1 of it has let go of its GradientBuckets$"):
        step(module, buckets)


@pytest.mark.parametrize(("leaves", "longest"), [(True, 1.0), (False, 6.0)])
@on_ranks(2)
def test_no_process_waits_long_at_its_end(leaves, longest):
    """An engine that nobody has waited for lets go, its buckets in flight."""
    module, buckets = fresh()
    engine = buckets._engine
    if dist.get_rank() == 0:
        backward(module)
        started = time.monotonic()
        engine.detach()  # as at the end of a process, where Python waits no more
        assert time.monotonic() - started < patient(longest)
    elif leaves:
        engine.detach()
    dist.barrier()
