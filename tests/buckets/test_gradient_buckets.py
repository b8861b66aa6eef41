"""`GradientBuckets` gives the gradients that one process with all the data would get, however one trains."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.buckets.golden import (
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    plain,
    step,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks
from tpkernels import GradientBuckets

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


def order_is_learnt():
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
    return [parameter.grad.storage_offset() for parameter in module.parameters()]


@both_ways
def test_buckets_follow_the_order_of_the_first_backward_and_unused_parameters_are_named(ranks2):
    first, second = ranks2.run(order_is_learnt)
    assert first == second


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
        gradients = [parameter.grad.flatten() for parameter in module.parameters()]
        everybody = [torch.empty_like(torch.cat(gradients)) for _ in range(2)]
        dist.all_gather(everybody, torch.cat(gradients))
        assert torch.equal(*everybody)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def checkpoints(module, x, reentrant=False):
    x = x.clone().requires_grad_()
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def reentrant_checkpoints(module, x):
    return checkpoints(module, x, reentrant=True)


@pytest.mark.parametrize("forward", [plain, checkpoints, reentrant_checkpoints])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@on_ranks(2)
def test_works_under_checkpoints_and_with_tied_parameters(is_tied, forward):
    module = chain(3)
    if is_tied:  # receives a gradient from each reentrant checkpoint: two in one backward
        module[2].weight = module[0].weight
    launched, count = train_steps(module, forward)
    assert launched[-1] == count


@both_ways
@average_or_sum
@on_ranks(2)
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


@on_ranks(2)
def test_several_backwards_a_step_are_learnt():
    module = chain()
    buckets = wrap(module)
    for _ in range(3):
        buckets.zero()
        for number in (0, 1):
            backward(module, number)
        buckets.finish()
        assert_gradients(module, expected_gradients(module, (0, 1)))
    assert buckets.launched_in_backward == len(buckets.buckets)  # in the second backward


@both_ways
@on_ranks(2)
def test_averages_may_be_added_to_after_finish():
    module = chain()
    buckets = wrap(module)
    buckets.zero()
    for number in (0, 1):
        backward(module, number)
        buckets.finish()
    assert_gradients(module, expected_gradients(module, (0, 1)))


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
def test_works_with_compiled_modules():
    module = chain(2)
    compiled = torch.compile(module, backend="aot_eager")
    train_steps(module, forward=lambda _, x: compiled(x))


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
    buckets = GradientBuckets([("empty", empty), ("scalar", scalar)], dist.group.WORLD)
    for _ in range(2):
        buckets.zero()
        (scalar * (dist.get_rank() + 1) + empty.sum()).backward()
        assert buckets.finish() == ()
        assert scalar.grad.item() == 1.5
        assert empty.grad.shape == (0, 3)


@both_ways
@on_ranks(2)
def test_a_rank_without_data_still_takes_part():
    module = chain(2)
    buckets = wrap(module)
    for number in range(3):  # the first step teaches nothing; in the last, rank 0 has no data
        has_data = number == 1 or (number == 2 and dist.get_rank() == 1)
        buckets.zero()
        if has_data:
            backward(module)
        assert len(buckets.finish()) == (0 if has_data else 4)
    total = torch.stack([parameter.grad.sum() for parameter in module.parameters()]).sum()
    everybody = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(everybody, total)
    assert everybody[0] == everybody[1] != 0


@both_ways
@on_ranks(2)
def test_detached_parameters_are_on_their_own():
    module = chain(2)
    buckets = wrap(module)
    step(module, buckets)
    buckets.detach()
    dist.barrier()
    expected = expected_gradients(module)
    assert_gradients(module, expected)
    backward(module)  # adds to what is its own
    assert buckets.finish() == ()
    alone = torch.autograd.grad(loss_of(module(own_batch())), list(module.parameters()))
    assert_gradients(module, [both + own for both, own in zip(expected, alone, strict=True)])
