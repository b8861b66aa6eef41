"""The memory that ranks share: who has it, what is added up there, to the bit, and what is left of it."""

import gc
import os
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    WIDTH,
    Given,
    added_up,
    assert_gradients,
    backward,
    bits,
    chain,
    expected_gradients,
    lies_in_shared_memory,
    plain,
    shared_maps,
    step,
    trained,
    two_by_two,
    wild,
    wrap,
)
from tests.buckets.ways import moved_to, on_ranks, under
from tests.checks import error_of, open_files
from tests.ops.transport_cases import heard
from tests.patience import patient
from tests.products import combined
from tests.programs import forked
from tests.ranks import RankPool
from tpkernels import GradientBuckets
from tpkernels.buckets import memory
from tpkernels.comm import agreement
from tpkernels.comm.agreement import CannotTakePart
from tpkernels.comm.transports import select, shared

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
each_place = pytest.mark.parametrize("place", range(3), ids=[name for _, name in PLACES])


@pytest.mark.way("auto")
@each_place
@on_ranks(2)
def test_ranks_go_on_apart_if_one_cannot_map_memory(place):
    with heard("tpkernels.choices") as said, cannot(1, *PLACES[place]):
        module = chain()
        buckets = wrap(module)
        for number in range(3):
            step(module, buckets, number)
            assert_right(module, number)
    assert buckets.launched_in_backward > 0
    assert not any(map(lies_in_shared_memory, buckets.buckets))
    assert said == [
        "gradient buckets, 0.0 MB, process group '0' of 2 ranks: apart (GradientBuckets: memory of "
        f"gradient buckets on rank {dist.get_rank()}: {CANNOT})"
    ]


@each_place
@on_ranks(2)
def test_memory_that_is_asked_for_and_cannot_be_had_is_an_error(place):
    words = f"^GradientBuckets: memory of gradient buckets on rank {dist.get_rank()}: {CANNOT}$"
    with cannot(1, *PLACES[place]), pytest.raises(CannotTakePart, match=words):
        wrap(chain())
    module = chain()
    buckets = wrap(module)  # the group is as good as before
    step(module, buckets)
    assert_right(module, 0)


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
    ("how", "told"), [("auto", ("nothing", ["shared", "apart"])), ("shared", ("CannotTakePart", ["shared"]))]
)
def test_if_memory_cannot_be_had_for_other_buckets_ranks_go_apart_or_are_told(how, told):
    with RankPool(2) as ranks:
        assert ranks.run(under, how, later) == [told] * 2


@pytest.mark.way("auto")
@pytest.mark.parametrize(("marked", "share"), [(True, [False] * 4), (False, [True, False, True, False])])
@on_ranks(4)
def test_groups_choose_together_if_they_have_a_bucket_in_common(marked, share):
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
    assert {lies_in_shared_memory(bucket) for bucket in buckets.buckets} == {share[dist.get_rank()]}


def held():
    """Maps and descriptors."""
    return shared_maps(), open_files()


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
    maps, files = held()
    assert (before[0], maps) == (0, 0)
    assert not files - before[1]
    assert made[0] == learnt[0] == 4  # of the memory that the first step gave back, nothing
    assert not learnt[1] - made[1]


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
    module, buckets = trained(timeout=timedelta(seconds=patient(60)))
    ready, go = os.pipe()

    def look():
        os.read(ready, 1)
        started = time.monotonic()
        error_of(backward, module)
        return time.monotonic() - started < patient(30)

    def go_on():
        step(module, buckets, 2)
        dist.barrier()
        os.write(go, b"!")

    assert forked(look, go_on)


HALVES = (torch.bfloat16, torch.float16)


def choice():
    """What the log says, and whether the buckets lie in shared memory."""
    with heard("tpkernels.choices") as said:
        buckets = wrap(chain())
    dist.barrier()  # whoever lets go earlier breaks connections of others that are still being made
    return said, {lies_in_shared_memory(bucket) for bucket in buckets.buckets}


CHOICES = {  # ranks; who shares
    "auto": (2, "shared (2 ranks are on one machine)"),
    "shared": (2, "shared (2 ranks are on one machine)"),
    "c10d": (2, "apart (TPKERNELS_TRANSPORT=c10d)"),
    "symmetric": (2, "apart (TPKERNELS_TRANSPORT=symmetric)"),
    "auto on one rank": (1, "apart (there is one rank)"),
    "shared on one rank": (1, "apart (there is one rank)"),
}


@pytest.mark.parametrize("asked", CHOICES)
def test_choice_follows_the_transport(ranks1, ranks2, asked):
    ranks, where = CHOICES[asked]
    pool = ranks2.pool if ranks == 2 else ranks1
    told = [f"gradient buckets, 0.0 MB, process group '0' of {ranks} ranks: {where}"]
    assert pool.run(under, asked.split()[0], choice) == [(told, {where.startswith("shared")})] * ranks


def asked_for_on(machine):
    with moved_to(machine):
        return error_of(wrap, chain())


@pytest.mark.parametrize("other", ["auto", "c10d"])
def test_memory_that_cannot_be_shared_is_an_error_on_all_ranks(ranks2, other):
    words = "GradientBuckets: TPKERNELS_TRANSPORT=shared: ranks are on 2 machines, one on each"
    assert ranks2.run_each(asked_for_on, [("left",), ("right",)]) == [("CannotTakePart", words)] * 2
    first, second = ranks2.pool.run_each(under, [(way, asked_for_on, "one") for way in ("shared", other)])
    assert first == second
    assert first[0] == "ValueError"
    assert "ranks disagree: rank 0 has GradientBuckets(" in first[1]
    assert "with TPKERNELS_TRANSPORT=shared; rank 1 has GradientBuckets(" in first[1]


def assert_bits(ranks, cases):
    """Those of an addition by hand, in the first `ranks` ranks."""
    group = dist.new_group(range(ranks))
    for case in cases if dist.get_rank() < ranks else []:
        assert_bits_of_steps(group, *case)


def assert_bits_of_steps(group, dtype, result, wide, options):
    module, ranks = Given(dtype), group.size()
    buckets = GradientBuckets(module, group, **options)
    for number in range(3):
        gradients = [[g.to(result) for g in wild(module, rank, number)] for rank in range(ranks)]
        expected = added_up(gradients, result, wide, average=options.get("average", True))
        buckets.zero()
        module.receive(wild(module, group.rank(), number))
        buckets.finish()
        if "reduce" in options:
            expected, received = buckets.shard(expected), buckets.gradient_shards()
        elif "main_grad" in options:
            received = [parameter.main_grad for parameter in module.parameters()]
        else:
            received = module.gradients()
        assert bits(expected) == bits(received), (number, dtype, options)
    shares = select.requested_transport == "shared"
    assert all(lies_in_shared_memory(bucket) is shares for bucket in buckets.buckets if bucket.numel())
    buckets.detach()


def plain_cases(combined, *dtypes):
    buckets = (300, 2**20)  # many, and one
    reductions = ({}, {"reduce": "reduce_scatter"})
    return [
        (dtype, dtype, torch.float64 if dtype == torch.float64 else torch.float32, options)
        for dtype, average, reduce, bucket_bytes in combined(dtypes, (True, False), reductions, buckets)
        if (options := {"average": average, "bucket_bytes": bucket_bytes, **reduce})
    ]


@combined
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_in_the_order_of_ranks_rounded_once(ranks4, ranks, combined):
    ranks4.run(assert_bits, ranks, plain_cases(combined, torch.float64, torch.float32, *HALVES))


def test_wild_gradients_tell_orders_and_dtypes_apart():
    for dtype, wide in ((torch.float32, torch.float32), (torch.float64, torch.float64)):
        gradients = [wild(Given(dtype), rank, 0) for rank in range(3)]
        good = bits(added_up(gradients, dtype, wide, average=True))
        assert good != bits(added_up(gradients[::-1], dtype, wide, average=True))
    gradients = [wild(Given(torch.float32), rank, 0) for rank in range(4)]
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    found = {str(bits(added_up(gradients, torch.float32, wide, average=True))) for wide in dtypes}
    assert len(found) == 3


def test_options_say_in_which_dtype_is_added(ranks4):
    single, double = torch.float32, torch.float64
    cases = [
        (single, single, double, {"wire_dtype": double}),
        (torch.bfloat16, torch.bfloat16, double, {"wire_dtype": double}),
        # nothing is sent, hence nothing rounded for that
        (single, single, single, {"wire_dtype": torch.bfloat16}),
        (torch.bfloat16, torch.bfloat16, single, {"wire_dtype": torch.bfloat16}),
        (double, double, double, {"wire_dtype": single}),
        (torch.bfloat16, single, single, {"grad_dtype": single}),
        (single, double, double, {"grad_dtype": double}),
        (single, torch.bfloat16, single, {"grad_dtype": torch.bfloat16}),
        (single, single, single, {"main_grad": True}),
        (torch.bfloat16, single, single, {"main_grad": True, "grad_dtype": single, "average": False}),
    ]
    sizes = (300, 2**20)
    cases = [(*types, {"bucket_bytes": size, **options}) for *types, options in cases for size in sizes]
    ranks4.run(assert_bits, 4, cases)


@on_ranks(2)
def test_threads_that_divide_a_shard_change_nothing():
    torch.set_num_threads(2)
    try:
        module = Given(sizes=[(300_001,)])
        buckets = GradientBuckets(module, dist.group.WORLD)
        module.receive(wild(module, dist.get_rank(), 0))
        buckets.finish()
    finally:
        torch.set_num_threads(1)
    of_ranks = [wild(module, rank, 0) for rank in range(dist.get_world_size())]
    assert torch.equal(module.p0.grad, *added_up(of_ranks, torch.float32, torch.float32, average=True))


@combined
def test_two_ranks_have_those_bits_over_c10d_too(ranks4, combined):
    """Halves of either are added, or the sum is halved: the same, as no float here is tiny."""
    ranks4.pool.run(under, "c10d", assert_bits, 2, plain_cases(combined, torch.float32))


def exchanges_of_constructions() -> list[int]:
    group, found = dist.new_group(), []
    for _ in range(3):
        with patch.object(agreement, "gather_small", side_effect=agreement.gather_small) as gathered:
            GradientBuckets(chain(), group).detach()
        found.append(gathered.call_count)
    return found


def test_ranks_ask_once_where_they_run(ranks2):
    """Each time they compare what they bring, offer memory, and say that they have mapped it."""
    assert ranks2.pool.run(under, "auto", exchanges_of_constructions) == [[4, 3, 3]] * 2
