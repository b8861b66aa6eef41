"""Muon on shards has the bits of torch's Muon on full matrices, in as few collectives as it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tpkernels
from tests.optim.muon_cases import (
    collectives,
    differences,
    half_way,
    refused,
    stacked_difference,
    trained,
    under_fully_shard,
    uneven_difference,
)
from tpkernels import ColumnParallelLinear
from tpkernels.optim import CombinedOptimizer, Muon, hidden_matrices, orthogonalize

POOLS = (("ranks1", 1), ("ranks2", 2), ("ranks4", 4), ("ranks4", 2))
OPTIONS = {
    "defaults": {},
    "plain": {"lr": 0.1, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "adamw_like": {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "lr": torch.tensor([0.05])},
}


@pytest.mark.parametrize(("pool", "tensor"), POOLS)
def test_steps_are_those_of_torch_on_full_matrices(pool, tensor, request):
    ranks = request.getfixturevalue(pool)
    for options in OPTIONS.values():
        assert ranks.run(differences, tensor, options, {}, torch.float32) == [{}] * ranks.world_size


def test_rounds_do_not_matter(ranks2, ranks4):
    for ranks in (ranks2, ranks4):
        size = ranks.world_size
        assert ranks.run(differences, size, {}, {"round_bytes": 1}, torch.float32) == [{}] * size


@pytest.mark.parametrize(("pool", "tensor"), [("ranks2", 1), ("ranks4", 1), ("ranks4", 2), ("ranks2", 2)])
def test_data_parallel_ranks_that_share_the_work_have_the_same_bits(pool, tensor, request):
    ranks = request.getfixturevalue(pool)
    for own in ({"shared": True}, {"shared": True, "round_bytes": 1}):
        assert ranks.run(differences, tensor, {}, own, torch.float32) == [{}] * ranks.world_size


def test_in_bfloat16_torch_s_own_sums_depend_on_strides(ranks2, ranks4):
    """So that few elements may be rounded the other way: `weight.add_(update)` of a transposed update."""
    for ranks in (ranks2, ranks4):
        for found in ranks.run(differences, ranks.world_size, {}, {}, torch.bfloat16):
            assert found.keys() <= {"tall.weight", "stacked.weight", "table.weight", "replicated.weight"}
            for elements, roundings in found.values():
                assert elements <= 4
                assert roundings <= 1.0


def test_torch_s_muon_scales_a_momentum_in_bfloat16_and_ours_does_not(ranks1):
    theirs, ours = ranks1.run(_momenta)[0]
    assert torch.equal(ours, torch.full((4, 4), 0.5, dtype=torch.bfloat16))
    assert torch.equal(theirs, ours / 2.0)  # its norm


def _momenta() -> list[torch.Tensor]:
    tpkernels.initialize_model_parallel(1)
    model = nn.Linear(4, 4, bias=False).bfloat16()
    found = []
    for optimizer in (
        torch.optim.Muon([model.weight], nesterov=False, momentum=0.5),
        Muon([model.weight], model=model, nesterov=False, momentum=0.5),
    ):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        found.append(optimizer.state[model.weight]["momentum_buffer"])
    return found


def _goes_on_as_it_was(combined: bool) -> bool:
    """After the state was loaded, with an fp32 main_grad beside a parameter in bfloat16."""
    tpkernels.initialize_model_parallel(torch.distributed.get_world_size())
    results = []
    for reloaded in (False, True):
        torch.manual_seed(3)
        model = ColumnParallelLinear(16, 8, bias=False, dtype=torch.bfloat16)

        def made(model: nn.Module = model) -> torch.optim.Optimizer:
            muon = Muon(model.parameters(), model=model)
            return CombinedOptimizer(muon) if combined else muon

        optimizer = made()
        for _ in range(2):
            vars(model.weight)["main_grad"] = torch.randn(model.weight.shape)
            optimizer.step()
            if reloaded:
                saved, optimizer = optimizer.state_dict(), made()
                optimizer.load_state_dict(saved)
        results.append([model.weight.detach(), optimizer.state[model.weight]["momentum_buffer"]])
    return all(map(torch.equal, *results)) and results[0][1].dtype == torch.float32


@pytest.mark.parametrize("combined", [False, True])
def test_a_momentum_wider_than_its_parameter_is_loaded_as_it_was(combined, ranks2):
    assert ranks2.run(_goes_on_as_it_was, combined) == [True, True]


def test_a_wrong_option_would_be_seen(ranks2):
    for found in ranks2.run(differences, 2, {}, {"split_stacked": True}, torch.float32):
        assert found.keys() == {"stacked.weight"}
        assert found["stacked.weight"][0] > 300


@pytest.mark.parametrize(("pool", "tensor"), POOLS)
def test_weights_stacked_in_one_may_be_matrices_of_their_own(pool, tensor, request):
    ranks = request.getfixturevalue(pool)
    assert ranks.run(stacked_difference, tensor) == [False] * ranks.world_size


def test_stacked_weights_may_have_other_sizes(ranks2):
    assert ranks2.run(uneven_difference) == [False] * 2


def test_a_step_takes_two_exchanges_however_many_matrices(ranks2, ranks4):
    for ranks in (ranks2, ranks4):
        size = ranks.world_size
        (one, *_), (many, *_) = (ranks.run(collectives, layers, 2**28, size) for layers in (1, 16))
        assert one == many  # sends and receives compare what ranks bring
        assert one["c10d::alltoall_base_"] == 2
        assert one.keys() == {"c10d::alltoall_base_", "c10d::send", "c10d::recv_"}
    for found in ranks2.run(collectives, 8, 1, 2):  # rounds of two matrices
        assert found["c10d::alltoall_base_"] == 8
    for layers in (4, 16):  # two replicas of two ranks share them
        for found in ranks4.run(collectives, layers, 2**28, 2):
            assert found["c10d::alltoall_base_"] == 2
            assert found["c10d::_allgather_base_"] == 1


@pytest.mark.parametrize(("pool", "tensor"), POOLS[1:])
def test_a_model_trains_alike_at_every_size(pool, tensor, ranks1, request):
    ((expected, weights),) = ranks1.run(trained, 1)
    results = request.getfixturevalue(pool).run(trained, tensor)
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=0, abs=2e-3)
    found = results[0][1]
    assert found.keys() == weights.keys()
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 1), (1, 2)])
def test_momentum_is_saved_whole_and_loaded_at_another_size(first, then, request, tmp_path):
    request.getfixturevalue(f"ranks{first}").run(half_way, str(tmp_path / "saved"), first, False)
    for found in request.getfixturevalue(f"ranks{then}").run(half_way, str(tmp_path / "saved"), then, True):
        assert {name: float(difference.abs().max()) for name, difference in found.items()} == dict.fromkeys(
            found, 0.0
        )


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gradient of one rank", "ranks disagree"),
        ("options of one rank", "ranks disagree: rank 0 has Muon.step with"),
        ("dtype of one rank", "replicated.weight' (20, 12) float64"),
    ],
)
def test_ranks_that_bring_other_things_are_told(case, said, ranks2):
    for error in ranks2.run(refused, case):
        assert said in error


def test_vectors_tables_and_strangers_are_not_for_muon(ranks1):
    assert ranks1.run(_refusals) == [_EXPECTED]


def test_parameters_under_fully_shard_are_refused(ranks2):
    for kind, said in ranks2.run(under_fully_shard):
        assert kind == "TypeError"
        assert "'wide.weight': expected a plain parameter, got a DTensor" in said


_EXPECTED = {
    "vector": "Muon: expected real matrices, but 'bias'",
    "stranger": "Muon: expected parameters of `model`",
    "later": "Muon: expected real matrices, but 'bias'",
    "adjust": "Muon: expected adjust_lr_fn",
    "bytes": "Muon: expected round_bytes of 1 or more, got 0",
}


def _refusals() -> dict[str, str]:
    tpkernels.initialize_model_parallel(1)
    model = nn.Linear(4, 4)
    later = Muon([model.weight], model=model)
    tries = {
        "vector": lambda: Muon([model.bias], model=model),
        "stranger": lambda: Muon([nn.Parameter(torch.zeros(2, 2))], model=model),
        "later": lambda: later.add_param_group({"params": [model.bias]}),
        "adjust": lambda: Muon([{"params": [model.weight], "adjust_lr_fn": "none"}], model=model),
        "bytes": lambda: Muon([model.weight], model=model, round_bytes=0),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
            said[name] = "no error"
        except ValueError as error:
            said[name] = str(error)[: len(_EXPECTED[name])]
    return said


def test_hidden_matrices_are_neither_tables_nor_heads(ranks2):
    expected = {"blocks.0.attention.qkv.query.weight"}
    for matrices, others in ranks2.run(_parted):
        assert expected <= set(matrices)
        assert {"embedding.weight", "head.weight", "positions.weight", "norm.weight"} <= set(others)
        assert not {name for name in matrices if name.endswith("bias")}
        assert "blocks.0.mlp.up.weight" not in (*matrices, *others)  # frozen


def _parted() -> list[list[str]]:
    tpkernels.initialize_model_parallel(2)
    config = tpkernels.GPTConfig(
        vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, max_positions=8, tied=False
    )
    model = tpkernels.GPT(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    frozen = [p for name, p in model.named_parameters() if "mlp" in name]
    for parameter in frozen:
        parameter.requires_grad = False
    return [[names[parameter] for parameter in kind] for kind in hidden_matrices(model)]


def test_orthogonalize_is_torch_s_to_the_bit():
    for shape in ((16, 40), (40, 16), (16, 16), (1, 8)):
        matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = matrix.clone()
        torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, adjust_lr_fn=None).step()
        scale = max(1, shape[0] / shape[1]) ** 0.5
        assert torch.equal(-orthogonalize(matrix).float() * scale, weight.detach())
    with pytest.raises(ValueError, match=r"expected a matrix, got a tensor \(3,\)"):
        orthogonalize(torch.zeros(3))
