"""Options of `GradientBuckets`: dtypes, main_grad, tensor-parallel sums, NaN, overlap, TP-invariance."""

import math
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    SMALL,
    WIDTH,
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    failing,
    loss_of,
    own_batch,
    step,
    two_by_two,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks
from tests.checks import error_of
from tests.on_ranks import equal_on_all
from tests.patience import patient
from tests.products import pairwise
from tests.segments import tp_invariance
from tpkernels import GradientBuckets
from tpkernels.buckets import engine
from tpkernels.comm.transports import select
from tpkernels.reserved_sms import Reservation

on_reductions = pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])


class WaitInBackward(torch.autograd.Function):
    """Its backward does not end before `happened()`, or some seconds are over."""

    @staticmethod
    def forward(ctx, x, happened):
        ctx.happened = happened
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        deadline = time.monotonic() + patient(10.0)
        while not ctx.happened() and time.monotonic() < deadline:
            time.sleep(0.001)
        return gradient, None


def waiting_backward(module, buckets, happened):
    """Of a second step, between the gradients of the last layers and those of the first."""
    step(module, buckets)
    buckets.zero()
    hidden = module[0](own_batch())
    loss_of(module[1:](WaitInBackward.apply(hidden, happened))).backward()


@pytest.mark.way("c10d")
@on_ranks(2)
def test_buckets_are_reduced_while_backward_goes_on():
    module = chain()
    buckets = wrap(module)
    expected = expected_gradients(module)[-1]
    seen = []

    def is_reduced():
        gradient = module[-1].bias.grad
        seen.append(gradient is not None and torch.allclose(gradient, expected))
        return seen[-1]

    waiting_backward(module, buckets, is_reduced)
    buckets.finish()
    assert seen[-1], "the last layer's gradient was not reduced while the first layer's was still to come"


@on_ranks(2)
def test_hooks_add_up_buckets_of_all_ranks():
    """Once all ranks have the last layer's gradient, those of layers before it find time to add it up."""
    module = chain()
    buckets = wrap(module)

    def all_are_here():
        dist.barrier()
        return True

    waiting_backward(module, buckets, all_are_here)
    dist.barrier()
    torch.testing.assert_close(module[-1].bias.grad, expected_gradients(module)[-1])
    buckets.finish()


@both_ways
@on_ranks(2)
def test_bfloat16_gradients_can_be_summed_in_float32():
    module = chain(2).bfloat16()
    buckets = wrap(module, grad_dtype=torch.float32)
    weight = module[1].weight
    for _ in range(2):
        buckets.zero()
        with buckets.no_sync():
            (weight.sum() * 256).backward()
            for _ in range(3):  # 256 + 1 is 256 in bfloat16
                weight.sum().backward()
        weight.sum().backward()
        buckets.finish()
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, torch.full_like(weight.grad, 260.0))


@pytest.mark.way("c10d")
@on_ranks(2)
def test_products_leave_processors_to_buckets_in_flight():
    """From the first that backward sends to `finish`; as on a GPU, by torch's setting."""
    seen, setting = [], torch._C._get_sm_carveout_experimental
    with patch.object(engine, "reservation_of", lambda group, device: Reservation(16, 64)):
        module, other = chain(), chain()
        buckets, others = wrap(module, bucket_bytes=1), wrap(other, bucket_bytes=1)
    for _ in range(2):
        buckets.zero(), others.zero()
        x = own_batch().requires_grad_()
        x.register_hook(lambda _: seen.append(setting()))
        module(x).sum().backward()
        other(x).sum().backward()
        for each in (buckets, others):
            each.finish()
            seen.append(setting())
    assert seen == [None, None, None, None, 16, 32, 16, None]  # the first backward counts gradients
    module(x).sum().backward()
    buckets.detach()  # with collectives in flight
    assert setting() is None


NARROW = {  # dtype, options, gradients of rank 0 and of the others, what their sum or mean is rounded to
    "bfloat16": (torch.bfloat16, {"average": False}, 256.0, 1.0, 260.0),  # where 256 + 1 is 256
    "float16": (torch.float16, {"average": False}, 2048.0, 1.0, 2052.0),
    "wire": (torch.float32, {"wire_dtype": torch.bfloat16}, 1 + 2**-10, 1.5, 1.375),  # 2**-10 is lost
}


@pytest.mark.way("c10d")
@pairwise(case=NARROW, reduce=["all_reduce", "reduce_scatter"])
@on_ranks(4)
def test_halves_are_added_in_float32_and_wires_may_be_narrow(case, reduce):
    dtype, options, first, others, expected = case
    torch.manual_seed(0)
    module = nn.Linear(64, 64).to(dtype)
    buckets = wrap(module, reduce=reduce, **options)
    for _ in range(2):
        buckets.zero()
        total = sum(parameter.sum() for parameter in module.parameters())
        (total * (others if dist.get_rank() else first)).backward()
        buckets.finish()
        for shard in buckets.gradient_shards() if reduce == "reduce_scatter" else buckets.buckets:
            assert shard.dtype == dtype
            assert {*shard.tolist()} <= {0.0, expected}


class FusedLinear(torch.autograd.Function):
    """Adds the weight's gradient to `main_grad` itself, and returns garbage for form's sake."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(gradient.T.to(weight.main_grad.dtype), x.to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


@both_ways
@on_ranks(2)
def test_main_grad_takes_the_gradients_of_fused_and_plain_layers():
    module = chain(3)
    buckets = wrap(module, main_grad=True)

    def forward(x):
        x = FusedLinear.apply(x, module[0].weight) + module[0].bias
        return module[2](module[1](x))

    for _ in range(3):
        expected = expected_gradients(module, (0, 1))
        buckets.zero()
        with buckets.no_sync():
            loss_of(forward(own_batch(0))).backward()
        loss_of(forward(own_batch(1))).backward()
        assert buckets.finish() == ()
        assert all(parameter.grad is None for parameter in module.parameters())
        torch.testing.assert_close([parameter.main_grad for parameter in module.parameters()], expected)
    assert buckets.launched_in_backward == len(buckets.buckets)
    buckets.detach()
    assert not hasattr(module[0].weight, "main_grad")


def own_elements(buckets, parameter):
    """Of the parameter's gradient, what lies in this rank's shards."""
    shards = [shard for shard in buckets.gradient_shards() if shard.numel()]
    spans = [(shard.data_ptr(), shard.data_ptr() + shard.nbytes) for shard in shards]
    start, width = parameter.grad.data_ptr(), parameter.grad.element_size()
    places = [start + index * width for index in range(parameter.numel())]
    return [index for index, at in enumerate(places) if any(first <= at < last for first, last in spans)]


@both_ways
@on_reductions
@on_ranks(4)
def test_sequence_parallel_parameters_are_summed_over_tensor_parallel_ranks_too(reduce):
    tensor_group, data_group = two_by_two()
    module = nn.ModuleList([chain(2), nn.LayerNorm(WIDTH).double(), nn.LayerNorm(WIDTH).double()])
    for norm in module[1:]:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
    options = {"bucket_bytes": SMALL, "tensor_parallel_group": tensor_group, "reduce": reduce}
    buckets = GradientBuckets(module, data_group, **options)
    for number in range(3):
        buckets.zero()
        output = module[2](module[0][1](module[1](module[0][0](own_batch(number)))))
        gradients = torch.autograd.grad(loss_of(output), list(module.parameters()), retain_graph=True)
        loss_of(output).backward()
        assert buckets.finish() == ()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(gradient, group=tensor_group)
            dist.all_reduce(gradient, group=data_group)
            own = own_elements(buckets, parameter) if reduce == "reduce_scatter" else slice(None)
            torch.testing.assert_close(parameter.grad.flatten()[own], gradient.flatten()[own] / 2)
    assert buckets.launched_in_backward == len(buckets.buckets)
    shapes = [str(bucket.shape) for bucket in buckets.buckets]
    of_ranks = [None] * 4
    dist.all_gather_object(of_ranks, shapes)
    assert of_ranks == [shapes] * 4


@both_ways
@pytest.mark.parametrize("when", [0, 1], ids=["first_step", "later"])
@pytest.mark.parametrize("gives_up", [False, True], ids=["nan", "gives_up"])
@on_ranks(2)
def test_rank_with_nan_or_that_gives_up_is_named_before_anything_is_sent(gives_up, when):
    module = chain()
    buckets = wrap(module, check_nan=True)
    is_faulty = dist.get_rank() == 1
    for number in range(4):
        if number != when:
            step(module, buckets, number)
            assert_gradients(module, expected_gradients(module, (number,)))
            continue
        buckets.zero()
        if gives_up and is_faulty:
            with pytest.raises(ValueError, match="no gradient today"):
                failing(module, number).backward()
            continue
        poison = torch.ones(WIDTH, dtype=torch.float64)
        if is_faulty:
            poison[3] = torch.nan
        loss = loss_of(module(own_batch(number))) + (module[3].bias * poison).sum()
        told = [error_of(call) for call in (loss.backward, buckets.finish)]  # of which either may raise
        text = next(text for kind, text in told if kind == "RuntimeError")
        assert text.endswith("was not sent")
        if gives_up:
            words = "rank 1 has given up this step, by an exception in backward, say; bucket"
            assert text.startswith(f"GradientBuckets: {words}")
            # told in backward, the step is still open
            assert not number or told[1][1].endswith("this step has been refused; call zero()")
        else:
            assert "on rank 1 the gradient of '3.bias' holds NaN; bucket " in equal_on_all(text)
    GradientBuckets(chain(1), dist.group.WORLD).detach()  # the next call has one number on all ranks


@on_ranks(2)
def test_profiler_shows_a_range_for_each_bucket():
    module = chain()
    buckets = wrap(module)
    step(module, buckets)
    with torch.profiler.profile() as profile:
        step(module, buckets)
    names = {event.name for event in profile.events() if event.name.startswith("tpkernels: bucket")}
    assert len(names) == len(buckets.buckets)
    assert min(names).startswith("tpkernels: bucket 0 of 4 ('")


@both_ways
@pairwise(
    steps={"first": (0,), "later": (1, 3, 5)},
    failing_ranks={"all": (0, 1), "one": (1,)},
    reduce=["all_reduce", "reduce_scatter"],
)
@on_ranks(2)
def test_zero_recovers_from_an_exception_in_backward(steps, failing_ranks, reduce):
    """Some ranks fail in the middle of backward. All go on with the next step."""
    module = chain()
    buckets = wrap(module, reduce=reduce)
    for number in range(7):
        if number in steps and dist.get_rank() in failing_ranks:
            buckets.zero()
            with pytest.raises(ValueError, match="no gradient today"):
                failing(module, number).backward()
            continue
        step(module, buckets, number)
        # where not all failed: a sum that lacks a part must not pass for a sum
        assert any(shard.isnan().any() for shard in buckets.gradient_shards()) == (number in steps)
        if number in steps:
            continue
        expected = expected_gradients(module, (number,))
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            own = own_elements(buckets, parameter) if reduce == "reduce_scatter" else slice(None)
            torch.testing.assert_close(parameter.grad.flatten()[own], gradient.flatten()[own])
    assert buckets.launched_in_backward == 4  # half a first step teaches nothing


@pytest.mark.way("c10d")
@on_ranks(4)
def test_marked_buckets_go_on_to_the_second_group_in_backward():
    """How many collectives of each group backward starts, where every bucket needs one of each."""
    groups = tensor_group, data_group = two_by_two()
    module = nn.Sequential(*[nn.LayerNorm(WIDTH).double() for _ in range(6)])
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    buckets = GradientBuckets(module, data_group, bucket_bytes=256, tensor_parallel_group=tensor_group)
    for number in range(3):
        buckets.zero()
        before = [group._get_sequence_number_for_group() for group in groups]
        backward(module, number)
        after = [group._get_sequence_number_for_group() for group in groups]
        buckets.finish()
        assert_gradients(module, [gradient * 2 for gradient in expected_gradients(module, (number,))])
    count = len(buckets.buckets)
    assert count > 3
    # the last has no launch after it, and goes on to the second group in finish()
    assert [last - first for first, last in zip(before, after, strict=True)] == [count, count - 1]


@both_ways
@on_ranks(2)
def test_step_that_failed_passes_for_no_other():
    """Nothing is reduced by a finish() that is refused; the next step is right."""
    module = chain()
    buckets = wrap(module, check_nan=True)
    spoilt = own_batch() * (float("nan") if dist.get_rank() == 1 else 1.0)
    loss_of(module(spoilt)).backward()
    with pytest.raises(RuntimeError, match="holds NaN"):
        buckets.finish()
    for call in (buckets.finish, lambda: backward(module)):
        words = r"this step has failed, and part of it is not reduced; call zero\(\)$"
        with pytest.raises(RuntimeError, match=words):
            call()
    step(module, buckets)
    assert_gradients(module, expected_gradients(module))


@both_ways
@on_ranks(2)
def test_step_that_failed_on_one_rank_is_not_mixed_with_its_next():
    """Rank 0's finish() is refused, so it gives the step up; its next one is not taken for this one."""
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    named = [(str(number), weight) for number, weight in enumerate(weights)]
    buckets = GradientBuckets(named, dist.group.WORLD, average=False, bucket_bytes=1)
    told, found = [], []
    for number in range(3):
        buckets.zero()
        fails = number == 1 and dist.get_rank() == 0
        for weight in weights[: 1 if fails else 2]:
            (weight * 10.0 ** (2 * number)).sum().backward()
        if fails:
            weights[1].data = weights[1].grad = torch.ones(4)
        told.append(error_of(buckets.finish)[1])
        weights[1].data = torch.zeros(8)
        found.append([{*view.tolist()} for view in buckets.buckets])
    assert found[0] == [{2.0, 0.0}] * 2  # and what lies between gradients
    assert found[2] == [{20000.0, 0.0}] * 2
    if dist.get_rank() == 0:
        assert "'1' is of shape [4]; expected [8]" in told[1]
    else:
        assert any(math.isnan(value) for values in found[1] for value in values)  # what did not come


def refused(marked):
    weight = nn.Parameter(torch.zeros(8))
    weight.sequence_parallel = marked
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    group, tensor_group = (alone, dist.group.WORLD) if marked else (dist.group.WORLD, alone)
    with tp_invariance(4):
        return error_of(GradientBuckets, [("weight", weight)], group, tensor_parallel_group=tensor_group)


@both_ways
@on_ranks(2, 4)
def test_tp_invariance_refuses_marks_and_more_than_two_data_ranks_where_backends_add():
    kind, text = refused(marked=False)
    if dist.get_world_size() == 2 or select.requested_transport == "shared":  # the order of ranks
        assert kind == "nothing", text
    else:
        assert kind == "ValueError"
        assert "1 or 2 data-parallel ranks with TP-invariance, got 4 (TPKERNELS_TRANSPORT=c10d)" in text
    kind, text = refused(marked=True)
    assert kind == "ValueError"
    assert "'weight' is marked sequence_parallel: its gradient would be added over tensor-" in text
