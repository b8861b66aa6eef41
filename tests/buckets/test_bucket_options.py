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
    loss_of,
    own_batch,
    wrap,
)
from tests.checks import error_of
from tpkernels import GradientBuckets


class WaitInBackward(torch.autograd.Function):
    """Its backward does not end before `happened()`, or ten seconds are over."""

    @staticmethod
    def forward(ctx, x, happened):
        ctx.happened = happened
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        deadline = time.monotonic() + 10.0
        while not ctx.happened() and time.monotonic() < deadline:
            time.sleep(0.001)
        return gradient, None


def reduced_before_backward_ends():
    module = chain()
    buckets = wrap(module)
    expected = expected_gradients(module)[-1]
    seen = []

    def is_reduced():
        gradient = module[-1].bias.grad
        seen.append(gradient is not None and torch.allclose(gradient, expected))
        return seen[-1]

    for is_taught in (False, True):
        buckets.zero()
        hidden = module[0](own_batch())
        output = module[1:](WaitInBackward.apply(hidden, is_reduced) if is_taught else hidden)
        loss_of(output).backward()
        buckets.finish()
    assert seen[-1], "the last layer's gradient was not reduced while the first layer's was still to come"


def test_buckets_are_reduced_while_backward_goes_on(ranks2):
    ranks2.run(reduced_before_backward_ends)


def float32_sums():
    module = chain(2).bfloat16()
    buckets = wrap(module, grad_dtype=torch.float32)
    weight = module[1].weight
    for _ in range(2):
        buckets.zero()
        with buckets.no_sync():
            (weight.sum() * 256).backward()
        for _ in range(3):  # 256 + 1 is 256 in bfloat16
            with buckets.no_sync():
                weight.sum().backward()
        weight.sum().backward()
        buckets.finish()
        assert weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, torch.full_like(weight.grad, 260.0))


def test_bfloat16_gradients_can_be_summed_in_float32(ranks2):
    ranks2.run(float32_sums)


def bfloat16_wire(reduce):
    module = chain().float()
    buckets = wrap(module, wire_dtype=torch.bfloat16, reduce=reduce)
    rank = dist.get_rank()
    for _ in range(2):
        buckets.zero()
        # 1 + 2**-10 is lost in bfloat16, and 1.5 is not
        for parameter in module.parameters():
            (parameter * (1.5 if rank else 1 + 2**-10)).sum().backward()
        buckets.finish()
        for shard in buckets.gradient_shards() if reduce == "reduce_scatter" else buckets.buckets:
            assert shard.dtype == torch.float32
            assert {*shard.tolist()} <= {0.0, 1.25}


@pytest.mark.way("c10d")
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_bfloat16_on_the_wire(ranks2, reduce):
    ranks2.run(bfloat16_wire, reduce)


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


def main_grads():
    module = chain(3)
    for parameter in module.parameters():
        parameter.requires_grad_()
    buckets = wrap(module, main_grad=True)

    def forward(_, x):
        x = FusedLinear.apply(x, module[0].weight) + module[0].bias
        return module[2](module[1](x))

    for _ in range(3):
        expected = expected_gradients(module, (0, 1))
        buckets.zero()
        with buckets.no_sync():
            loss_of(forward(module, own_batch(0))).backward()
        loss_of(forward(module, own_batch(1))).backward()
        assert buckets.finish() == ()
        assert all(parameter.grad is None for parameter in module.parameters())
        torch.testing.assert_close([parameter.main_grad for parameter in module.parameters()], expected)
    assert buckets.launched_in_backward == len(buckets.buckets)
    buckets.detach()
    assert not hasattr(module[0].weight, "main_grad")


def test_main_grad_takes_the_gradients_of_fused_and_plain_layers(ranks2):
    ranks2.run(main_grads)


def two_groups(reduce):
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    module = nn.ModuleList([chain(2), nn.LayerNorm(WIDTH).double(), nn.LayerNorm(WIDTH).double()])
    for norm in module[1:]:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
    buckets = GradientBuckets(
        module,
        data_groups[rank % 2],
        bucket_bytes=SMALL,
        tensor_parallel_group=tensor_groups[rank // 2],
        reduce=reduce,
    )
    for step in range(3):
        buckets.zero()
        output = module[2](module[0][1](module[1](module[0][0](own_batch(step)))))
        gradients = torch.autograd.grad(loss_of(output), list(module.parameters()), retain_graph=True)
        loss_of(output).backward()
        assert buckets.finish() == ()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(gradient, group=tensor_groups[rank // 2])
            dist.all_reduce(gradient, group=data_groups[rank % 2])
            if reduce == "all_reduce":
                torch.testing.assert_close(parameter.grad, gradient / 2)
            else:
                own = own_elements(buckets, parameter)
                torch.testing.assert_close(parameter.grad.flatten()[own], gradient.flatten()[own] / 2)
    assert buckets.launched_in_backward == len(buckets.buckets)
    return [str(bucket.shape) for bucket in buckets.buckets]


def own_elements(buckets, parameter):
    """Which elements of the parameter lie in this rank's shards."""
    spans = [
        (shard.data_ptr(), shard.data_ptr() + shard.nbytes)
        for shard in buckets.gradient_shards()
        if shard.numel()
    ]
    start, width = parameter.grad.data_ptr(), parameter.grad.element_size()
    return [
        index
        for index in range(parameter.numel())
        if any(first <= start + index * width < last for first, last in spans)
    ]


@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_sequence_parallel_parameters_are_summed_over_tensor_parallel_ranks_too(ranks4, reduce):
    first, *others = ranks4.run(two_groups, reduce)
    assert all(other == first for other in others)


def _backward_and_finish(buckets, loss):
    """With `check_nan`, either may raise."""
    loss.backward()
    buckets.finish()


def nan_on_rank_1(when):
    module = chain()
    buckets = wrap(module, check_nan=True)
    for step in range(3):
        expected = expected_gradients(module, (step,))
        buckets.zero()
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
        assert_gradients(module, expected)
        if step == when:
            break
    buckets.zero()
    poison = torch.ones(WIDTH, dtype=torch.float64)
    if dist.get_rank() == 1:
        poison[3] = torch.nan
    with pytest.raises(RuntimeError) as caught:
        _backward_and_finish(buckets, loss_of(module[:3](own_batch())) + (module[3].bias * poison).sum())
    buckets.zero()  # good as new
    expected = expected_gradients(module)
    loss_of(module(own_batch())).backward()
    buckets.finish()
    assert_gradients(module, expected)
    return str(caught.value)


@pytest.mark.parametrize("when", [0, 1], ids=["after_first_step", "later"])
def test_nan_is_named_on_all_ranks_before_it_is_sent(ranks2, when):
    messages = ranks2.run(nan_on_rank_1, when)
    assert messages[0] == messages[1]
    assert "on rank 1 the gradient of '3.bias' holds NaN; bucket " in messages[0]
    assert messages[0].endswith("was not sent")


def profiled():
    module = chain()
    buckets = wrap(module)
    for _ in range(2):
        buckets.zero()
        with torch.profiler.profile() as profile:
            loss_of(module(own_batch())).backward()
            buckets.finish()
    names = {event.name for event in profile.events() if event.name.startswith("tpkernels: bucket")}
    assert len(names) == len(buckets.buckets)
    return sorted(names)


def test_profiler_shows_a_range_for_each_bucket(ranks2):
    names, _ = ranks2.run(profiled)
    assert names[0].startswith("tpkernels: bucket 0 of 4 ('")


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")


def interrupted(failing_ranks, reduce):
    """Some ranks fail in the middle of backward. All go on with the next step."""
    module = chain()
    buckets = wrap(module, reduce=reduce)
    fails = dist.get_rank() in failing_ranks
    for step in range(6):
        buckets.zero()
        hidden = module[1](module[0](own_batch(step)))
        output = module[3](module[2](Fail.apply(hidden) if fails and step % 2 else hidden))
        try:
            loss_of(output).backward()
        except ValueError:
            continue
        buckets.finish()
        own = [
            (
                parameter.grad.flatten()[own_elements(buckets, parameter)]
                if reduce != "all_reduce"
                else parameter.grad
            )
            for parameter in module.parameters()
        ]
        if step % 2:  # not all failed: a sum that lacks a part must not pass for a sum
            assert any(part.isnan().any() for part in own)
        elif reduce == "all_reduce":
            assert_gradients(module, expected_gradients(module, (step,)))
        else:
            assert not any(part.isnan().any() for part in own)
    buckets.zero()


@pytest.mark.parametrize("failing_ranks", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_zero_recovers_from_an_exception_in_backward(ranks2, failing_ranks, reduce):
    ranks2.run(interrupted, failing_ranks, reduce)


def fails_at_once():
    """The very first backward fails, before anything was learnt."""
    module = chain()
    buckets = wrap(module)
    hidden = module[1](module[0](own_batch()))
    with pytest.raises(ValueError, match="no gradient today"):
        loss_of(module[3](module[2](Fail.apply(hidden)))).backward()
    buckets.zero()
    loss_of(module(own_batch())).backward()
    buckets.finish()
    assert_gradients(module, expected_gradients(module))


def test_exception_in_the_first_backward(ranks2):
    ranks2.run(fails_at_once)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), timedelta.max], ids=str)
def test_timeout_that_no_clock_counts_is_refused(ranks1, timeout):
    ((kind, text),) = ranks1.run(refused_timeout, timeout)
    assert kind == "ValueError"
    assert f"timeout: expected more than zero and less than a year, got {timeout}" in text


def refused_timeout(timeout):
    return error_of(wrap, chain(1), timeout=timeout)
