"""The memory that ranks share: where it cannot be had, who else has it, and what is left of it."""

import gc
import os
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.given import lies_in_shared_memory, shared_maps
from tests.buckets.golden import (
    WIDTH,
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    plain,
    step,
    trained,
    two_by_two,
    wrap,
)
from tests.buckets.ways import on_ranks, under
from tests.checks import error_of
from tests.forks import forked
from tests.ops.transport_cases import heard
from tests.patience import patient
from tests.ranks import RankPool
from tpkernels import GradientBuckets
from tpkernels.buckets import memory
from tpkernels.comm.transports import shared

ORDER = (2, 0, 3, 1)  # of layers: another than that of parameters, so that the first step arranges anew


def shuffled(module, data):
    for number in ORDER:
        data = module[number](data)
    return data


def assert_right(module, number, forward=plain):
    assert_gradients(module, expected_gradients(module, (number,), forward))


def refuse(*_):
    raise PermissionError("not today")


def cannot(rank, owner, name):
    """One rank cannot do this."""
    real = getattr(owner, name)
    return patch.object(owner, name, refuse if dist.get_rank() == rank else real)


PLACES = [(shared, "_mapped"), (memory, "new_memory"), (memory, "copy_in_forks")]
CANNOT = "rank 1 cannot take part: PermissionError: not today"


def apart_as_one_cannot(place):
    """What the log says on each rank; all gradients are right."""
    with heard("tpkernels.choices") as said, cannot(1, *PLACES[place]):
        module = chain()
        buckets = wrap(module)
        for number in range(3):
            step(module, buckets, number)
            assert_right(module, number)
    assert buckets.launched_in_backward > 0
    assert not any(map(lies_in_shared_memory, buckets.buckets))
    return said


@pytest.mark.parametrize("place", range(3), ids=[name for _, name in PLACES])
def test_ranks_go_on_apart_if_one_cannot_map_memory(ranks2, place):
    for rank, said in enumerate(ranks2.pool.run(under, "auto", apart_as_one_cannot, place)):
        assert said == [
            "gradient buckets, 0.0 MB, process group '0' of 2 ranks: apart (GradientBuckets: memory of "
            f"gradient buckets on rank {rank}: {CANNOT})"
        ]


def asked_for(place):
    with cannot(1, *PLACES[place]):
        refused = error_of(wrap, chain())
    module = chain()
    buckets = wrap(module)  # the group is as good as before
    step(module, buckets)
    assert_right(module, 0)
    return refused


@pytest.mark.parametrize("place", range(3), ids=[name for _, name in PLACES])
def test_memory_that_is_asked_for_and_cannot_be_had_is_an_error(ranks2, place):
    words = "GradientBuckets: memory of gradient buckets on rank"
    found = ranks2.run(asked_for, place)
    assert found == [("CannotTakePart", f"{words} {rank}: {CANNOT}") for rank in range(2)]


def later():
    """Memory for the first arrangement can be had, for the second not."""
    module = chain()
    with heard("tpkernels.choices") as said:
        buckets = wrap(module)
        with cannot(1, shared, "_mapped"):
            refused = error_of(step, module, buckets, 0, shuffled)
        assert_right(module, 0, shuffled)
        for number in range(1, 4):
            step(module, buckets, number, shuffled)
            assert_right(module, number, shuffled)
    return refused[0], [line.partition("ranks: ")[2].split()[0] for line in said]


@pytest.mark.parametrize(
    ("how", "told"),
    [("auto", ("nothing", ["shared", "apart"])), ("shared", ("CannotTakePart", ["shared"]))],
)
def test_if_memory_cannot_be_had_for_other_buckets_ranks_go_apart_or_are_told(how, told):
    with RankPool(2) as ranks:
        assert ranks.run(under, how, later) == [told] * 2


def one_of_four_cannot(marked):
    """Tensor-parallel groups 0 1 and 2 3, data-parallel 0 2 and 1 3."""
    over_tensor, over_data = two_by_two()
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.LayerNorm(WIDTH).double() for _ in range(3)])
    if marked:
        for parameter in module[1].parameters():
            parameter.sequence_parallel = True
    with cannot(3, shared, "_mapped"):
        buckets = GradientBuckets(module, over_data, bucket_bytes=256, tensor_parallel_group=over_tensor)
    for number in range(3):
        step(module, buckets, number)
        if marked:
            expected = expected_gradients(module, (number,))
            assert_gradients(module[1], [2 * gradient for gradient in expected[2:4]])
    return {lies_in_shared_memory(bucket) for bucket in buckets.buckets}


@pytest.mark.parametrize(("marked", "share"), [(True, [False] * 4), (False, [True, False, True, False])])
def test_groups_choose_together_if_they_have_a_bucket_in_common(ranks4, marked, share):
    assert ranks4.pool.run(under, "auto", one_of_four_cannot, marked) == [{each} for each in share]


def held():
    """Maps and descriptors."""
    return shared_maps(), len(os.listdir("/proc/self/fd"))


@on_ranks(4)
def test_nothing_is_left_of_memory_that_was_shared():
    """What is held before, with buckets, after the first step, and at the end."""
    module = chain()
    step(module, wrapped := wrap(module), 0, shuffled)  # whatever is opened once, is
    wrapped.detach()
    module.zero_grad()
    gc.collect()
    counts = [held()]
    buckets = wrap(module)
    counts.append(held())
    step(module, buckets, 0, shuffled)
    counts.append(held())
    step(module, buckets, 1, shuffled)
    buckets.detach()
    kept = [parameter.grad.clone() for parameter in module.parameters()]
    assert all(lies_in_shared_memory(parameter.grad) for parameter in module.parameters())
    dist.barrier()  # others are gone
    del buckets
    gc.collect()
    assert_gradients(module, kept, rtol=0, atol=0)
    module.zero_grad()
    del wrapped
    gc.collect()
    before, made, learnt = counts
    assert before == held()
    assert before[0] == 0
    assert made[0] == learnt[0] == 4  # of the memory that the first step gave back, nothing
    assert made[1] == learnt[1]


@on_ranks(2)
def test_gradients_outlive_their_group():
    """Gradients of buckets and of a group that are gone."""
    module = chain()
    buckets = wrap(module)
    step(module, buckets)
    expected = expected_gradients(module, (0,))
    dist.barrier()
    dist.destroy_process_group()
    assert_gradients(module, expected)
    del buckets
    gc.collect()
    assert_gradients(module, expected)
    for parameter in module.parameters():
        parameter.grad.add_(1.0)
    assert_gradients(module, [gradient + 1.0 for gradient in expected])


@on_ranks(2)
def test_fork_reaches_neither_its_parent_nor_other_ranks():
    """A fork of each rank spoils all that it can reach."""
    module, buckets = trained()

    def spoil():
        for bucket in buckets.buckets:
            bucket.fill_(torch.nan)
        errors = [error_of(backward, module), error_of(buckets.finish)]
        errors.append(error_of(buckets.zero))
        for parameter in module.parameters():
            parameter.grad = None
        errors.append(error_of(backward, module))
        buckets.detach()
        return errors

    answer = forked(spoil)
    dist.barrier()
    assert_right(module, 1)
    for number in range(2, 4):
        step(module, buckets, number)
        assert_right(module, number)
    assert all("which was forked from it" in text for _, text in answer[1:3]), answer


@on_ranks(2)
def test_backward_of_a_fork_waits_for_nobody():
    """It comes back at once, while its parent is in the next step."""
    module, buckets = trained(timeout=timedelta(seconds=patient(2)))
    ready, go = os.pipe()

    def look():
        os.read(ready, 1)
        started = time.monotonic()
        error_of(backward, module)
        return time.monotonic() - started < patient(1.0)

    def go_on():
        step(module, buckets, 2)
        dist.barrier()
        os.write(go, b"!")

    assert forked(look, go_on)
