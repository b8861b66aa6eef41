"""Copies of parameters stay equal, are counted once, and tell when they are not equal."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.checks import error_of
from tests.layers.small import Block, K, N, built, close, cut_of, drawn, tokens
from tests.layers.worlds import posing
from tpkernels import (
    GradientBuckets,
    RMSNorm,
    check_replicas,
    clip_grad_norm_,
    finalize_gradients,
    initialize_model_parallel,
    parallel_state,
)
from tpkernels.layers.attributes import Attributes

Said = tuple[str, str]
NOTHING = ("nothing", "")


def whole_after_backward() -> dict[str, Tensor]:
    """Parameters and gradients of the unsharded `Block`, in plain torch and float64."""
    torch.manual_seed(7)
    shapes = {"up": (N, K), "down": (K, N), "mlp.up": (N, K), "mlp.gate": (N, K), "mlp.down": (K, N)}
    p = {f"{name}.weight": nn.init.xavier_normal_(torch.empty(shape)) for name, shape in shapes.items()}
    p |= {"norm.weight": torch.ones(K), "up.bias": torch.zeros(N)}
    p |= {"down.bias": torch.zeros(K), "mlp.down.bias": torch.zeros(K)}
    p = {name: value.double().requires_grad_() for name, value in p.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    x = drawn((8, 3, K), 1).double()
    x = x + linear(F.gelu(linear(F.rms_norm(x, (K,), p["norm.weight"], 1e-5), "up")), "down")
    y = x + linear(F.silu(linear(x, "mlp.gate")) * linear(x, "mlp.up"), "mlp.down")
    y.square().mean().backward()
    return p


def backward(model: nn.Module) -> None:
    (model(tokens()).square().mean() / dist.get_world_size()).backward()


def wrong_gradients(block: Block, expected: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name, p in block.named_parameters()
        if not close([p.grad.double()], [cut_of(p)(expected[name].grad)], 1e-5)
    ]


def finalized() -> list[list[str]]:
    """Whose gradients are wrong: before, and after; and after buckets did it."""
    block, expected = built(), whole_after_backward()
    backward(block)
    before = wrong_gradients(block, expected)
    finalize_gradients(block)
    after = wrong_gradients(block, expected)
    group = parallel_state.get_tensor_model_parallel_group()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets(block, alone, tensor_parallel_group=group)
    for _ in range(2):
        buckets.zero()
        backward(block)
        buckets.finish()
    return [before, after, wrong_gradients(block, expected)]


def clipped(max_norm: float) -> list[bool]:
    """Norm and clipped gradients against torch's own of the whole model."""
    block = built()
    backward(block)
    finalize_gradients(block)
    whole = whole_after_backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.values(), max_norm)
    found = clip_grad_norm_(block.parameters(), max_norm)
    wrong = wrong_gradients(block, whole)
    again = clip_grad_norm_(list(block.parameters()), max_norm)
    return [
        abs(float(found) / float(expected) - 1) < 1e-5,
        not wrong,
        abs(float(again) / min(max_norm, float(expected)) - 1) < 1e-3,
    ]


def clipped_over_stages() -> list[float]:
    """The norm over 2 tensor ranks x 2 stages: a shard of 3s, a copy of 4s, and one that is shared."""
    initialize_model_parallel(2, 2)
    shard, copy, shared = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    Attributes(True, 0, 1).put_on(shard)
    for parameter, value in ((shard, 3.0), (copy, 4.0), (shared, 100.0)):
        parameter.grad = torch.tensor([value])
    shared.shared = True
    norm = clip_grad_norm_([shard, copy, shared, shard], 1.0)
    return [float(norm), float(shard.grad), float(shared.grad)]


def forgotten() -> list[Said]:
    """What clipping and checking say where gradients were not finalized."""
    block = built()
    backward(block)
    said = [error_of(clip_grad_norm_, block.parameters(), 1.0)]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter -= 0.1 * parameter.grad
    return [*said, error_of(check_replicas, block)]


def refused_on_one_stage() -> Said:
    """Copies of the second stage of two have gradients that differ."""
    initialize_model_parallel(2, 2)
    weight = nn.Parameter(torch.zeros(2))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    weight.grad = torch.ones(2) * (1 + stage * dist.get_rank())
    said = error_of(clip_grad_norm_, [weight], 0.1)
    assert weight.grad[0] == 1 + stage * dist.get_rank(), "nothing is clipped"
    return said


PLANTS = {  # by name: functions that are no module's do not travel
    "one bit": lambda block: block.down.bias[3].fill_(1e-45),
    "minus zero": lambda block: block.down.bias[3].fill_(-0.0),
    "two parameters": lambda block: (block.norm.weight.mul_(1.5), block.mlp.down.bias.add_(1)),
    "a shard": lambda block: block.up.weight.zero_(),  # of which ranks hold different parts anyway
}


def drift(plant: str) -> Said:
    block = built()
    check_replicas(block)  # nothing to tell yet
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            PLANTS[plant](block)
    return error_of(check_replicas, block)


def different_models() -> list[Said]:
    block = built()
    if dist.get_rank() == 0:
        block.down.bias = None
        del block.norm.weight
    return [
        error_of(check_replicas, block),
        error_of(finalize_gradients, block),
        error_of(clip_grad_norm_, block.parameters(), 1.0),
    ]


def not_finite() -> list[float]:
    """Norms of gradients that are infinite on all ranks, and NaN in a shard of one."""
    block = built()
    block.norm.weight.grad = torch.full((K,), torch.inf)
    infinite = clip_grad_norm_(block.parameters(), 1.0)
    block.zero_grad()
    block.up.weight.grad = torch.full_like(block.up.weight, torch.nan if dist.get_rank() == 0 else 1.0)
    return [float(infinite), float(clip_grad_norm_(block.parameters(), 1.0))]


def other_strides() -> list[object]:
    """Copies that lie otherwise in memory on one rank: the norm, whether gradients are right, and drift."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(5)
    values, gradient = torch.randn(7, 5), torch.randn(7, 5)
    if dist.get_rank() == 1:
        values, gradient = values.t().contiguous().t(), gradient.t().contiguous().t()
    module = nn.ParameterDict({"matrix": nn.Parameter(values), "marked": nn.Parameter(values.clone())})
    Attributes(sequence_parallel=True).put_on(module["marked"])
    module["matrix"].grad, module["marked"].grad = gradient, gradient / dist.get_world_size()
    assert module["matrix"].stride() == ((1, 7) if dist.get_rank() == 1 else (5, 1))
    finalize_gradients(module)
    whole = gradient.contiguous()
    right = torch.allclose(module["marked"].grad, whole, rtol=1e-6)
    norm = clip_grad_norm_(module.parameters(), 1.0)
    clipped = whole / (2**0.5 * whole.norm())
    right &= all(torch.allclose(p.grad, clipped, rtol=1e-5) for p in module.parameters())
    check_replicas(module)
    with torch.no_grad():
        module["matrix"][3, 1] += dist.get_rank()
    return [float(norm), right, error_of(check_replicas, module)[0]]


def sharded_again(drifting: bool) -> list[Said]:
    """fully_shard makes new parameters: those of our norms say again that their gradients are partial."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, other = RMSNorm(8, sequence_parallel=True), torch.nn.LayerNorm(8)
    other.weight.sequence_parallel = True
    for module in (model, other):
        fully_shard(module, mesh=mesh["dp"])
    tokens = torch.arange(16.0).view(2, 8).sin() + mesh.get_local_rank("tp")
    (model(tokens) * tokens).sum().backward()
    group = mesh.get_group("tp")
    if drifting:
        with torch.no_grad():
            model.weight.to_local().add_(mesh.get_local_rank("tp"))
    return [
        error_of(clip_grad_norm_, model.parameters(), 1.0, state=group),
        error_of(finalize_gradients, model, state=group),
        error_of(clip_grad_norm_, model.parameters(), 1.0, state=group),
        error_of(check_replicas, model, state=group),
        error_of(finalize_gradients, other, state=group),
    ]


@pytest.fixture(params=["ranks1", "ranks4"])
def ranks(request):
    return request.getfixturevalue(request.param)


def sums() -> list[Tensor | None]:
    """Of a gradient in bfloat16, of one in `main_grad`, and of none."""
    initialize_model_parallel(dist.get_world_size())
    module = nn.ParameterList([torch.ones(3, dtype=torch.bfloat16), torch.ones(2), torch.ones(2)])
    for parameter in module:
        Attributes(sequence_parallel=True).put_on(parameter)
    module[0].grad = torch.full((3,), 1 + 2**-7, dtype=torch.bfloat16)
    module[1].main_grad = torch.arange(2.0)
    finalize_gradients(module)
    return [module[0].grad, module[1].main_grad, module[2].grad]


def test_gradients_are_summed_in_fp32_where_they_are(ranks4):
    exact = torch.full((3,), 4 * (1 + 2**-7)).bfloat16()
    torch.testing.assert_close(ranks4.run(sums), [[exact, 4 * torch.arange(2.0), None]] * 4, rtol=0, atol=0)


def test_finalizing_makes_gradients_whole(ranks):
    for before, after, by_buckets in ranks.run(finalized):
        assert before == ([] if ranks.world_size == 1 else ["norm.weight"])
        assert after == by_buckets == []


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_norm_is_that_of_the_whole_model(ranks, max_norm):
    assert ranks.run(clipped, max_norm) == [[True] * 3] * ranks.world_size


def test_norm_counts_stages_and_shares_once(ranks4):
    norm = math.sqrt(2 * (2 * 3**2 + 4**2))
    for found, shard, shared in ranks4.run(clipped_over_stages):
        assert found == pytest.approx(norm)
        assert shard == pytest.approx(3 / norm)
        assert shared == pytest.approx(100 / norm)


def test_forgotten_finalizing_is_told_on_all_ranks(ranks4):
    said = ranks4.run(forgotten)
    assert said == [said[0]] * 4
    (kind, clip), (_, check) = said[0]
    assert kind == "RuntimeError"
    assert clip.startswith("clip_grad_norm_: tensor-parallel ranks hold copies of parameter 0 of those given")
    assert "call finalize_gradients(model)" in clip
    assert "check_replicas: 'norm.weight' differs" in check


def test_no_stage_waits_for_one_that_refuses(ranks4):
    (_, first), (_, second), (_, third), (_, fourth) = ranks4.run(refused_on_one_stage)
    assert (
        first
        == second
        == ("clip_grad_norm_: refused on pipeline stage 1, whose ranks say why; nothing is clipped")
    )
    assert third == fourth
    assert "copies of parameter 0 of those given, but other gradients of it: rank 2 has norm" in third


@pytest.mark.parametrize(
    ("plant", "name", "words"),
    [
        ("one bit", "down.bias", "rank 3 from rank 0. Start"),
        ("minus zero", "down.bias", "rank 3 from rank 0. Start"),
        ("two parameters", "norm.weight", "so do 1 more of 3 parameters"),
    ],
)
def test_a_planted_drift_is_named_on_all_ranks(ranks4, plant, name, words):
    said = ranks4.run(drift, plant)
    assert said == [said[0]] * 4
    assert said[0][0] == "RuntimeError"
    assert f"'{name}' differs between tensor-parallel ranks" in said[0][1]
    assert words in said[0][1]


def test_shards_may_differ(ranks2):
    assert ranks2.run(drift, "a shard") == [NOTHING] * 2


def test_models_that_differ_are_an_error_not_a_hang(ranks2):
    said = ranks2.run(different_models)
    assert said[0] == said[1]
    for kind, text in said[0]:
        assert kind == "ValueError"
        assert "ranks disagree" in text


def test_copies_may_lie_otherwise_in_memory(ranks4):
    found = ranks4.run(other_strides)
    assert found == [[found[0][0], True, "RuntimeError"]] * 4


def test_norms_that_are_not_finite_are_told(ranks2):
    assert ranks2.run(not_finite) == [[math.inf, pytest.approx(math.nan, nan_ok=True)]] * 2


def test_a_rank_alone_has_nothing_to_compare():
    with posing(0, 1):
        norm = RMSNorm(4, sequence_parallel=True)
        norm.weight.grad = norm.weight.detach().clone()
        finalize_gradients(norm)
        check_replicas(norm)
        assert float(clip_grad_norm_(norm.weight, 1.0)) == pytest.approx(2.0)
        assert float(norm.weight.grad.norm()) == pytest.approx(1.0)
        assert float(clip_grad_norm_([], 1.0)) == 0.0
        for max_norm in (-1.0, math.nan):
            with pytest.raises(ValueError, match="expected max_norm of 0 or more"):
                clip_grad_norm_(norm.weight, max_norm)


@pytest.mark.parametrize("drifting", [False, True])
def test_replicas_under_fully_shard_are_summed_and_compared(drifting, ranks4):
    for unsummed, summed, clipped, compared, lost in ranks4.run(sharded_again, drifting):
        assert unsummed[0] == "RuntimeError"
        assert "call finalize_gradients(model) after backward" in unsummed[1]
        assert summed == clipped == NOTHING
        assert compared[0] == ("RuntimeError" if drifting else "nothing")
        assert "check_replicas: 'weight' differs" in compared[1] or not drifting
        assert lost[0] == "TypeError"
        assert "which has lost what was said of it" in lost[1]
