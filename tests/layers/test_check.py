"""`check` finds what layers cannot see; hooks on steps come with layers, and go with groups."""

from __future__ import annotations

import gc
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as hooks_of_steps

from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.programs import ran
from tpkernels import (
    ColumnParallelLinear,
    check,
    destroy_model_parallel,
    initialize_model_parallel,
    parallelize,
)
from tpkernels.comm.calls import Calls
from tpkernels.layers import check as unit


class HomeMade:
    """An optimizer that torch does not know."""

    def __init__(self, groups):
        self.groups = groups

    def step(self):
        raise NotImplementedError


def by_groups(parameters):
    return [{"params": parameters}]


HELD = {"groups": by_groups, "tuple": tuple, "dict": dict.fromkeys}


@pytest.mark.parametrize("groups", HELD.values(), ids=HELD.keys())
@on_ranks(2)
def test_a_home_made_optimizer_of_replaced_parameters_is_refused(groups):
    initialize_model_parallel(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    old = HomeMade(groups(list(model.parameters())))
    parallelize(model, plan={"0": "head"})
    with pytest.raises(ValueError, match=r"^HomeMade: the optimizer has '0.weight', which parallelize has"):
        check(model, old)


class Shampoo(HomeMade):
    """A name that is known to be wrong on shards."""


def test_a_home_made_optimizer_that_is_wrong_on_shards_is_refused():
    with posing(0, 2):
        model = nn.Sequential(ColumnParallelLinear(4, 4))
        with pytest.raises(ValueError, match=r"^Shampoo has '0.weight' and 1 more, of which each rank holds"):
            check(model, Shampoo(list(model.parameters())))
        check(model, torch.optim.AdamW(model.parameters()))


WRAPPED = {
    "plain": DistributedDataParallel,
    "of a compiled one": lambda model: DistributedDataParallel(torch.compile(model)),
}


@pytest.mark.parametrize("wrap", WRAPPED)
@on_ranks(2)
def test_a_wrapper_over_other_shards_is_refused_before_its_first_forward(wrap):
    initialize_model_parallel(2)
    wrapper = WRAPPED[wrap](nn.Sequential(ColumnParallelLinear(4, 4)))
    with pytest.raises(ValueError, match="DistributedDataParallel over ranks 0, 1 would average different"):
        check(wrapper)


@on_ranks(2)
def test_a_wrapper_of_replaced_parameters_is_refused_before_its_next_forward():
    initialize_model_parallel(2)
    model = nn.Sequential(nn.Linear(4, 4))
    wrapper = DistributedDataParallel(model)
    parallelize(model, plan={"0": "head"})
    with pytest.raises(ValueError, match=r"has wrapped '0.weight', which parallelize has replaced"):
        check(wrapper)


def test_checking_sends_nothing_and_hangs_one_hook_on_the_model(monkeypatch):
    monkeypatch.setattr(Calls, "begin", None)
    with posing(0, 2):
        model = nn.Sequential(ColumnParallelLinear(4, 4), ColumnParallelLinear(4, 4))
        for _ in range(2):
            check(model, torch.optim.AdamW(model.parameters()))
        assert len(model._forward_pre_hooks) == 1


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="expected a model with tensor-parallel layers, got Linear"):
        check(nn.Linear(2, 2))


def installed() -> list[str]:
    """The functions of ours among torch's hooks for the whole process."""
    registered = (
        hooks_of_steps._global_optimizer_pre_hooks,
        hooks_of_steps._global_optimizer_post_hooks,
        hooks_of_modules._global_forward_pre_hooks,
        hooks_of_modules._global_forward_hooks,
        hooks_of_modules._global_module_registration_hooks,
        hooks_of_modules._global_parameter_registration_hooks,
    )
    found = [hook for each in registered for hook in each.values()]
    return sorted(f"{h.__module__}.{h.__name__}" for h in found if "tpkernels.layers" in h.__module__)


STEPS = ["tpkernels.layers.optimizers.before_step", "tpkernels.layers.replicas.after_step"]


def test_hooks_come_with_the_first_layer_and_go_with_groups():
    destroy_model_parallel()
    with posing(0, 2):
        assert installed() == []
        ColumnParallelLinear(4, 4)
        ColumnParallelLinear(4, 4)
        assert installed() == STEPS
        destroy_model_parallel()
        assert installed() == []
        initialize_model_parallel(2)
        ColumnParallelLinear(4, 4)
        assert installed() == STEPS
    destroy_model_parallel()


def test_in_debug_mode_a_model_is_checked_in_its_first_call(monkeypatch):
    destroy_model_parallel()
    monkeypatch.setattr(unit, "debug", True)
    with posing(0, 2), patch.object(unit, "check") as checks:
        model = nn.Sequential(nn.Sequential(ColumnParallelLinear(4, 4)))
        for _ in range(2):
            model(torch.ones(2, 4))
        nn.Linear(4, 4)(torch.ones(2, 4))
    destroy_model_parallel()
    checks.assert_called_once_with(model)


def test_in_debug_mode_a_model_is_traced_without_a_check(monkeypatch):
    destroy_model_parallel()
    monkeypatch.setattr(unit, "debug", True)
    with posing(0, 2), patch.object(unit, "check") as checks:
        model = nn.Sequential(ColumnParallelLinear(4, 4, gather_output=False))
        model.compile(backend="eager", fullgraph=True)
        model(torch.ones(2, 4))
    destroy_model_parallel()
    assert not checks.called


IMPORTING = """
import sys, warnings, numpy, torch, torch.distributed.tensor  # numpy has filters of its own
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

def state():
    named = [pair for home in (modules, optimizers) for pair in vars(home).items()]
    hooks = [each for name, each in named if "_global_" in name]
    return {
        "hooks": [len(each) for each in hooks if isinstance(each, dict)],
        "filters": {str(each) for each in warnings.filters},
        "finders": list(map(str, sys.meta_path)),
    }

before = state()
import tpkernels
[getattr(tpkernels, name) for name in tpkernels.__all__]
import tpkernels.comm.carveout
from tpkernels.interop import parallelize, torchtitan, typecheck
for name, after in state().items():
    assert after == before[name], (name, before[name], after)
"""


def test_importing_changes_nothing_of_the_process():
    assert ran("-c", IMPORTING).stderr == ""


@on_ranks(2)
def test_a_model_is_split_and_trained_without_a_walk_over_objects():
    initialize_model_parallel(2)
    with patch.object(gc, "get_objects") as objects:
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(nn.Linear(4, 4)), plan={"0": "head"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert not objects.called
