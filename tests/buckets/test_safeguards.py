"""Usual mistakes in a training loop would give wrong numbers on all ranks alike; they are errors instead."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer as optimizers

from tests.buckets.golden import (
    WIDTH,
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    step,
    two_by_two,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks
from tests.checks import error_of
from tests.products import once
from tpkernels import GradientBuckets, bucketed_broadcast_, clip_grad_norm_, initialize_model_parallel

UNLIKE = "GradientBuckets begin with other weights on other ranks: ranks disagree on tensor"


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
    return module, buckets


@on_ranks(2)
def test_ranks_that_begin_unlike_are_told_in_the_first_step():
    for case in ("all", "one bit", "frozen"):
        module, buckets = begun_with(case)
        kind, text = told = error_of(step, module, buckets)
        assert kind == "ValueError", case
        assert text.startswith(UNLIKE)
        assert "'1.weight' with checksum" in text
        assert "bucketed_broadcast_(list(model.parameters()), src, group)" in text
        assert error_of(step, module, buckets) == told


@on_ranks(2)
def test_weights_have_until_then_to_become_equal():
    for case in ("equal", "sent", "loaded"):
        module, buckets = begun_with(case)
        for _ in range(2):
            step(module, buckets)


@on_ranks(4)
def test_tensor_parallel_ranks_hear_of_weights_that_begin_unlike():
    """Rank 3 begins with another weight than rank 1; ranks 0 and 2 are alike."""
    tensor_group, data_group = two_by_two()
    module = chain()
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    with torch.no_grad():
        module[1].weight[0, 0] += dist.get_rank() == 3
    buckets = GradientBuckets(module, data_group, tensor_parallel_group=tensor_group)
    with pytest.raises(ValueError, match=r"'1\.weight' with checksum"):
        step(module, buckets)


@both_ways
@once(
    steps={"first": 0, "third": 2},
    zero={"zero": True, "zero_grad": False},
    reduce=["all_reduce", "reduce_scatter"],
)
@on_ranks(2)
def test_steps_before_finish_are_refused(steps, zero, reduce):
    """An optimizer that steps after so many good steps, but before `finish`, and what becomes of weights."""
    module = chain()
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    buckets = wrap(module, reduce=reduce)
    for _ in range(steps):
        step(module, buckets)
        optimizer.step()
    before = [parameter.clone() for parameter in module.parameters()]
    buckets.zero() if zero else optimizer.zero_grad()
    backward(module)
    other.step()  # is none of ours
    with pytest.raises(RuntimeError, match=r"an optimizer steps between a backward and finish\(\)"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"nothing is reduced yet; call finish\(\) first"):
        buckets.gradient_shards()
    assert all(map(torch.equal, before, module.parameters()))
    buckets.finish()
    buckets.gradient_shards()
    optimizer.step()


@on_ranks(2)
def test_a_step_has_a_hook_for_buckets_that_are_in_use_alone():
    before = len(optimizers._global_optimizer_pre_hooks)
    kept, dropped = wrap(chain()), wrap(chain())
    assert len(optimizers._global_optimizer_pre_hooks) == before + 2
    kept.detach()
    del dropped
    gc.collect()
    assert len(optimizers._global_optimizer_pre_hooks) == before


@on_ranks(2)
def test_steps_that_wait_for_nothing_are_taken():
    """Of local gradients under `no_sync`, after `zero`, after `detach`."""
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


def gradient_replaced(module):
    module[2].weight.grad = module[2].weight.grad * 2


CHANGES = {
    "torch clips": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "ours clips": lambda module: clip_grad_norm_(module.parameters(), 0.1),
    "one is scaled": lambda module: module[2].weight.grad.mul_(2),
    "replaced": gradient_replaced,
    "cleared": lambda module: module.zero_grad(),
    "zeroed": lambda module: module.zero_grad(set_to_none=False),
    "main_grad": lambda module: module[2].weight.main_grad.mul_(2),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["first", "third"])
@on_ranks(2)
def test_gradients_that_are_changed_on_their_way_are_told(steps):
    initialize_model_parallel(1)
    for case, change in CHANGES.items():
        module = chain()
        buckets = wrap(module, main_grad=case == "main_grad")
        for _ in range(steps):
            step(module, buckets)
        buckets.zero()
        backward(module)
        change(module)
        told, again = error_of(buckets.finish), error_of(buckets.finish)
        assert told[0] == "RuntimeError", case
        assert "was changed, replaced or cleared between backward and finish(); call finish() f" in told[1]
        assert "call zero()" in again[1]
        dist.barrier()
        step(module, buckets)
        name = "main_grad" if case == "main_grad" else "grad"
        found = [getattr(parameter, name) for parameter in module.parameters()]
        torch.testing.assert_close(found, expected_gradients(module))
        change(module)  # after `finish` gradients are the caller's


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@on_ranks(2)
def test_main_grad_that_nobody_cleared_is_told(average):
    module = chain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    buckets = wrap(module, main_grad=True, average=average)
    for _ in range(3):
        step(module, buckets)
    optimizer.step()
    optimizer.zero_grad()
    kind, text = error_of(backward, module)
    assert kind == "RuntimeError"
    assert "receives a gradient while main_grad holds that of the last step; call zero()" in text
    step(module, buckets)
    found = [parameter.main_grad / (1 if average else 2) for parameter in module.parameters()]
    torch.testing.assert_close(found, expected_gradients(module))


def doubled(parameter):
    parameter.grad.mul_(2)


@both_ways
@pytest.mark.parametrize("case", ["between", "in a hook", "after"])
@on_ranks(2)
def test_gradients_may_be_changed_before_and_after(case):
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


def assigned(module):
    module.load_state_dict(chain().state_dict(), assign=True)


def replaced(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


def added(module):
    module.append(nn.Linear(WIDTH, WIDTH).double())


def unfrozen(module):
    module[1].weight.requires_grad_(True)


CHANGED_MODULES = {assigned: "0.weight", replaced: "2.weight", added: "4.weight", unfrozen: "1.weight"}


@pytest.mark.parametrize("steps", [0, 1, 6])
@on_ranks(2)
def test_gradients_of_others_are_told_in_the_step_they_come_in(steps):
    for change, name in CHANGED_MODULES.items():
        module = chain()
        module[1].weight.requires_grad_(change is not unfrozen)
        buckets = wrap(module)
        for _ in range(steps):
            step(module, buckets)
        change(module)
        for _ in range(2):
            kind, text = error_of(step, module, buckets)
            assert kind == "RuntimeError"
            assert f"'{name}' is not reduced; detach() these buckets and make new ones: it was added" in text


@on_ranks(2)
def test_given_parameters_that_are_unfrozen_are_told():
    module = chain()
    module[1].weight.requires_grad_(False)
    buckets = wrap(list(module.named_parameters()))
    for _ in range(2):
        step(module, buckets)
    unfrozen(module)
    assert "the gradient of '1.weight' is not reduced" in error_of(step, module, buckets)[1]


@on_ranks(2)
def test_others_may_be_elsewhere():
    """Parameters beside the buckets that are none of theirs: frozen, unused, or under others."""
    module = chain()
    module[1].weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    module[1].weight.requires_grad_(False)  # its gradient is of former times
    buckets = wrap(module)
    module.unused = nn.Parameter(torch.ones(1))
    step(module, buckets)
    added(module)
    others = GradientBuckets(module[4], dist.group.WORLD)
    for _ in range(3):
        others.zero()
        step(module, buckets)
        others.finish()
    module[1].weight.requires_grad_(True)
    del module.unused
    expected = expected_gradients(module)
    expected[2] = torch.ones_like(expected[2])
    assert_gradients(module, expected)


class Empty(nn.Module):
    """A module that Python takes for false."""

    def __init__(self):
        super().__init__()
        self.chain = chain()

    def __len__(self):
        return 0


@on_ranks(2)
def test_module_of_no_length_is_looked_at():
    buckets = wrap(module := Empty())
    replaced(module.chain)
    with pytest.raises(RuntimeError, match=r"the gradient of 'chain\.2\.weight' is not reduced"):
        step(module.chain, buckets)


@on_ranks(2)
def test_module_may_go():
    buckets = wrap(module := chain())
    backward(module)
    del module
    buckets.finish()
