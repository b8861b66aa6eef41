"""Parameters that a module gets after its buckets were made: their gradients are not left to each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import WIDTH, assert_gradients, chain, expected_gradients, loss_of, own_batch, wrap
from tests.checks import error_of
from tpkernels import GradientBuckets


def whole_step(module, buckets):
    buckets.zero()
    loss_of(module(own_batch())).backward()
    buckets.finish()


def assigned(module):
    module.load_state_dict(chain().state_dict(), assign=True)


def replaced(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


def added(module):
    module.append(nn.Linear(WIDTH, WIDTH).double())


def unfrozen(module):
    module[1].weight.requires_grad_(True)


CHANGES = {assigned: "0.weight", replaced: "2.weight", added: "4.weight", unfrozen: "1.weight"}


def changed(change, steps):
    """What finish() says by step after a change that comes after so many of them."""
    module = chain()
    module[1].weight.requires_grad_(change is not unfrozen)
    buckets = wrap(module)
    for _ in range(steps):
        whole_step(module, buckets)
    change(module)
    return [error_of(whole_step, module, buckets) for _ in range(steps + 1)]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gradients_of_others_are_told(ranks2, change, steps):
    for told in ranks2.run(changed, change, steps):
        kind, text = told[0]  # the first and the fourth finish() look
        assert kind == "RuntimeError"
        assert f"the gradient of '{CHANGES[change]}' is not reduced: it was added to the module" in text
        assert "detach() them and make new ones" in text


def changed_and_told(steps):
    """Steps after the fourth: who is told in which."""
    module = chain()
    buckets = wrap(module)
    for _ in range(4):
        whole_step(module, buckets)
    replaced(module)
    return [error_of(whole_step, module, buckets)[0] for _ in range(steps)]


def test_looks_grow_rare_but_do_not_end(ranks2):
    quiet = ["nothing"]
    assert (
        ranks2.run(changed_and_told, 12) == [quiet * 3 + ["RuntimeError"] + quiet * 7 + ["RuntimeError"]] * 2
    )


def nothing_to_tell():
    """Parameters beside the buckets that are none of theirs: frozen, unused, or under others."""
    module = chain()
    module[1].weight.grad = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    module[1].weight.requires_grad_(False)  # its gradient is of former times
    buckets = wrap(module)
    module.unused = nn.Parameter(torch.ones(1))
    whole_step(module, buckets)
    added(module)
    others = GradientBuckets(module[4], dist.group.WORLD)
    for _ in range(3):
        others.zero()
        whole_step(module, buckets)
        others.finish()
    module[1].weight.requires_grad_(True)
    del module.unused
    expected = expected_gradients(module)
    expected[2] = torch.ones_like(expected[2])
    assert_gradients(module, expected)


def test_others_may_be_elsewhere(ranks2):
    ranks2.run(nothing_to_tell)


class Empty(nn.Module):
    """A module that Python takes for false."""

    def __init__(self):
        super().__init__()
        self.chain = chain()

    def __len__(self):
        return 0


def changed_while_empty():
    buckets = wrap(module := Empty())
    replaced(module.chain)
    return error_of(whole_step, module.chain, buckets)


def test_module_of_no_length_is_looked_at(ranks2):
    for kind, text in ranks2.run(changed_while_empty):
        assert kind == "RuntimeError"
        assert "the gradient of 'chain.2.weight' is not reduced" in text


def module_that_goes():
    buckets = wrap(module := chain())
    loss = loss_of(module(own_batch()))
    del module
    loss.backward()
    buckets.finish()


def test_module_may_go(ranks2):
    ranks2.run(module_that_goes)
