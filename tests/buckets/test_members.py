"""Parameters that a module gets after its buckets were made: their gradients are not left to each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import WIDTH, assert_gradients, backward, chain, expected_gradients, step, wrap
from tests.buckets.ways import on_ranks
from tests.checks import error_of
from tpkernels import GradientBuckets


def assigned(module):
    module.load_state_dict(chain().state_dict(), assign=True)


def replaced(module):
    module[2].weight = nn.Parameter(module[2].weight.detach().clone())


def added(module):
    module.append(nn.Linear(WIDTH, WIDTH).double())


def unfrozen(module):
    module[1].weight.requires_grad_(True)


CHANGES = {assigned: "0.weight", replaced: "2.weight", added: "4.weight", unfrozen: "1.weight"}


@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(2)
def test_gradients_of_others_are_told(steps):
    """The first and the fourth finish() look: here the one after a change that comes after so many steps."""
    for change, name in CHANGES.items():
        module = chain()
        module[1].weight.requires_grad_(change is not unfrozen)
        buckets = wrap(module)
        for _ in range(steps):
            step(module, buckets)
        change(module)
        kind, text = error_of(step, module, buckets)
        assert kind == "RuntimeError"
        assert f"the gradient of '{name}' is not reduced: it was added to the module" in text
        assert "detach() them and make new ones" in text


def changed_and_told(steps):
    """Steps after the fourth: who is told in which."""
    module = chain()
    buckets = wrap(module)
    for _ in range(4):
        step(module, buckets)
    replaced(module)
    return [error_of(step, module, buckets)[0] for _ in range(steps)]


def test_looks_grow_rare_but_do_not_end(ranks2):
    told = [*["nothing"] * 3, "RuntimeError", *["nothing"] * 7, "RuntimeError"]
    assert ranks2.run(changed_and_told, 12) == [told] * 2


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
