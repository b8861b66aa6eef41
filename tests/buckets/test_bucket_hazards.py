"""What may befall parameters and gradients under `GradientBuckets` from elsewhere, and what then holds."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    assert_gradients,
    batch,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    wrap,
)
from tests.checks import error_of
from tpkernels import GradientBuckets


def step(module, buckets, data):
    buckets.zero()
    loss_of(module(data)).backward()
    return buckets.finish()


def wrapped_again():
    """What a second one over some of the same parameters is told, and what it is told later."""
    model = chain()
    first = wrap(model)
    kind, text = error_of(wrap, list(model.named_parameters())[1:])
    first.detach()
    wrap(model).detach()
    return f"{kind}: {text}"


def test_parameters_are_under_one_of_them(ranks2):
    for message in ranks2.run(wrapped_again):
        assert message.startswith("ValueError")
        assert "is under other GradientBuckets already; call detach() on these" in message


def halves(dtype, reduce):
    """Rank 0 brings 256, three others 1 each: in bfloat16, 256 + 1 is 256."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64).to(dtype)
    big = 2048.0 if dtype == torch.float16 else 256.0
    buckets = wrap(module, average=False, reduce=reduce)
    for _ in range(2):
        buckets.zero()
        (
            sum(parameter.sum() for parameter in module.parameters()) * (1.0 if dist.get_rank() else big)
        ).backward()
        buckets.finish()
        exact = torch.tensor(big + 3).to(dtype)
        for shard in buckets.gradient_shards() if reduce == "reduce_scatter" else buckets.buckets:
            assert shard.dtype == dtype
            assert {*shard.tolist()} <= {0.0, exact.item()}


@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_halves_are_added_in_float32(ranks4, dtype, reduce):
    ranks4.run(halves, dtype, reduce)


def converted(main_grad):
    module = chain(2).float()
    buckets = wrap(module, main_grad=main_grad)
    for _ in range(2):
        step(module, buckets, own_batch().float())
    module.double()  # replaces the data of parameters and gradients, and takes hooks away
    loss_of(module(own_batch())).backward()
    return error_of(buckets.finish), error_of(step, module, buckets, own_batch())


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_conversion_of_a_module_is_told(ranks2, main_grad):
    for errors in ranks2.run(converted, main_grad):
        for kind, text in errors:
            assert kind == "RuntimeError"
            assert "was converted or moved, which takes its hook away" in text


def empty_parameter():
    """An empty tensor has no address by which it could be known."""
    module = nn.ParameterDict({"full": torch.ones(3), "empty": torch.ones(0, 4)})
    buckets = wrap(module, average=False)
    for _ in range(3):
        module.zero_grad()
        (module["full"].sum() + module["empty"].sum()).backward()
        assert buckets.finish() == ()
        assert module["full"].grad.tolist() == [2.0] * 3
        assert module["empty"].grad.shape == (0, 4)


def test_empty_parameters_take_part(ranks2):
    ranks2.run(empty_parameter)


def nested_no_sync():
    module = chain()
    buckets = wrap(module)
    step(module, buckets, own_batch())  # teaches that one gradient comes
    for _ in range(2):
        buckets.zero()
        with buckets.no_sync():
            with buckets.no_sync():
                loss_of(module(own_batch(0))).backward()
            loss_of(module(own_batch(1))).backward()
        loss_of(module(own_batch(2))).backward()
        buckets.finish()
        assert_gradients(module, expected_gradients(module, (0, 1, 2)))


def test_no_sync_may_be_nested(ranks2):
    ranks2.run(nested_no_sync)


def detached_in_no_sync():
    module = chain(1)
    buckets = wrap(module)
    with buckets.no_sync():
        buckets.detach()
    assert buckets.finish() == ()


def test_detach_within_no_sync(ranks2):
    ranks2.run(detached_in_no_sync)


def several_dtypes():
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


def test_parameters_of_several_dtypes(ranks2):
    ranks2.run(several_dtypes)


def scaled_training(poisoned):
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
        total = sum(loss_of(whole(data.float())) for data in (own_batch(number), other_batch(number)))
        plain.zero_grad()
        (total / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        plain.step()
    torch.testing.assert_close(list(module.parameters()), list(whole.parameters()), rtol=1e-4, atol=1e-5)


def other_batch(number):
    return batch(1 - dist.get_rank(), number)


@pytest.mark.parametrize("poisoned", [False, True], ids=["finite", "infinite"])
def test_works_with_a_scaler_clipping_and_foreach_optimizers(ranks2, poisoned):
    ranks2.run(scaled_training, poisoned)


def resized_gradient():
    module = chain(1)
    buckets = GradientBuckets(module, dist.group.WORLD)
    module[0].weight.data = torch.ones(1, dtype=torch.float64)
    module[0].weight.grad = torch.ones(1, dtype=torch.float64)
    return error_of(buckets.finish)


def test_gradient_of_another_shape_is_not_broadcast(ranks1):
    words = "the gradient of '0.weight' is of shape [1]; expected [8, 8], as when GradientBuckets were made"
    assert ranks1.run(resized_gradient) == [("RuntimeError", f"GradientBuckets: {words}")]
