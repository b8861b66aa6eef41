"""Muon on shards has the bits of torch's Muon on full matrices, in as few collectives as it says."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from tests.checks import error_of
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.optim.small import LR, STEPS, Matrices, cut, set_gradients, state_of, values_for
from tests.products import once
from tpkernels import GPT, ColumnParallelLinear, GPTConfig, initialize_model_parallel
from tpkernels.checkpoints.shards import TensorShard, shards_of
from tpkernels.optim import CombinedOptimizer, Muon, hidden_matrices, orthogonalize
from tpkernels.optim.full_matrices import plan_rounds
from tpkernels.optim.muon import multiplications

POOLS = {"tp1": ("ranks1", 1), "tp2": ("ranks2", 2), "tp4": ("ranks4", 4), "tp2_dp2": ("ranks4", 2)}
OPTIONS = {
    "defaults": {},
    "plain": {"lr": 0.1, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "adamw_like": {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "eps": 1e-3},
    "coefficients": {"ns_coefficients": (2.0, -1.5, 0.5), "lr": torch.tensor([0.05])},
}


def reference(model: nn.Module, steps: int, options: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """What torch's Muon makes of the full matrices."""
    start = values_for(model, "weights", 0, dtype)
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = torch.optim.Muon(list(parameters.values()), **options)
    for step in range(steps):
        for name, gradient in values_for(model, "gradients", step, dtype).items():
            if not name.startswith("unused"):
                parameters[name].grad = gradient.clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def stepped(
    tensor: int, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's shards after three steps, and those of torch's full matrices.

    own: options of our Muon only; "shared": with the data-parallel group
    """
    model = Matrices(tensor, dtype)
    if own.pop("shared", False):
        own["data_parallel_group"] = model.state.process_group("dp")
    optimizer = Muon(model.parameters(), model=model, **options, **own)
    for step in range(STEPS):
        set_gradients(model, values_for(model, "gradients", step, dtype))
        optimizer.step()
    expected = reference(model, STEPS, options, dtype)
    assert torch.equal(expected["unused.weight"], values_for(model, "weights", 0, dtype)["unused.weight"])
    return {
        name: (shard.tensor.detach(), cut(shard, expected[name])) for name, shard in shards_of(model).items()
    }


def assert_same_bits(*arguments: Any) -> None:
    for name, (ours, theirs) in stepped(*arguments).items():
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def of_two(parts: list[Tensor], gradient: Tensor) -> Tensor:
    """What torch's Muon makes of parameters that are stacked in one, in a step."""
    parameters = [nn.Parameter(part.clone()) for part in parts]
    for parameter, own in zip(parameters, gradient.split([len(part) for part in parts]), strict=True):
        parameter.grad = own.clone()
    torch.optim.Muon(parameters, lr=LR).step()
    return torch.cat([parameter.detach() for parameter in parameters])


def assert_stacked_are_two(tensor: int) -> None:
    """Gate and up under `split_stacked` are what torch makes of two parameters."""
    model = Matrices(tensor)
    weight = shards_of(model)["stacked.weight"]
    start, gradient = (
        values_for(model, kind, 0, torch.float32)["stacked.weight"] for kind in ("weights", "gradients")
    )
    weight.tensor.grad = cut(weight, gradient)
    Muon([weight.tensor], lr=LR, model=model, split_stacked=True).step()
    assert torch.equal(weight.tensor, cut(weight, of_two(list(start.chunk(2)), gradient)))


@on_ranks(2)
def test_stacked_weights_may_have_other_sizes():
    """Weights of 16 and 8 rows on two ranks."""
    state, model = state_of(2), nn.Module()
    model.weight = nn.Parameter(torch.zeros(12, 12))
    ranges = tuple((range(8 * r, 8 * r + 8), range(16 + 4 * r, 20 + 4 * r)) for r in range(2))
    shard = TensorShard(model.weight, (24, 12), 0, ranges, dist.get_rank(), (0, 0))
    gradient = torch.randn(24, 12, generator=torch.Generator().manual_seed(4))
    with patch("tpkernels.optim.muon.shards_of", lambda *_: {"weight": shard}):
        optimizer = Muon([model.weight], lr=LR, model=model, split_stacked=True, state=state)
    model.weight.grad = cut(shard, gradient)
    optimizer.step()
    expected = of_two([torch.zeros(16, 12), torch.zeros(8, 12)], gradient)
    assert torch.equal(model.weight, cut(shard, expected))


def collectives(layers: int, round_bytes: int, tensor: int) -> dict[str, int]:
    """How many of each kind torch.distributed is asked for in a step over so many layers."""
    state = state_of(tensor)
    model = nn.ModuleList(ColumnParallelLinear(8, 16, bias=False, state=state) for _ in range(layers))
    options = {"round_bytes": round_bytes, "data_parallel_group": state.process_group("dp")}
    optimizer = Muon(model.parameters(), model=model, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("gradient", "ranks disagree"),
        ("options", "ranks disagree: rank 0 has Muon.step with"),
        ("dtype", "replicated.weight' (20, 12) float64"),
    ],
)
@on_ranks(2)
def test_ranks_that_bring_other_things_are_told(case, said):
    """Both, where the second brings something else."""
    model = Matrices(2)
    optimizer = Muon(model.parameters(), model=model)
    set_gradients(model, values_for(model, "gradients", 0, torch.float32))
    if dist.get_rank() == 1:
        if case == "gradient":
            model.get_parameter("row.weight").grad = None
        elif case == "options":
            optimizer.param_groups[0]["momentum"] = 0.5
        else:
            vars(model.replicated.weight)["main_grad"] = torch.zeros(20, 12, dtype=torch.float64)
    kind, error = error_of(optimizer.step)
    assert kind in ("ValueError", "RuntimeError")
    assert said in error


@on_ranks(2)
def test_parameters_under_fully_shard_are_refused():
    model = fully_shard(Matrices(1), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match=r"'wide\.weight': expected a plain parameter, got a DTensor"):
        Muon(hidden_matrices(model)[0], model=model)


@pytest.fixture
def ranks(request, pool):
    return request.getfixturevalue(pool[0])


@once(pool=POOLS, options=OPTIONS)
def test_steps_are_those_of_torch_on_full_matrices(ranks, pool, options):
    ranks.run(assert_same_bits, pool[1], options, {}, torch.float32)


@once(
    pool=POOLS | {"dp2": ("ranks2", 1), "dp4": ("ranks4", 1)},
    own={
        "rounds": {"round_bytes": 1},
        "shared": {"shared": True},
        "both": {"shared": True, "round_bytes": 1},
    },
)
def test_rounds_and_data_parallel_ranks_that_share_the_work_change_no_bit(ranks, pool, own):
    ranks.run(assert_same_bits, pool[1], {}, own, torch.float32)


@pytest.mark.parametrize("tensor", [2, 4])
def test_in_bfloat16_torch_s_own_sums_depend_on_strides(tensor, request):
    """So that few elements may be rounded the other way: `weight.add_(update)` of a transposed update."""
    for found in request.getfixturevalue(f"ranks{tensor}").run(stepped, tensor, {}, {}, torch.bfloat16):
        for ours, theirs in found.values():
            assert (ours != theirs).sum() <= 4
            torch.testing.assert_close(ours, theirs, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_torch_s_muon_scales_a_momentum_in_bfloat16_and_ours_does_not():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    options = {"nesterov": False, "momentum": 0.5}
    with posing(0, 1):
        optimizers = torch.optim.Muon([model.weight], **options), Muon([model.weight], model=model, **options)
        for optimizer in optimizers:
            optimizer.step()
    theirs, ours = (optimizer.state[model.weight]["momentum_buffer"] for optimizer in optimizers)
    assert torch.equal(ours, torch.full((4, 4), 0.5, dtype=torch.bfloat16))
    scaled = torch.__version__ < TorchVersion("2.15")  # by its norm
    assert torch.equal(theirs, ours / 2.0 if scaled else ours)


@pytest.mark.parametrize("combined", [False, True])
@on_ranks(2)
def test_a_momentum_wider_than_its_parameter_is_loaded_as_it_was(combined):
    """That of an fp32 main_grad beside a parameter in bfloat16."""
    initialize_model_parallel(2)
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
    assert all(map(torch.equal, *results))
    assert results[0][1].dtype == torch.float32


def test_a_wrong_option_would_be_seen(ranks2):
    for found in ranks2.run(stepped, 2, {}, {"split_stacked": True}, torch.float32):
        ours, theirs = found.pop("stacked.weight")
        assert (ours != theirs).sum() > 300
        assert all(torch.equal(*both) for both in found.values())


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_weights_stacked_in_one_may_be_matrices_of_their_own(ranks, pool):
    ranks.run(assert_stacked_are_two, pool[1])


def test_a_step_takes_two_exchanges_however_many_matrices(ranks2, ranks4):
    (one, *_), (many, *_) = (ranks2.run(collectives, layers, 2**28, 2) for layers in (1, 16))
    assert one == many  # sends compare what ranks bring; no profiler is told of what they land in
    assert one["c10d::alltoall_base_"] == 2
    assert one.keys() == {"c10d::alltoall_base_", "c10d::send"}
    for found in ranks2.run(collectives, 8, 1, 2):  # rounds of two matrices
        assert found["c10d::alltoall_base_"] == 8
    for layers in (4, 16):  # two replicas of two ranks share them
        for found in ranks4.run(collectives, layers, 2**28, 2):
            assert found["c10d::alltoall_base_"] == 2
            assert found["c10d::_allgather_base_"] == 1


REFUSED = {
    "vector": (lambda m: Muon([m.bias], model=m), "expected real matrices, but 'bias'"),
    "stranger": (
        lambda m: Muon([nn.Parameter(torch.zeros(2, 2))], model=m),
        "expected parameters of `model`",
    ),
    "later": (
        lambda m: Muon([m.weight], model=m).add_param_group({"params": [m.bias]}),
        "expected real matrices, but 'bias'",
    ),
    "adjust": (
        lambda m: Muon([{"params": [m.weight], "adjust_lr_fn": "none"}], model=m),
        "expected adjust_lr_fn",
    ),
    "bytes": (lambda m: Muon([m.weight], model=m, round_bytes=0), "expected round_bytes of 1 or more, got 0"),
}


@pytest.mark.parametrize(("build", "said"), REFUSED.values(), ids=REFUSED)
def test_vectors_tables_and_strangers_are_not_for_muon(build, said):
    with posing(0, 1), pytest.raises(ValueError, match=f"Muon: {said}"):
        build(nn.Linear(4, 4))


def test_hidden_matrices_are_neither_tables_nor_heads():
    config = GPTConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, max_positions=8, tied=False)
    with posing(1, 2):
        model = GPT(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in model.blocks[0].mlp.parameters():
        parameter.requires_grad = False
    matrices, others = ({names[parameter] for parameter in kind} for kind in hidden_matrices(model))
    assert matrices == {
        f"blocks.0.attention.{name}.weight" for name in ("qkv.query", "qkv.key", "qkv.value", "output")
    }
    assert {"embedding.weight", "head.weight", "positions.weight", "norm.weight"} <= others
    assert matrices | others == {name for name in names.values() if "mlp." not in name}  # which is frozen


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


def dealt(costs, sizes, ranks, round_bytes):
    return plan_rounds(costs, sizes, ranks, round_bytes)


def test_expensive_matrices_are_dealt_out_first_in_rounds_of_some_bytes_and_a_multiple_of_the_ranks():
    assert dealt([5, 1, 1, 3], [8] * 4, 2, 100) == [[(0, 0), (3, 1), (1, 1), (2, 1)]]
    assert dealt([5, 1, 1, 3], [8] * 4, 2, 8) == [[(0, 0), (3, 1)], [(1, 1), (2, 0)]]
    assert [len(jobs) for jobs in dealt([1] * 7, [8] * 7, 3, 1)] == [3, 3, 1]
    assert dealt([], [], 2, 8) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_equally_much_to_do_in_a_model(ranks):
    """Where a step multiplies the smaller Gram matrix."""
    assert multiplications((2, 3)) == multiplications((3, 2)) == 2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3
    layer = [(1024, 1024)] * 4 + [(4096, 1024), (1024, 4096)]
    costs = [multiplications(shape) for shape in layer * 8]
    work = [0] * ranks
    for jobs in plan_rounds(costs, [2 * a * b for a, b in layer * 8], ranks, 2**24):
        for position, owner in jobs:
            work[owner] += costs[position]
    assert max(work) < 1.1 * sum(work) / ranks
