"""Buckets in memory that ranks share: who chooses it, and what is added up there, to the bit."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.given import Given, added_up, bits, lies_in_shared_memory, wild
from tests.buckets.golden import assert_gradients, chain, expected_gradients, loss_of, own_batch, step, wrap
from tests.buckets.ways import on_ranks, under
from tests.checks import error_of
from tests.ops.transport_cases import heard
from tpkernels import GradientBuckets
from tpkernels.comm.transports import mailbox

HALVES = (torch.bfloat16, torch.float16)


def choice():
    """What the log says of three steps, and whether the buckets lie in shared memory."""
    with heard("tpkernels.choices") as said:
        module = chain()
        buckets = wrap(module)
        for number in range(3):
            step(module, buckets, number)
            assert_gradients(module, expected_gradients(module, (number,)))
    return said, {lies_in_shared_memory(bucket) for bucket in buckets.buckets}


def noted(where, ranks=2):
    return [f"gradient buckets, 0.0 MB, process group '0' of {ranks} ranks: {where}"]


@pytest.mark.parametrize(
    ("transport", "where", "shares"),
    [
        ("auto", "shared (2 ranks are on one machine)", True),
        ("shared", "shared (2 ranks are on one machine)", True),
        ("c10d", "apart (TPKERNELS_TRANSPORT=c10d)", False),
        ("symmetric", "apart (TPKERNELS_TRANSPORT=symmetric)", False),
    ],
)
def test_choice_follows_the_transport(ranks2, transport, where, shares):
    assert ranks2.pool.run(under, transport, choice) == [(noted(where), {shares})] * 2


@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_one_rank_has_nobody_to_share_with(ranks1, transport):
    assert ranks1.run(under, transport, choice) == [(noted("apart (there is one rank)", ranks=1), {False})]


def asked_for_on(machine):
    with patch.object(mailbox, "machine", lambda: machine):
        return error_of(wrap, chain())


def test_memory_that_is_asked_for_on_two_machines_is_the_same_error_on_all_ranks(ranks2):
    words = "GradientBuckets: TPKERNELS_TRANSPORT=shared: ranks are on 2 machines, one on each"
    assert ranks2.run_each(asked_for_on, [("left",), ("right",)]) == [("CannotTakePart", words)] * 2


def asked_for():
    return error_of(wrap, chain())


@pytest.mark.parametrize("other", ["auto", "c10d"])
def test_ranks_that_ask_for_different_transports_are_told(ranks2, other):
    first, second = ranks2.pool.run_each(under, [("shared", asked_for), (other, asked_for)])
    assert first == second
    assert first[0] == "ValueError"
    assert "ranks disagree: rank 0 has GradientBuckets(" in first[1]
    assert "with TPKERNELS_TRANSPORT=shared; rank 1 has GradientBuckets(" in first[1]


def wrong_bits(ranks, cases):
    """Of cases, those whose results are not those of an addition by hand, in the first `ranks` ranks."""
    group = dist.new_group(range(ranks))
    return [wrong for case in cases for wrong in wrong_steps(group, *case)] if dist.get_rank() < ranks else []


def wrong_steps(group, dtype, result, wide, options):
    module, ranks = Given(dtype), group.size()
    buckets = GradientBuckets(module, group, **options)
    found = []
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
        if bits(expected) != bits(received):
            found.append((number, dtype, options))
    assert all(lies_in_shared_memory(bucket) for bucket in buckets.buckets if bucket.numel())
    buckets.detach()
    return found


def plain_cases():
    return [
        (dtype, dtype, torch.float64 if dtype == torch.float64 else torch.float32, options)
        for dtype in (torch.float64, torch.float32, *HALVES)
        for average in (True, False)
        for reduce in ({}, {"reduce": "reduce_scatter"})
        for bucket_bytes in (300, 2**20)  # many, and one
        if (options := {"average": average, "bucket_bytes": bucket_bytes, **reduce})
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_in_the_order_of_ranks_rounded_once(ranks4, ranks):
    assert (
        ranks4.run(wrong_bits, ranks, plain_cases()[ranks % 2 :: 2] if ranks < 4 else plain_cases())
        == [[]] * 4
    )


def test_wild_gradients_tell_orders_and_dtypes_apart():
    for dtype, wide in ((torch.float32, torch.float32), (torch.float64, torch.float64)):
        gradients = [wild(Given(dtype), rank, 0) for rank in range(3)]
        good = bits(added_up(gradients, dtype, wide, average=True))
        assert good != bits(added_up(gradients[::-1], dtype, wide, average=True))
    gradients = [wild(Given(torch.float32), rank, 0) for rank in range(4)]
    found = {
        str(bits(added_up(gradients, torch.float32, wide, average=True)))
        for wide in (torch.float32, torch.float64, torch.bfloat16)
    }
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
    cases = [
        (*types, {"bucket_bytes": size, **options}) for *types, options in cases for size in (300, 2**20)
    ]
    assert ranks4.run(wrong_bits, 4, cases) == [[]] * 4


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


@on_ranks(2)
def test_parameters_may_all_be_empty():
    module = Given(sizes=[(0,), (3, 0)])
    buckets = GradientBuckets(module, dist.group.WORLD)
    for _ in range(3):
        buckets.zero()
        module.receive(list(module.parameters()))
        buckets.finish()
    assert [tuple(grad.shape) for grad in module.gradients()] == [(0,), (3, 0)]


def trained():
    """Losses and gradients of some steps."""
    module = chain().float()
    buckets = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    found = []
    for number in range(5):
        buckets.zero()
        loss = loss_of(module(own_batch(number).float()))
        loss.backward()
        buckets.finish()
        optimizer.step()
        found.append((loss.item(), bits(parameter.grad for parameter in module.parameters())))
    return found


def test_two_ranks_train_alike_both_ways(ranks2):
    """Halves of either are added, or the sum is halved: the same, as no float here is tiny."""
    assert ranks2.pool.run(under, "shared", trained) == ranks2.pool.run(under, "c10d", trained)
