"""Orders of calls that nobody planned for: the gradients are right, or an error says why not."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.given import lies_in_shared_memory
from tests.buckets.golden import assert_gradients, batch, chain, expected_gradients, loss_of, own_batch, wrap
from tests.buckets.test_ext_arguments import arranged
from tests.checks import error_of
from tpkernels import GradientBuckets

SIZES = (60, 72, 12)  # of buckets


def step(module, buckets, number=0):
    buckets.zero()
    loss_of(module(own_batch(number))).backward()
    buckets.finish()


def trained(**options):
    """Buckets that launch in backward."""
    module = chain()
    buckets = wrap(module, **options)
    for number in range(2):
        step(module, buckets, number)
    return module, buckets


def there_and_back(zeroes):
    """A module that was converted for a moment, which takes its hooks away."""
    module, buckets = trained()
    optimizer = torch.optim.SGD(module.parameters())
    module.float()
    module.double()
    launched = []
    for number in range(2, 5):
        buckets.zero() if zeroes == "buckets" else optimizer.zero_grad()
        loss_of(module(own_batch(number))).backward()
        assert buckets.finish() == ()
        assert_gradients(module, expected_gradients(module, (number,)))
        launched.append(buckets.launched_in_backward)
    return launched


@pytest.mark.parametrize(("zeroes", "launched"), [("buckets", [4, 4, 4]), ("optimizer", [0, 4, 4])])
def test_hooks_come_back_with_the_dtype(ranks2, zeroes, launched):
    assert ranks2.run(there_and_back, zeroes) == [launched] * 2


def converted_sum():
    """It was added up already, or is a gradient that no hook saw: nobody knows."""
    module, buckets = trained(average=False)
    module.float()
    module.double()
    refused = error_of(buckets.finish)
    step(module, buckets, 2)
    assert_gradients(module, expected_gradients(module, (2,), average=False))
    return refused


def test_sums_that_were_converted_are_not_added_up_again(ranks2):
    for kind, text in ranks2.run(converted_sum):
        assert kind == "RuntimeError"
        assert "is reduced already" in text


def no_data(average):
    """On one rank in one step, where the optimizer clears gradients."""
    module, buckets = trained(average=average)
    optimizer = torch.optim.SGD(module.parameters())
    unused = []
    for number in range(2, 5):
        optimizer.zero_grad()
        has_data = dist.get_rank() == 0 or number != 3
        if has_data:
            loss_of(module(own_batch(number))).backward()
        unused.append(len(buckets.finish()))
        expected = expected_gradients(module, (number,), average=average)
        if number == 3:
            expected = torch.autograd.grad(loss_of(module(batch(0, 3))), list(module.parameters()))
            expected = [gradient / 2 if average else gradient for gradient in expected]
        assert_gradients(module, list(expected))
        assert buckets.finish() is not None  # which changes nothing
        assert_gradients(module, list(expected))
    return unused


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_rank_without_data_takes_part_after_the_optimizer_cleared_gradients(ranks2, average):
    assert ranks2.run(no_data, average) == [[0, 0, 0], [0, 8, 0]]


class Zeros(torch.autograd.Function):
    """Its gradient has no memory."""

    @staticmethod
    def forward(ctx, weight):
        return weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch._efficientzerotensor((8, 8), dtype=torch.float64)


def without_memory():
    module, buckets = trained()
    for parameter in module.parameters():
        parameter.grad = torch._efficientzerotensor(parameter.shape, dtype=parameter.dtype)
    for hooked in (False, True):
        if hooked:
            buckets.zero()
            Zeros.apply(module[0].weight).backward()
        buckets.finish()
        assert_gradients(module, [torch.zeros_like(parameter) for parameter in module.parameters()])


def test_gradients_without_memory_are_zeros(ranks2):
    ranks2.run(without_memory)


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
    found, until = set(), time.monotonic() + 2.0
    while time.monotonic() < until:
        found.add(engine.awaited()[0].partition(" (")[0])
    stop.set()
    other.join()
    engine.lose_others()
    return found


@pytest.mark.way("shared")
def test_what_is_awaited_may_come_meanwhile(ranks2):
    found, _ = ranks2.run(looked_at_while_it_is_done)
    assert found <= {"", "all_reduce of bucket 2 of 3"}
    assert "all_reduce of bucket 2 of 3" in found


def garbage():
    """Buckets in flight that one rank lets go of while the other waits for it elsewhere."""
    module, buckets = trained()
    buckets.zero()
    if dist.get_rank() == 0:
        dist.barrier()  # the other has published all, and adds up nothing until it is called again
    loss_of(module(own_batch())).backward()
    if dist.get_rank() == 1:
        dist.barrier()
    started = time.monotonic()
    if dist.get_rank() == 0:
        del buckets
        gc.collect()
        assert not any(lies_in_shared_memory(parameter.grad) for parameter in module.parameters())
    dist.barrier()
    assert time.monotonic() - started < 10.0
    return "" if dist.get_rank() == 0 else error_of(buckets.finish)[1]


@pytest.mark.way("shared")
def test_garbage_keeps_nobody_waiting(ranks2):
    _, text = ranks2.run(garbage)
    assert text.endswith("Cause: rank 0 of it has let go of its GradientBuckets")


def in_two_orders():
    """Two models of the same names, in their first step, which ranks finish in turn."""
    modules = [chain(), chain()]
    both = [GradientBuckets(module, dist.group.WORLD) for module in modules]
    for module in modules:
        loss_of(module(own_batch())).backward()
    started = time.monotonic()
    errors = [error_of(buckets.finish) for buckets in both[:: 1 - 2 * dist.get_rank()]]
    assert time.monotonic() - started < 15.0  # half of the group's time-out
    return errors[0]


@pytest.mark.way("shared")
def test_ranks_that_finish_buckets_in_other_orders_are_told(ranks2):
    for kind, text in ranks2.run(in_two_orders):
        assert kind == "RuntimeError"
        assert "ranks have left the common order of calls" in text
        assert "gradients of a step, buckets of call " in text
