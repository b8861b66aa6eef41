"""Ranks that share buckets leave the common order of calls: an error says so, and nobody waits."""

import gc
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.given import lies_in_shared_memory
from tests.buckets.golden import backward, chain, trained
from tests.buckets.test_ext_arguments import arranged
from tests.buckets.ways import on_ranks
from tests.checks import error_of
from tests.patience import patient
from tpkernels import GradientBuckets

SIZES = (60, 72, 12)  # of buckets


def looked_at_while_it_is_done():
    """What is awaited, again and again, while the other rank seems to finish and not to."""
    if dist.get_rank() == 1:
        return set()
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
    return found


def test_what_is_awaited_may_come_meanwhile(ranks2):
    found, _ = ranks2.run(looked_at_while_it_is_done)
    assert found == {"", "all_reduce of bucket 2 of 3"}


def garbage():
    """Buckets in flight that one rank lets go of while the other waits for it elsewhere."""
    module, buckets = trained()
    buckets.zero()
    if dist.get_rank() == 0:
        dist.barrier()  # the other has published all, and adds up nothing until it is called again
    backward(module)
    if dist.get_rank() == 1:
        dist.barrier()
    if dist.get_rank() == 0:
        del buckets
        gc.collect()
        assert not any(lies_in_shared_memory(parameter.grad) for parameter in module.parameters())
    dist.barrier()  # which the other one reaches, or this call hangs
    return "" if dist.get_rank() == 0 else error_of(buckets.finish)[1]


def test_garbage_keeps_nobody_waiting(ranks2):
    _, text = ranks2.run(garbage)
    assert text.endswith("Cause: rank 0 of it has let go of its GradientBuckets")


@on_ranks(2)
def test_ranks_that_finish_buckets_in_other_orders_are_told():
    """Two models of the same names, in their first step, which ranks finish in turn."""
    modules = [chain(), chain()]
    both = [GradientBuckets(module, dist.group.WORLD) for module in modules]
    for module in modules:
        backward(module)
    started = time.monotonic()
    errors = [error_of(buckets.finish) for buckets in both[:: 1 - 2 * dist.get_rank()]]
    assert time.monotonic() - started < patient(15.0)  # half of the group's time-out
    kind, text = errors[0]
    assert kind == "RuntimeError"
    assert "ranks have left the common order of calls" in text
    assert "gradients of a step, buckets of call " in text
