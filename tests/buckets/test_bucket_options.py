"""Options of `GradientBuckets`: dtypes, main_grad, tensor-parallel sums, NaN, profiler, overlap."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    SMALL,
    WIDTH,
    assert_gradients,
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
from tests.patience import patient
from tests.products import once
from tpkernels import GradientBuckets

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
@on_reductions
@on_ranks(2)
def test_bfloat16_on_the_wire(reduce):
    module = chain().float()
    buckets = wrap(module, wire_dtype=torch.bfloat16, reduce=reduce)
    for _ in range(2):
        buckets.zero()
        # 1 + 2**-10 is lost in bfloat16, and 1.5 is not
        for parameter in module.parameters():
            (parameter * (1.5 if dist.get_rank() else 1 + 2**-10)).sum().backward()
        buckets.finish()
        for shard in buckets.gradient_shards() if reduce == "reduce_scatter" else buckets.buckets:
            assert shard.dtype == torch.float32
            assert {*shard.tolist()} <= {0.0, 1.25}


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
    return [
        index
        for index in range(parameter.numel())
        if any(first <= start + index * width < last for first, last in spans)
    ]


@both_ways
@on_reductions
@on_ranks(4)
def test_sequence_parallel_parameters_are_summed_over_tensor_parallel_ranks_too(reduce):
    tensor_group, data_group = two_by_two()
    module = nn.ModuleList([chain(2), nn.LayerNorm(WIDTH).double(), nn.LayerNorm(WIDTH).double()])
    for norm in module[1:]:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
    buckets = GradientBuckets(
        module, data_group, bucket_bytes=SMALL, tensor_parallel_group=tensor_group, reduce=reduce
    )
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


def nan_on_rank_1(when):
    module = chain()
    buckets = wrap(module, check_nan=True)
    for number in range(when + 1):
        expected = expected_gradients(module, (number,))
        step(module, buckets, number)
        assert_gradients(module, expected)
    buckets.zero()
    poison = torch.ones(WIDTH, dtype=torch.float64)
    if dist.get_rank() == 1:
        poison[3] = torch.nan
    loss = loss_of(module[:3](own_batch())) + (module[3].bias * poison).sum()

    def backward_and_finish():  # of which either may raise
        loss.backward()
        buckets.finish()

    with pytest.raises(RuntimeError) as caught:
        backward_and_finish()
    step(module, buckets)  # good as new
    assert_gradients(module, expected_gradients(module))
    return str(caught.value)


@both_ways
@pytest.mark.parametrize("when", [0, 1], ids=["after_first_step", "later"])
def test_nan_is_named_on_all_ranks_before_it_is_sent(ranks2, when):
    messages = ranks2.run(nan_on_rank_1, when)
    assert messages[0] == messages[1]
    assert "on rank 1 the gradient of '3.bias' holds NaN; bucket " in messages[0]
    assert messages[0].endswith("was not sent")


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
@once(failing_ranks={"all": (0, 1), "one": (1,)}, reduce=["all_reduce", "reduce_scatter"])
@on_ranks(2)
def test_zero_recovers_from_an_exception_in_backward(failing_ranks, reduce):
    """Some ranks fail in the middle of backward. All go on with the next step."""
    module = chain()
    buckets = wrap(module, reduce=reduce)
    fails = dist.get_rank() in failing_ranks
    for number in range(6):
        if fails and number % 2:
            buckets.zero()
            with pytest.raises(ValueError, match="no gradient today"):
                failing(module, number).backward()
            continue
        step(module, buckets, number)
        expected = expected_gradients(module, (number,))
        owned = [own_elements(buckets, parameter) for parameter in module.parameters()]
        own = slice(None)
        for parameter, gradient, elements in zip(module.parameters(), expected, owned, strict=True):
            own = elements if reduce == "reduce_scatter" else own
            if number % 2 == 0:
                torch.testing.assert_close(parameter.grad.flatten()[own], gradient.flatten()[own])
        if number % 2:  # not all failed: a sum that lacks a part must not pass for a sum
            assert any(shard.isnan().any() for shard in buckets.gradient_shards())
        else:
            assert not any(shard.isnan().any() for shard in buckets.gradient_shards())
    buckets.zero()


@both_ways
@pytest.mark.parametrize("failing_ranks", [(0, 1), (1,)], ids=["all", "one"])
@on_ranks(2)
def test_half_a_first_step_teaches_nothing(failing_ranks):
    module = chain()
    buckets = wrap(module)
    if dist.get_rank() in failing_ranks:
        with pytest.raises(ValueError, match="no gradient today"):
            failing(module).backward()
    else:
        step(module, buckets)
        assert any(parameter.grad.isnan().any() for parameter in module.parameters())
    for number in range(1, 4):
        step(module, buckets, number)
        assert_gradients(module, expected_gradients(module, (number,)))
    assert buckets.launched_in_backward == 4


@on_ranks(1)
def test_timeout_that_no_clock_counts_is_refused():
    for timeout in (timedelta(0), timedelta(seconds=-1), timedelta.max):
        words = f"timeout: expected more than zero and less than a year, got {timeout}"
        with pytest.raises(ValueError, match=words):
            wrap(chain(1), timeout=timeout)
