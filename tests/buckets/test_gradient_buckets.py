"""`GradientBuckets` gives the gradients that one process would get, however one trains, also in shards."""

import itertools
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.buckets.golden import (
    assert_gradients,
    backward,
    batch,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    plain,
    step,
    trained,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks
from tests.on_ranks import equal_on_all
from tpkernels import GradientBuckets
from tpkernels.buckets import gradients as buckets_module

average_or_sum = pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])


def train_steps(module, forward=plain, **options):
    """Three steps of plain training; gradients are right in each."""
    buckets = wrap(module, **options)
    launched = []
    for number in range(3):
        expected = expected_gradients(module, (number,), average=options.get("average", True))
        assert step(module, buckets, number, forward) == ()
        assert_gradients(module, expected)
        launched.append(buckets.launched_in_backward)
    return launched, len(buckets.buckets)


@both_ways
@average_or_sum
@on_ranks(1, 2, 4)
def test_gradients_equal_those_of_one_process(average):
    launched, count = train_steps(chain(), average=average)
    assert count > 2
    assert launched == [0, count, count]  # nothing in the step that teaches, then all


@on_ranks(2)
def test_gradients_are_aligned_views_of_buckets():
    module = chain()
    buckets = wrap(module)
    assert all(bucket.numel() % 64 == 0 for bucket in buckets.buckets)
    for _ in range(3):
        step(module, buckets)
        inside = 0
        for parameter, bucket in itertools.product(module.parameters(), buckets.buckets):
            offset = parameter.grad.data_ptr() - bucket.data_ptr()
            if 0 <= offset < bucket.nbytes:
                inside += 1
                assert offset % (64 * 8) == 0
                assert parameter.grad.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
        assert inside == len(list(module.parameters()))


class Crossed(nn.Module):
    """Uses its layers in another order than it lists them, and one of them not at all."""

    def __init__(self):
        super().__init__()
        self.layers = chain(4)
        self.spare = nn.Linear(2, 2).double()

    def forward(self, x):
        for index in (2, 0, 3, 1):
            x = self.layers[index](x)
        return x


@both_ways
@on_ranks(2)
def test_buckets_follow_the_order_of_the_first_backward_and_unused_parameters_are_named():
    module = Crossed()
    buckets = wrap(module)
    for number in range(2):
        expected = expected_gradients(module, (number,))
        assert step(module, buckets, number) == ("spare.weight", "spare.bias")
        assert buckets.finish() == ("spare.weight", "spare.bias")  # a second call changes nothing
        assert_gradients(module, expected)
    place = [module.layers[index].weight.grad.untyped_storage().data_ptr() for index in (1, 3, 0, 2)]
    order = [bucket.untyped_storage().data_ptr() for bucket in buckets.buckets]
    assert [order.index(storage) for storage in place] == sorted(order.index(storage) for storage in place)
    spare = module.spare.weight.grad.untyped_storage().data_ptr()
    assert order.index(spare) == len(order) - 1  # holds back nobody
    assert buckets.launched_in_backward >= 3
    equal_on_all([parameter.grad.storage_offset() for parameter in module.parameters()])


@both_ways
@on_ranks(2)
def test_ranks_may_leave_different_parameters_unused():
    module = chain(3)
    buckets = wrap(module)
    rank = dist.get_rank()
    for number in range(3):
        skipped = 2 - rank
        used = nn.Sequential(module[0], module[1 + rank])
        assert step(used, buckets, number) == (f"{skipped}.weight", f"{skipped}.bias")
        gradients = equal_on_all([parameter.grad.flatten().tolist() for parameter in module.parameters()])
        assert all(map(any, gradients))


def checkpoints(module, x, reentrant=False):
    x = x.clone().requires_grad_()
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def reentrant_checkpoints(module, x):
    return checkpoints(module, x, reentrant=True)


def compiled(module, x):
    return torch.compile(module, backend="aot_eager")(x)


FORWARDS = (plain, checkpoints, reentrant_checkpoints, compiled)


@pytest.mark.parametrize(
    ("forward", "is_tied"), [*((way, True) for way in FORWARDS), (reentrant_checkpoints, False)]
)
@on_ranks(2)
def test_works_compiled_under_checkpoints_and_with_tied_parameters(is_tied, forward):
    module = chain(3)
    if is_tied:  # receives a gradient from each reentrant checkpoint: two in one backward
        module[2].weight = module[0].weight
    launched, count = train_steps(module, forward)
    assert launched[-1] == count


@both_ways
@average_or_sum
@on_ranks(1, 2)
def test_no_sync_accumulates(average):
    module = chain()
    buckets = wrap(module, average=average)
    for _ in range(3):
        expected = expected_gradients(module, (0, 1, 2), average=average)
        buckets.zero()
        with buckets.no_sync():
            with buckets.no_sync():
                backward(module, 0)
            backward(module, 1)
        backward(module, 2)
        buckets.finish()
        assert_gradients(module, expected)
    assert buckets.launched_in_backward == len(buckets.buckets)


@both_ways
@on_ranks(2)
def test_several_backwards_a_step_are_learnt_and_averages_may_be_added_to_after_finish():
    for finishes in (False, True):
        module = chain()
        buckets = wrap(module)
        for _ in range(1 if finishes else 3):
            buckets.zero()
            for number in (0, 1):
                backward(module, number)
                if finishes or number:
                    buckets.finish()
            assert_gradients(module, expected_gradients(module, (0, 1)))
        if not finishes:
            assert buckets.launched_in_backward == len(buckets.buckets)  # in the second backward


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@on_ranks(2)
def test_optimizers_zero_grad_will_do(set_to_none):
    module = Crossed()
    buckets = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for number in range(3):
        expected = expected_gradients(module, (number,))
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(module, number)
        buckets.finish()
        assert_gradients(module, expected)
        optimizer.step()


@on_ranks(2)
def test_frozen_parameters_are_left_alone_and_memory_formats_kept():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3)).double()
    module[0].bias.requires_grad_(False)
    module.to(memory_format=torch.channels_last)
    buckets = wrap(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64) + dist.get_rank()
    for _ in range(2):
        gradients = torch.autograd.grad(loss_of(module(x)), trained)
        for gradient in gradients:
            dist.all_reduce(gradient)
        buckets.zero()
        loss_of(module(x)).backward()
        buckets.finish()
        for parameter, gradient in zip(trained, gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / dist.get_world_size())
            assert parameter.grad.stride() == parameter.stride()
    assert module[0].bias.grad is None


@both_ways
@on_ranks(2)
def test_empty_lists_and_empty_parameters():
    buckets = GradientBuckets([], dist.group.WORLD)
    buckets.zero()
    with buckets.no_sync():
        pass
    assert buckets.finish() == ()
    empty = nn.Parameter(torch.empty(0, 3))  # without an address by which it could be known
    scalar = nn.Parameter(torch.tensor(2.0))
    for named in ([("empty", empty)], [("empty", empty), ("scalar", scalar)]):
        buckets = GradientBuckets(named, dist.group.WORLD)
        for _ in range(3):
            buckets.zero()
            sum((parameter * (dist.get_rank() + 1)).sum() for _, parameter in named).backward()
            assert buckets.finish() == ()
            assert empty.grad.shape == (0, 3)
        buckets.detach()
    assert scalar.grad.item() == 1.5


@both_ways
@on_ranks(2)
def test_detached_parameters_are_on_their_own():
    """They are under one `GradientBuckets` until then."""
    module = chain(2)
    buckets = wrap(module)
    with pytest.raises(ValueError, match=r"is under other GradientBuckets already; call detach\(\) on these"):
        wrap(list(module.named_parameters())[1:])
    step(module, buckets)
    with buckets.no_sync():
        buckets.detach()
    dist.barrier()
    expected = expected_gradients(module)
    assert_gradients(module, expected)
    backward(module)  # adds to what is its own
    assert buckets.finish() == ()
    alone = torch.autograd.grad(loss_of(module(own_batch())), list(module.parameters()))
    assert_gradients(module, [both + own for both, own in zip(expected, alone, strict=True)])
    wrap(module).detach()


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


@both_ways
@average_or_sum
@on_ranks(2)
def test_ranks_without_data_take_part(average):
    """Both in the first step, which teaches nothing; then one, whoever clears gradients."""
    module = chain()
    buckets = wrap(module, average=average)
    buckets.zero()
    assert len(buckets.finish()) == 8
    for number in range(2):
        step(module, buckets, number)
    optimizer = torch.optim.SGD(module.parameters())
    for clear, number in itertools.product((optimizer.zero_grad, buckets.zero), (2, 3, 4)):
        clear()
        has_data = dist.get_rank() == 0 or number != 3
        if has_data:
            backward(module, number)
        assert len(buckets.finish()) == (0 if has_data else 8)
        expected = expected_gradients(module, (number,), average=average)
        if number == 3:
            expected = torch.autograd.grad(loss_of(module(batch(0, 3))), list(module.parameters()))
            expected = [gradient / 2 if average else gradient for gradient in expected]
        assert_gradients(module, expected)
        buckets.finish()  # which changes nothing
        assert_gradients(module, expected)


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


WEIGHT = 512  # bytes of a layer's weight in `chain`, and of its bias with what aligns it


@both_ways
@on_ranks(2, 4)
def test_sharded_optimizer_trains_like_an_unsharded_one():
    module, whole = chain(), chain()
    buckets = wrap(module, reduce="reduce_scatter")
    shards = [nn.Parameter(shard) for shard in buckets.parameter_shards()]
    sharded = torch.optim.AdamW(shards, lr=0.05)
    unsharded = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for number in range(4):
        step(module, buckets, number)
        for shard, gradient in zip(shards, buckets.gradient_shards(), strict=True):
            shard.grad = gradient
        sharded.step()
        buckets.gather_parameters([shard.detach() for shard in shards])
        for parameter, gradient in zip(whole.parameters(), expected_gradients(whole, (number,)), strict=True):
            parameter.grad = gradient
        unsharded.step()
        torch.testing.assert_close(list(module.parameters()), list(whole.parameters()))
    elements = sum(bucket.numel() for bucket in buckets.buckets)
    assert sum(shard.numel() for shard in shards) == elements // dist.get_world_size()
    with pytest.raises(ValueError, match="of the sizes of parameter_shards"):
        buckets.gather_parameters(shards[:-1])


@on_ranks(2, 4)
def test_what_is_cut_like_gradients_is_joined_again():
    module = chain(3)
    buckets = wrap(module, reduce="reduce_scatter")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(parameter.shape, generator=generator) for parameter in module.parameters()]
    shards = buckets.shard(tensors)
    for parameter, tensor in zip(module.parameters(), tensors, strict=True):
        parameter.grad = tensor.double()
    buckets.finish()  # every rank brings the same, so that their mean is just that
    for shard, gradient in zip(shards, buckets.gradient_shards(), strict=True):
        assert torch.equal(shard.double(), gradient)
    joined = buckets.unshard(shards)
    assert {tensor.dtype for tensor in joined} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(joined, tensors, strict=True))
    with pytest.raises(ValueError, match="tensors: expected one for each of 6 parameters, of its shape"):
        buckets.shard(tensors[1:])
    with pytest.raises(ValueError, match="expected"):
        buckets.unshard(shards[1:])


@on_ranks(2)
def test_a_few_buckets_are_gathered_at_once():
    """New weights of a whole model beside the old ones would be most of a GPU's memory."""
    for at_once in (1, 2**28):
        module = chain(3)
        shards_of = wrap(module, reduce="reduce_scatter")
        gather = Mock(wraps=buckets_module.bucketed_all_gather)
        with patch.multiple(buckets_module, bucketed_all_gather=gather, GATHERED_BYTES=at_once):
            shards_of.gather_parameters([2 * shard for shard in shards_of.parameter_shards()])
        for parameter, before in zip(module.parameters(), chain(3).parameters(), strict=True):
            torch.testing.assert_close(parameter, 2 * before)
        count = len(shards_of.buckets)
        assert count > 1
        gathered = [len(call.args[0]) for call in gather.call_args_list]
        assert gathered == ([1] * count if at_once == 1 else [count])


def trained_shards(reduce, smallest):
    """(elements of buckets, parameters after three steps)"""
    module = chain(12)
    with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
        buckets = wrap(module, reduce=reduce, bucket_bytes=8 * WEIGHT)
    for number in range(3):
        step(module, buckets, number)
        with torch.no_grad():
            shards = zip(buckets.parameter_shards(), buckets.gradient_shards(), strict=True)
            buckets.gather_parameters([shard - 0.01 * gradient for shard, gradient in shards])
    return [bucket.numel() for bucket in buckets.buckets], list(module.parameters())


@both_ways
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
@on_ranks(2)
def test_sizes_do_not_change_a_bit_with_two_ranks(reduce):
    sizes, growing = trained_shards(reduce, WEIGHT)
    assert len(equal_on_all(sizes)) == 9
    assert 4 * sizes[0] <= max(sizes) >= 4 * sizes[-1]
    sizes, alike = trained_shards(reduce, 8 * WEIGHT)
    assert sizes == [512] * 3
    assert all(map(torch.equal, growing, alike))
    assert not any(map(torch.equal, growing, chain(12).parameters()))
