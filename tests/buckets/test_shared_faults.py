"""What goes wrong among ranks that share buckets is told to all of them, soon, and by its first cause."""

import gc
import os
import signal
import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    failing,
    lies_in_shared_memory,
    step,
    trained,
    wrap,
)
from tests.buckets.test_ext_arguments import arranged
from tests.buckets.ways import on_ranks, under
from tests.checks import error_of
from tests.on_ranks import of_all
from tests.patience import patient
from tests.ranks import RankFailure, RankPool
from tpkernels import GradientBuckets, bucketed_all_reduce_
from tpkernels.buckets.neighbours import FAREWELL_SECONDS, Neighbours
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


@on_ranks(2)
def test_late_rank_is_told_that_others_gave_up():
    module = chain()
    buckets = wrap(module)
    step(module, buckets)
    buckets.zero()
    if dist.get_rank() == 1:
        store().wait(["rank 0 gave up"])
    else:
        buckets._memory._neighbours._timeout = 0.5
    backward(module)
    first = error_of(buckets.finish)[1]
    store().set("rank 0 gave up", "now")
    assert "GradientBuckets: all_reduce of bucket 0 of 4 ('3." in first
    for text in (first, again := error_of(buckets.finish)[1]):
        assert "the wait for rank 1 of it timed out after " in text
    assert CANNOT in again


@contextmanager
def interrupted():
    """By Ctrl-C, which ranks ignore otherwise, while this rank waits: as soon as that."""
    wait = Neighbours._await

    def interrupted_wait(neighbours, *arguments, **options):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait(neighbours, *arguments, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    try:
        with patch.object(Neighbours, "_await", interrupted_wait), pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < patient(10)


def failing_backward(module):
    failing(module).backward()


def interrupted_in(call):
    """Rank 0, while it waits: in `finish`, or in `zero` or `detach` after half a backward."""
    module, buckets = fresh()
    if dist.get_rank() == 1:
        store().wait(["interrupted"])
        backward(module)
        return [error_of(buckets.finish), *after_failure(buckets)]
    error_of(backward if call == "finish" else failing_backward, module)
    with interrupted():
        getattr(buckets, call)()
    errors = after_failure(buckets) if call == "finish" else []
    del buckets
    gc.collect()  # nobody is waited for again
    store().set("interrupted", "now")
    if call != "finish":
        backward(module)  # its parameters are free
    return errors


@pytest.mark.parametrize("call", ["finish", "zero", "detach"])
def test_interrupt_ends_the_wait_and_reaches_the_others(ranks2, call):
    own, (first, *others) = ranks2.run(interrupted_in, call)
    assert "Cause: rank 0: KeyboardInterrupt" in first[1]
    for kind, text in own + others:
        assert kind == "RuntimeError"
        assert CANNOT + "rank 0: KeyboardInterrupt" in text


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


@on_ranks(2)
def test_ranks_that_part_ways_are_told_both_calls():
    """One rank in `finish`, the other in another call of the group."""
    module, buckets = fresh()
    started = time.monotonic()
    if dist.get_rank() == 1:
        ones = torch.ones(4, 4)
        kind, text = error_of(row_linear, ones, ones, None, dist.group.WORLD)
    else:
        backward(module)
        kind, text = error_of(buckets.finish)
    assert time.monotonic() - started < 2 * SOON
    assert kind == "RuntimeError"
    assert "ranks have left the common order of calls: call " in text
    assert "'ranks tell each other: gradients of a step, buckets of call " in text


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


def seconds_to_end(others_leave):
    """Of an engine that lets go, its buckets in flight, which others may be adding up."""
    module, buckets = fresh()
    engine = buckets._engine
    dist.barrier()
    taken = 0.0
    if dist.get_rank() == 0:
        backward(module)
        started = time.monotonic()
        engine.detach()  # as at the end of a process, where Python waits no more
        taken = time.monotonic() - started
    elif others_leave:
        engine.detach()
    dist.barrier()
    return taken


@on_ranks(2)
def test_no_process_waits_long_at_its_end():
    """Not for others that leave, too: once in ten times, as a busy machine may delay a rank."""
    assert any(max(of_all(seconds_to_end(True))) < FAREWELL_SECONDS / 2 for _ in range(10))
    alone = seconds_to_end(False)
    if dist.get_rank() == 0:
        assert FAREWELL_SECONDS <= alone < patient(15)


SIZES = (60, 72, 12)  # of buckets


@on_ranks(2)
def test_what_is_awaited_may_come_meanwhile():
    """It is looked at, again and again, while the other rank seems to finish and not to."""
    if dist.get_rank() == 1:
        return
    parameters = [nn.Parameter(torch.ones(size)) for size in SIZES]
    flats = [[torch.zeros(size) for size in SIZES] for _ in range(2)]
    group = dist.group.WORLD.group_name
    engine = arranged([0, 1, 2], [0, 0, 0], flats[0], parameters=parameters, group=group)
    words = [torch.zeros(2 * len(SIZES), dtype=torch.int64) for _ in range(2)]
    doorbells = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    engine.meet(False, [0, 1], doorbells, words, flats[0] + flats[1], "", [], 60_000)
    torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    words[1].fill_(1)
    last, stop = words[1].numpy(), threading.Event()
    last[-1] = 0
    engine.launch_rest()
    engine.settle(0.0)

    def finish_and_not():
        while not stop.is_set():
            for _ in range(1000):
                last[-1] = 1
                last[-1] = 0

    other = threading.Thread(target=finish_and_not)
    other.start()
    found, until = set(), time.process_time() + 0.5
    while time.process_time() < until or len(found) < 2:
        found.add(engine.awaited()[0].partition(" (")[0])
    stop.set()
    other.join()
    engine.lose_others()
    assert found == {"", "all_reduce of bucket 2 of 3"}


@on_ranks(2)
def test_garbage_keeps_nobody_waiting():
    """Buckets in flight that one rank lets go of while the other waits for it elsewhere."""
    module, buckets = trained()
    buckets.zero()
    if dist.get_rank() == 0:
        dist.barrier()  # the other has published all, and adds up nothing until it is called again
        backward(module)
        del buckets
        gc.collect()
        assert not any(lies_in_shared_memory(parameter.grad) for parameter in module.parameters())
        dist.barrier()  # which the other one reaches, or this call hangs
        return
    backward(module)
    dist.barrier()
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"Cause: rank 0 of it has let go of its GradientBuckets$"):
        buckets.finish()


@on_ranks(2)
def test_ranks_that_finish_buckets_in_other_orders_are_told():
    """Two models of the same names, in their first step, which ranks finish in turn."""
    modules = [chain(), chain()]
    both = [GradientBuckets(module, dist.group.WORLD) for module in modules]
    for module in modules:
        backward(module)
    started = time.monotonic()
    errors = [error_of(buckets.finish) for buckets in both[:: 1 - 2 * dist.get_rank()]]
    assert time.monotonic() - started < patient(30.0)  # half of the group's time-out
    kind, text = errors[0]
    assert kind == "RuntimeError"
    assert "ranks have left the common order of calls" in text
    assert "gradients of a step, buckets of call " in text
