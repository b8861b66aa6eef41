"""What docs/optimizers.md says of optimizers on shards is so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim.shard_cases import KINDS, through_a_checkpoint, told, wrong_on_shards
from tpkernels.optim import CombinedOptimizer
from tpkernels.optim.elementwise import ELEMENTWISE

WRONG = ("Adafactor", "Muon")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WRONG])
def test_elementwise_optimizers_are_right_on_shards(kind, ranks2):
    assert ranks2.run(wrong_on_shards, kind) == [(0.0, "")] * 2


@pytest.mark.parametrize("kind", WRONG)
def test_others_are_wrong_on_shards_and_refused(kind, ranks2):
    for apart, said in ranks2.run(wrong_on_shards, kind):
        assert apart > 0.01
        assert f"require_elementwise: {kind} has 'wide.weight' and 5 more" in said
        assert "takes the shard for the full parameter" in said


def test_the_check_names_optimizers_that_are_wrong_or_unknown(ranks2):
    for said in ranks2.run(told):
        assert (
            "OfAnotherPackage has 'row.weight', of which each rank holds a shard, and is not known"
            in (said["strange"])
        )
        assert "blocks of elements share a scale" in said["8 bits"]
        assert "Adafactor has 'row.weight' and 1 more" in said["combined"]
        assert said["replicated"] == said["right"] == ""


def test_the_check_has_nothing_to_say_on_one_rank(ranks1):
    ((_, said),) = ranks1.run(wrong_on_shards, "Adafactor")
    assert said == ""


def test_torch_s_elementwise_optimizers_are_all_tried():
    ours = {kind for kind in ELEMENTWISE if hasattr(torch.optim, kind)}
    assert ours == set(KINDS) - set(WRONG)


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 1)])
def test_two_optimizers_are_saved_and_loaded_as_one(first, then, request, tmp_path):
    saved = request.getfixturevalue(f"ranks{first}").run(
        through_a_checkpoint, str(tmp_path / "a"), first, False
    )
    again = request.getfixturevalue(f"ranks{first}").run(
        through_a_checkpoint, str(tmp_path / "a"), first, True
    )
    for rank, found in enumerate(again):
        assert {name: float((own - saved[rank][name]).abs().max()) for name, own in found.items()} == (
            dict.fromkeys(found, 0.0)
        )
    other = request.getfixturevalue(f"ranks{then}").run(through_a_checkpoint, str(tmp_path / "a"), then, True)
    torch.testing.assert_close(other[0]["replicated.weight"], saved[0]["replicated.weight"], rtol=0, atol=0)
    torch.testing.assert_close(other[0]["rates"], torch.tensor([0.005, 0.0025]))


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
