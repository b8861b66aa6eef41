"""What may befall parameters and gradients under `GradientBuckets` from elsewhere, and what then holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    assert_gradients,
    backward,
    batch,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    step,
    trained,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks
from tests.products import once


@on_ranks(2)
def test_parameters_are_under_one_of_them():
    model = chain()
    first = wrap(model)
    with pytest.raises(ValueError, match=r"is under other GradientBuckets already; call detach\(\) on these"):
        wrap(list(model.named_parameters())[1:])
    first.detach()
    wrap(model).detach()


@both_ways
@once(dtype=[torch.bfloat16, torch.float16], reduce=["all_reduce", "reduce_scatter"])
@on_ranks(4)
def test_halves_are_added_in_float32(dtype, reduce):
    """Rank 0 brings 256, three others 1 each: in bfloat16, 256 + 1 is 256."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64).to(dtype)
    big = 2048.0 if dtype == torch.float16 else 256.0
    buckets = wrap(module, average=False, reduce=reduce)
    for _ in range(2):
        buckets.zero()
        total = sum(parameter.sum() for parameter in module.parameters())
        (total * (1.0 if dist.get_rank() else big)).backward()
        buckets.finish()
        exact = torch.tensor(big + 3).to(dtype)
        for shard in buckets.gradient_shards() if reduce == "reduce_scatter" else buckets.buckets:
            assert shard.dtype == dtype
            assert {*shard.tolist()} <= {0.0, exact.item()}


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@on_ranks(2)
def test_conversion_of_a_module_is_told(main_grad):
    module = chain(2).float()
    buckets = wrap(module, main_grad=main_grad)
    for _ in range(2):
        buckets.zero()
        loss_of(module(own_batch().float())).backward()
        buckets.finish()
    module.double()  # replaces the data of parameters and gradients, and takes hooks away
    backward(module)
    for call in (buckets.finish, lambda: step(module, buckets)):
        with pytest.raises(RuntimeError, match="was converted or moved, which takes its hook away"):
            call()


@pytest.mark.parametrize(("zeroes", "expected"), [("buckets", [4, 4, 4]), ("optimizer", [0, 4, 4])])
@on_ranks(2)
def test_hooks_come_back_with_the_dtype(zeroes, expected):
    """A module that was converted for a moment, which takes its hooks away."""
    module, buckets = trained()
    optimizer = torch.optim.SGD(module.parameters())
    module.float()
    module.double()
    launched = []
    for number in range(2, 5):
        buckets.zero() if zeroes == "buckets" else optimizer.zero_grad()
        backward(module, number)
        assert buckets.finish() == ()
        assert_gradients(module, expected_gradients(module, (number,)))
        launched.append(buckets.launched_in_backward)
    assert launched == expected


@on_ranks(2)
def test_sums_that_were_converted_are_not_added_up_again():
    """It was added up already, or is a gradient that no hook saw: nobody knows."""
    module, buckets = trained(average=False)
    module.float()
    module.double()
    with pytest.raises(RuntimeError, match="is reduced already"):
        buckets.finish()
    step(module, buckets, 2)
    assert_gradients(module, expected_gradients(module, (2,), average=False))


@on_ranks(2)
def test_detach_within_no_sync():
    buckets = wrap(chain(1))
    with buckets.no_sync():
        buckets.detach()
    assert buckets.finish() == ()


@both_ways
@on_ranks(2)
def test_parameters_of_several_dtypes():
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16()])
    buckets = wrap(module)
    assert {bucket.dtype for bucket in buckets.buckets} == {torch.float32, torch.float64, torch.bfloat16}
    for _ in range(3):
        buckets.zero()
        factor = float(dist.get_rank())  # 0 and 1: the mean is exact in every dtype
        sum((parameter * factor).sum().double() for parameter in module.parameters()).backward()
        assert buckets.finish() == ()
        for parameter in module.parameters():
            assert parameter.grad.dtype == parameter.dtype
            assert torch.equal(parameter.grad, torch.full_like(parameter.grad, 0.5))


@pytest.mark.parametrize("poisoned", [False, True], ids=["finite", "infinite"])
@on_ranks(2)
def test_works_with_a_scaler_clipping_and_foreach_optimizers(poisoned):
    """A scaler skips the step on every rank, though only one rank's loss is infinite."""
    module, whole = chain().float(), chain().float()
    buckets = wrap(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, foreach=True)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.05, foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for number in range(4):
        buckets.zero()
        skipped = poisoned and number == 2
        loss = loss_of(module(own_batch(number).float()))
        scaler.scale(loss * (torch.inf if skipped and dist.get_rank() == 1 else 1.0)).backward()
        buckets.finish()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if skipped:
            assert scaler.get_scale() == 512.0
            continue
        plain.zero_grad()
        (sum(loss_of(whole(batch(rank, number).float())) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        plain.step()
    torch.testing.assert_close(list(module.parameters()), list(whole.parameters()), rtol=1e-4, atol=1e-5)


def no_data(average):
    """On one rank in one step, where the optimizer clears gradients."""
    module, buckets = trained(average=average)
    optimizer = torch.optim.SGD(module.parameters())
    unused = []
    for number in range(2, 5):
        optimizer.zero_grad()
        if dist.get_rank() == 0 or number != 3:
            backward(module, number)
        unused.append(len(buckets.finish()))
        expected = expected_gradients(module, (number,), average=average)
        if number == 3:
            expected = torch.autograd.grad(loss_of(module(batch(0, 3))), list(module.parameters()))
            expected = [gradient / 2 if average else gradient for gradient in expected]
        assert_gradients(module, expected)
        buckets.finish()  # which changes nothing
        assert_gradients(module, expected)
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


@on_ranks(2)
def test_gradients_without_memory_are_zeros():
    module, buckets = trained()
    for parameter in module.parameters():
        parameter.grad = torch._efficientzerotensor(parameter.shape, dtype=parameter.dtype)
    for hooked in (False, True):
        if hooked:
            buckets.zero()
            Zeros.apply(module[0].weight).backward()
        buckets.finish()
        assert_gradients(module, [torch.zeros_like(parameter) for parameter in module.parameters()])
