"""`GradientBuckets` gives the gradients that one process with all the data would get, however one trains."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.buckets.golden import (
    assert_gradients,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    plain,
    wrap,
)
from tpkernels import GradientBuckets


def train_steps(module, steps=3, forward=plain, **options):
    """Several steps of plain training; gradients are right in each."""
    buckets = wrap(module, **options)
    launched = []
    for step in range(steps):
        expected = expected_gradients(module, (step,), forward, average=options.get("average", True))
        buckets.zero()
        loss_of(forward(module, own_batch(step))).backward()
        assert buckets.finish() == ()
        assert_gradients(module, expected)
        launched.append(buckets.launched_in_backward)
    return launched, len(buckets.buckets)


def gradients_of_a_chain(average):
    launched, count = train_steps(chain(), average=average)
    assert count > 2
    assert launched == [0, count, count]  # nothing in the step that teaches, then all


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize("pool", ["ranks1", "ranks2", "ranks4"])
def test_gradients_equal_those_of_one_process(pool, average, request, way):
    request.getfixturevalue(pool).run(gradients_of_a_chain, average)


def gradients_lie_in_buckets():
    module = chain()
    buckets = wrap(module)
    assert all(bucket.numel() % 64 == 0 for bucket in buckets.buckets)
    for step in range(3):
        buckets.zero()
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
        inside = 0
        for parameter, bucket in itertools.product(module.parameters(), buckets.buckets):
            offset = parameter.grad.data_ptr() - bucket.data_ptr()
            if 0 <= offset < bucket.nbytes:
                inside += 1
                assert offset % (64 * 8) == 0
                assert parameter.grad.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
        assert inside == len(list(module.parameters()))


def test_gradients_are_aligned_views_of_buckets(ranks2):
    ranks2.run(gradients_lie_in_buckets)


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
    for step in range(2):
        expected = expected_gradients(module, (step,))
        buckets.zero()
        loss_of(module(own_batch(step))).backward()
        assert buckets.finish() == ("spare.weight", "spare.bias")
        assert buckets.finish() == ("spare.weight", "spare.bias")  # a second call changes nothing
        assert_gradients(module, expected)
    place = [module.layers[index].weight.grad.untyped_storage().data_ptr() for index in (1, 3, 0, 2)]
    order = [bucket.untyped_storage().data_ptr() for bucket in buckets.buckets]
    assert [order.index(storage) for storage in place] == sorted(order.index(storage) for storage in place)
    spare = module.spare.weight.grad.untyped_storage().data_ptr()
    assert order.index(spare) == len(order) - 1  # holds back nobody
    assert buckets.launched_in_backward >= 3
    return [parameter.grad.storage_offset() for parameter in module.parameters()]


def test_buckets_follow_the_order_of_the_first_backward_and_unused_parameters_are_named(ranks2):
    first, second = ranks2.run(order_is_learnt)
    assert first == second


def ranks_use_different_layers():
    module = chain(3)
    buckets = wrap(module)
    rank = dist.get_rank()
    for step in range(3):
        buckets.zero()
        used = nn.Sequential(module[0], module[1 + rank])
        loss_of(used(own_batch(step))).backward()
        skipped = 2 - rank
        assert buckets.finish() == (f"{skipped}.weight", f"{skipped}.bias")
        gradients = [parameter.grad.clone() for parameter in module.parameters()]
        everybody = [torch.empty_like(torch.cat([g.flatten() for g in gradients])) for _ in range(2)]
        dist.all_gather(everybody, torch.cat([g.flatten() for g in gradients]))
        assert torch.equal(*everybody)
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_ranks_may_leave_different_parameters_unused(ranks2):
    ranks2.run(ranks_use_different_layers)


def tied(forward):
    module = chain(3)
    module[2].weight = module[0].weight
    train_steps(module, forward=forward)


def checkpointed(module, x, *, reentrant):
    x = x.clone().requires_grad_()
    for layer in module:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def reentrant_checkpoints(module, x):
    return checkpointed(module, x, reentrant=True)


def checkpoints(module, x):
    return checkpointed(module, x, reentrant=False)


def untied(forward):
    train_steps(chain(), forward=forward)


@pytest.mark.parametrize("model", [untied, tied], ids=["untied", "tied"])
def test_works_under_checkpoints_and_with_tied_parameters(ranks2, model):
    ranks2.run(model, checkpoints)
    ranks2.run(model, plain)


def reentrant(is_tied):
    module = chain(3)
    if is_tied:  # receives a gradient from each checkpoint: two in one backward
        module[2].weight = module[0].weight
    buckets = wrap(module)
    for step in range(3):
        expected = expected_gradients(module, (step,))
        buckets.zero()
        loss_of(reentrant_checkpoints(module, own_batch(step))).backward()
        buckets.finish()
        assert_gradients(module, expected)
    assert buckets.launched_in_backward == len(buckets.buckets)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_works_under_reentrant_checkpoints(ranks2, is_tied):
    ranks2.run(reentrant, is_tied)


def accumulation(average):
    module = chain()
    buckets = wrap(module, average=average)
    for _ in range(3):
        expected = expected_gradients(module, (0, 1, 2), average=average)
        buckets.zero()
        with buckets.no_sync():
            for step in (0, 1):
                loss_of(module(own_batch(step))).backward()
        loss_of(module(own_batch(2))).backward()
        buckets.finish()
        assert_gradients(module, expected)
    assert buckets.launched_in_backward == len(buckets.buckets)


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_no_sync_accumulates(ranks2, average):
    ranks2.run(accumulation, average)


def two_backwards_each_step():
    module = chain()
    buckets = wrap(module)
    for _ in range(3):
        expected = expected_gradients(module, (0, 1))
        buckets.zero()
        for step in (0, 1):
            loss_of(module(own_batch(step))).backward()
        buckets.finish()
        assert_gradients(module, expected)
    assert buckets.launched_in_backward == len(buckets.buckets)  # in the second backward


def test_several_backwards_a_step_are_learnt(ranks2):
    ranks2.run(two_backwards_each_step)


def finish_after_each_backward():
    module = chain()
    buckets = wrap(module)
    buckets.zero()
    for step in (0, 1):
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
    assert_gradients(module, expected_gradients(module, (0, 1)))


def test_averages_may_be_added_to_after_finish(ranks2):
    ranks2.run(finish_after_each_backward)


def optimizer_zeroes(set_to_none):
    module = Crossed()
    buckets = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(3):
        expected = expected_gradients(module, (step,))
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
        assert_gradients(module, expected)
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
def test_optimizers_zero_grad_will_do(ranks2, set_to_none):
    ranks2.run(optimizer_zeroes, set_to_none)


def compiled_training():
    module = chain(2)
    compiled = torch.compile(module, backend="aot_eager")
    train_steps(module, forward=lambda _, x: compiled(x))


def test_works_with_compiled_modules(ranks2):
    ranks2.run(compiled_training, timeout=120.0)


def frozen_and_channels_last():
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


def test_frozen_parameters_are_left_alone_and_memory_formats_kept(ranks2):
    ranks2.run(frozen_and_channels_last)


def nothing_to_train():
    buckets = GradientBuckets([], dist.group.WORLD)
    buckets.zero()
    with buckets.no_sync():
        pass
    assert buckets.finish() == ()
    empty = nn.Parameter(torch.empty(0, 3))
    scalar = nn.Parameter(torch.tensor(2.0))
    buckets = GradientBuckets([("empty", empty), ("scalar", scalar)], dist.group.WORLD)
    for _ in range(2):
        buckets.zero()
        (scalar * (dist.get_rank() + 1) + empty.sum()).backward()
        buckets.finish()
        assert scalar.grad.item() == 1.5
        assert empty.grad.shape == (0, 3)


def test_empty_lists_and_empty_parameters(ranks2):
    ranks2.run(nothing_to_train)


def finish_without_backward():
    module = chain(2)
    buckets = wrap(module)
    for step in range(3):  # the first step teaches nothing; in the last, rank 0 has no data
        buckets.zero()
        if step == 1 or (step == 2 and dist.get_rank() == 1):
            loss_of(module(own_batch())).backward()
        unused = buckets.finish()
        assert len(unused) == (0 if step == 1 or (step == 2 and dist.get_rank() == 1) else 4)
    total = torch.stack([parameter.grad.sum() for parameter in module.parameters()]).sum()
    everybody = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(everybody, total)
    assert everybody[0] == everybody[1] != 0


def test_a_rank_without_data_still_takes_part(ranks2):
    ranks2.run(finish_without_backward)


def detached():
    module = chain(2)
    buckets = wrap(module)
    buckets.detach()
    loss_of(module(own_batch())).backward()
    assert buckets.finish() == ()
    expected = torch.autograd.grad(loss_of(module(own_batch())), list(module.parameters()))
    assert_gradients(module, list(expected))  # this rank's own


def test_detached_parameters_are_on_their_own(ranks2):
    ranks2.run(detached)
