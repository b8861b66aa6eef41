"""What docs/optimizers.md says of optimizers on shards is so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.checks import error_of
from tests.on_ranks import on_ranks
from tests.optim.small import LR, STEPS, Matrices, cut, set_gradients, values_for
from tests.products import pairwise
from tpkernels.checkpoints import dcp
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.checkpoints.shards import shards_of
from tpkernels.layers.optimizers import ELEMENTWISE, why_wrong
from tpkernels.optim import CombinedOptimizer, Muon, hidden_matrices, require_elementwise

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


def wrong_on_shards(kind: str) -> tuple[float, str]:
    """How far weights are from those of the same optimizer on full matrices; what the check says of it."""
    model = Matrices(dist.get_world_size())
    start = values_for(model, "weights", 0, torch.float32)
    full = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    ours, theirs = KINDS[kind](model.parameters()), KINDS[kind](list(full.values()))
    for step in range(STEPS):
        gradients = values_for(model, "gradients", step, torch.float32)
        set_gradients(model, gradients)
        for name, parameter in full.items():
            parameter.grad = None if name.startswith("unused") else gradients[name].clone()
        ours.step()
        theirs.step()
    apart = [
        (shard.tensor.detach() - cut(shard, full[name].detach())).abs().max()
        for name, shard in shards_of(model).items()
    ]
    _, said = error_of(require_elementwise, ours, model)
    return float(torch.stack(apart).max()), said


class Adafactor(torch.optim.SGD):
    """A name that is known to be wrong."""


class OfAnotherPackage(torch.optim.AdamW):
    """A name that is not known."""


@on_ranks(2)
def test_the_check_names_optimizers_that_are_wrong_or_unknown():
    model = Matrices(2)
    sharded, replicated, wide = model.row.weight, model.replicated.weight, model.wide.weight
    eight = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim"})
    adam = torch.optim.AdamW([replicated])
    unknown = "OfAnotherPackage has 'row.weight', of which each rank holds a shard, and is not known"
    for optimizer, said in (
        (OfAnotherPackage([sharded, replicated]), unknown),
        (eight([sharded]), "blocks of elements share a scale"),
        (CombinedOptimizer(adam, Adafactor([sharded, wide])), "Adafactor has 'row.weight' and 1 more"),
    ):
        assert said in error_of(require_elementwise, optimizer, model)[1]
    require_elementwise(OfAnotherPackage([replicated]), model)
    require_elementwise(CombinedOptimizer(adam, Muon([sharded], model=model)), model)


def through_a_checkpoint(
    folder: str, tensor: int, resumed: bool, combined: bool
) -> tuple[dict[str, Tensor], list[float]]:
    """Full weights and rates after two steps; saved after the first, or resumed there."""
    model = Matrices(tensor)
    matrices, others = hidden_matrices(model)
    optimizer: Optimizer = Muon(model.parameters(), lr=LR, model=model)
    if combined:
        optimizer = CombinedOptimizer(Muon(matrices, lr=LR, model=model), torch.optim.AdamW(others, lr=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in (0, 1):
        if step == 1 and resumed:
            dcp.load(folder, model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
        elif step == 1:
            dcp.save(folder, model, optimizer)
        set_gradients(model, values_for(model, "gradients", step, torch.float32))
        if step == 1 or not resumed:
            optimizer.step()
            schedule.step()
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return full_state_dict(model, state=model.state), rates


WRONG = ("Adafactor", "Muon")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WRONG])
def test_elementwise_optimizers_are_right_on_shards(kind, ranks2):
    assert ranks2.run(wrong_on_shards, kind) == [(0.0, "")] * 2


@on_ranks(2)
def test_others_are_refused_in_their_first_step():
    model = Matrices(2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    set_gradients(model, values_for(model, "gradients", 0, torch.float32))
    eight = type("AdamW", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim"})
    for make in (*map(KINDS.get, WRONG), eight):
        optimizer = make(model.parameters())
        for _ in range(2):
            kind, said = error_of(optimizer.step)
            assert kind == "ValueError"
            assert said.startswith(f"{type(optimizer).__name__} has a parameter of shape ")
            assert "of which each rank holds a shard, and takes the shard for the full parameter: " in said
            assert said.endswith("and tpkernels.optim.Muon")
        assert (
            f"require_elementwise: {type(optimizer).__name__} has 'wide.weight' and 5 more"
            in error_of(require_elementwise, optimizer, model)[1]
        )
    assert all(map(torch.equal, before, model.parameters()))


class Sophia(Optimizer):
    """Of a package that is not known."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


@pytest.mark.parametrize(
    ("name", "module", "known"),
    [
        ("FusedLAMB", "apex.optimizers", True),
        ("DistributedShampoo", "shampoo", True),
        ("AdamW8bit", "torchao.optim", True),
        ("AdamW", "bitsandbytes.optim", True),
        ("LambdaSGD", "mine", False),
        ("Adan", "orbit.muon_and_lars", False),
    ],
)
def test_wrong_optimizers_are_known_by_whole_words_of_their_class(name, module, known):
    kind = type(name, (torch.optim.SGD,), {"__module__": module})
    assert bool(why_wrong(kind([nn.Parameter(torch.zeros(1))]))) == known


def told_in_a_step(optimizer) -> list[str]:
    """On some rank."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, [str(each.message) for each in told])
    return [text for texts in said for text in texts]


@on_ranks(2)
def test_an_optimizer_that_is_not_known_is_told_of_once_by_one_rank():
    model = Matrices(2)
    optimizer = Sophia([model.row.weight])
    (first,) = told_in_a_step(optimizer)
    assert first.startswith("Sophia has a parameter of shape")
    assert "is not known here" in first
    assert told_in_a_step(optimizer) == []
    assert told_in_a_step(OfAnotherPackage([model.row.weight])) == []  # an AdamW
    assert told_in_a_step(Sophia([model.replicated.weight])) == []
    optimizer.add_param_group({"params": [model.replicated.weight]})
    assert told_in_a_step(optimizer) == [first]


def test_the_check_has_nothing_to_say_on_one_rank(ranks1):
    ((_, said),) = ranks1.run(wrong_on_shards, "Adafactor")
    assert said == ""


def test_torch_s_elementwise_optimizers_are_all_tried():
    ours = {kind for kind in ELEMENTWISE if hasattr(torch.optim, kind)}
    assert ours == set(KINDS) - set(WRONG)


@pairwise(combined=[True, False], sizes={"2_4": (2, 4), "4_1": (4, 1), "1_2": (1, 2)})
def test_states_are_saved_whole_and_loaded_at_another_size(combined, sizes, request, tmp_path):
    """Of Muon, and of two optimizers as one."""
    (first, _) = sizes
    home, abroad = (request.getfixturevalue(f"ranks{ranks}") for ranks in sizes)
    saved, rates = home.run(through_a_checkpoint, str(tmp_path / "a"), first, False, combined)[0]
    for ranks in (home, abroad):
        size = ranks.world_size
        found, its_rates = ranks.run(through_a_checkpoint, str(tmp_path / "a"), size, True, combined)[0]
        torch.testing.assert_close(found, saved, rtol=0, atol=0)
        assert its_rates == rates == pytest.approx([0.005, 0.0025] if combined else [0.005])


def test_combined_optimizers_share_no_parameter():
    weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="expected different parameters in each optimizer"):
        CombinedOptimizer(torch.optim.SGD([weight]), torch.optim.AdamW([weight]))
    with pytest.raises(ValueError, match="expected one optimizer or more"):
        CombinedOptimizer()
    combined = CombinedOptimizer(torch.optim.SGD([weight], lr=0.1))
    with pytest.raises(ValueError, match="before they are combined"):
        combined.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    weight.grad = torch.ones(2)
    assert combined.step(lambda: 3.0) == 3.0
    assert torch.equal(weight, torch.full((2,), -0.1))
