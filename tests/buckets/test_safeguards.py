"""Usual mistakes in a training loop would give wrong numbers on all ranks alike; they are errors instead."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import assert_gradients, chain, expected_gradients, loss_of, own_batch, wrap
from tests.checks import error_of
from tpkernels import GradientBuckets, bucketed_broadcast_, clip_grad_norm_, initialize_model_parallel

UNLIKE = "GradientBuckets begin with other weights on other ranks: ranks disagree on tensor"


def backward(module, data=None):
    loss_of(module(own_batch() if data is None else data)).backward()


def whole_step(module, buckets):
    buckets.zero()
    backward(module)
    buckets.finish()


def begun_with(case):
    module = chain()
    if case == "frozen":
        module[1].weight.requires_grad_(False)
    buckets = wrap(module)
    with torch.no_grad():
        if case in ("sent", "loaded", "one bit"):
            module[1].weight[0, 0] += dist.get_rank() * 1e-15
        if case in ("frozen", "all"):
            module[1].weight.add_(dist.get_rank())
        if case == "sent":
            bucketed_broadcast_(list(module.parameters()), 1, dist.group.WORLD)
        if case == "loaded":
            module.load_state_dict(chain().state_dict())
    return error_of(whole_step, module, buckets), error_of(whole_step, module, buckets)


@pytest.mark.parametrize("case", ["all", "one bit", "frozen"])
def test_ranks_that_begin_unlike_are_told_in_the_first_step(ranks2, case):
    for told, again in ranks2.run(begun_with, case):
        kind, text = told
        assert kind == "ValueError"
        assert text.startswith(UNLIKE)
        assert "'1.weight' with checksum" in text
        assert "bucketed_broadcast_(list(model.parameters()), src, group)" in text
        assert again == told


@pytest.mark.parametrize("case", ["equal", "sent", "loaded"])
def test_weights_have_until_then_to_become_equal(ranks2, case):
    for told in ranks2.run(begun_with, case):
        assert told == (("nothing", ""), ("nothing", ""))


def unlike_in_one_group():
    """Rank 3 begins with another weight than rank 1; ranks 0 and 2 are alike."""
    rank = dist.get_rank()
    tensor_group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data_group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    module = chain()
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    with torch.no_grad():
        module[1].weight[0, 0] += rank == 3
    buckets = GradientBuckets(module, data_group, tensor_parallel_group=tensor_group)
    return error_of(whole_step, module, buckets)


def test_tensor_parallel_ranks_hear_of_weights_that_begin_unlike(ranks4):
    for kind, text in ranks4.run(unlike_in_one_group):
        assert kind == "ValueError"
        assert "'1.weight' with checksum" in text


def early(steps, zero, reduce):
    """An optimizer that steps after so many good steps, but before `finish`, and what becomes of weights."""
    module = chain()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    buckets = wrap(module, reduce=reduce)
    for _ in range(steps):
        whole_step(module, buckets)
        optimizer.step()
    before = [parameter.clone() for parameter in module.parameters()]
    buckets.zero() if zero else optimizer.zero_grad()
    backward(module)
    other.step()  # is none of ours
    told = error_of(optimizer.step), error_of(buckets.gradient_shards)
    assert all(map(torch.equal, before, module.parameters()))
    buckets.finish()
    buckets.gradient_shards()
    optimizer.step()
    return told


@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("zero", [True, False], ids=["zero", "zero_grad"])
@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
def test_steps_before_finish_are_refused(ranks2, steps, zero, reduce):
    for step, shards in ranks2.run(early, steps, zero, reduce):
        assert step[0] == shards[0] == "RuntimeError"
        assert "an optimizer steps between a backward and finish()" in step[1]
        assert "nothing is reduced yet; call finish() first" in shards[1]


def not_reduced_on_purpose():
    """Steps that no gradient waits for: of local ones under `no_sync`, after `zero`, after `detach`."""
    module = chain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    buckets = wrap(module)
    with buckets.no_sync():
        backward(module)
    optimizer.step()
    backward(module)
    buckets.zero()
    optimizer.step()
    backward(module)
    buckets.detach()
    optimizer.step()


def test_steps_that_wait_for_nothing_are_taken(ranks2):
    ranks2.run(not_reduced_on_purpose)


def replaced(module):
    module[2].weight.grad = module[2].weight.grad * 2


CHANGES = {
    "torch clips": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "ours clips": lambda module: clip_grad_norm_(module.parameters(), 0.1),
    "one is scaled": lambda module: module[2].weight.grad.mul_(2),
    "replaced": replaced,
    "cleared": lambda module: module.zero_grad(),
    "zeroed": lambda module: module.zero_grad(set_to_none=False),
    "main_grad": lambda module: module[2].weight.main_grad.mul_(2),
}


def changed(case, steps):
    initialize_model_parallel(1)
    module = chain()
    buckets = wrap(module, main_grad=case == "main_grad")
    for _ in range(steps):
        whole_step(module, buckets)
    buckets.zero()
    backward(module)
    CHANGES[case](module)
    told = error_of(buckets.finish), error_of(buckets.finish)
    dist.barrier()
    whole_step(module, buckets)
    found = [
        parameter.main_grad if case == "main_grad" else parameter.grad for parameter in module.parameters()
    ]
    torch.testing.assert_close(found, expected_gradients(module))
    CHANGES[case](module)  # after `finish` gradients are the caller's
    return told


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
@pytest.mark.parametrize("case", CHANGES)
def test_gradients_that_are_changed_on_their_way_are_told(ranks2, case, steps):
    for (kind, text), (_, again) in ranks2.run(changed, case, steps):
        assert kind == "RuntimeError"
        assert "was changed, replaced or cleared between backward and finish(); call finish() first" in text
        assert "call zero()" in again


def doubled(parameter):
    parameter.grad.mul_(2)


def changed_in_time(case):
    """Changes of what is not on its way: between microbatches, in hooks of backward, after `finish`."""
    module = chain()
    buckets = wrap(module)
    for parameter in module.parameters():
        if case == "in a hook":
            parameter.register_post_accumulate_grad_hook(doubled)
    for _ in range(3):
        buckets.zero()
        if case == "between":
            with buckets.no_sync():
                backward(module)
            for parameter in module.parameters():
                parameter.grad.mul_(0)
        backward(module)
        if case == "after":
            buckets.finish()
            for parameter in module.parameters():
                parameter.grad.mul_(0)
            backward(module)  # averages may be added to
        buckets.finish()
        factor = 2 if case == "in a hook" else 1
        assert_gradients(module, [factor * gradient for gradient in expected_gradients(module)])


@pytest.mark.parametrize("case", ["between", "in a hook", "after"])
def test_gradients_may_be_changed_before_and_after(ranks2, case):
    ranks2.run(changed_in_time, case)
