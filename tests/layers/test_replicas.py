"""Copies of parameters stay equal, are counted once, and tell when they are not equal."""

from __future__ import annotations

import math

import pytest
import torch

from tests.checks import error_of
from tests.layers import replica_cases as cases
from tests.layers.worlds import posing
from tpkernels import RMSNorm, check_replicas, clip_grad_norm_, finalize_gradients


@pytest.fixture(params=["ranks1", "ranks2", "ranks4"])
def ranks(request):
    return request.getfixturevalue(request.param)


def test_finalizing_makes_gradients_whole(ranks):
    for before, after, by_buckets in ranks.run(cases.finalized):
        assert before == ([] if ranks.world_size == 1 else ["norm.weight"])
        assert after == by_buckets == []


def test_halves_are_summed_in_fp32(ranks4):
    assert all(ranks4.run(cases.finalized_halves))


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_norm_is_that_of_the_whole_model(ranks, max_norm):
    assert ranks.run(cases.clipped, max_norm) == [[True] * 3] * ranks.world_size


def test_training_follows_the_unsharded_model(ranks):
    for losses in ranks.run(cases.trained, 8):
        assert losses[-1][1] < 0.9 * losses[0][1]  # it learns
        for ours, expected in losses:
            assert ours == pytest.approx(expected, rel=1e-5)


def test_norm_counts_stages_and_shares_once(ranks4):
    norm = math.sqrt(2 * (2 * 3**2 + 4**2))
    for found, shard, shared in ranks4.run(cases.clipped_over_stages):
        assert found == pytest.approx(norm)
        assert shard == pytest.approx(3 / norm)
        assert shared == pytest.approx(100 / norm)


@pytest.mark.parametrize("pool", ["ranks2", "ranks4"])
def test_forgotten_finalizing_is_told_on_all_ranks(request, pool):
    said = request.getfixturevalue(pool).run(cases.forgotten)
    assert all(ours == said[0] for ours in said)
    (kind, clip), (_, check) = said[0]
    assert kind == "RuntimeError"
    assert clip.startswith("clip_grad_norm_: tensor-parallel ranks hold copies of parameter 0 of those given")
    assert "call finalize_gradients(model)" in clip
    assert "check_replicas: 'norm.weight' differs" in check


def test_no_stage_waits_for_one_that_refuses(ranks4):
    (_, first), (_, second), (_, third), (_, fourth) = ranks4.run(cases.refused_on_one_stage, timeout=20)
    assert (
        first
        == second
        == ("clip_grad_norm_: refused on pipeline stage 1, whose ranks say why; nothing is clipped")
    )
    assert third == fourth
    assert "copies of parameter 0 of those given, but other gradients of it: rank 2 has norm" in third


@pytest.mark.parametrize("plant", [cases.one_bit, cases.minus_zero])
def test_a_planted_drift_is_named_on_all_ranks(ranks4, plant):
    said = ranks4.run(cases.drift, plant)
    assert all(ours == said[0] for ours in said)
    assert said[0][0] == "RuntimeError"
    assert "'down.bias' differs between tensor-parallel ranks" in said[0][1]
    assert "rank 3 from rank 0. Start" in said[0][1]


def test_more_than_one_drift_is_counted(ranks2):
    (kind, text), _ = ranks2.run(cases.drift, cases.two_parameters)
    assert kind == "RuntimeError"
    assert "'norm.weight' differs" in text
    assert "so do 1 more of 3 parameters" in text


def test_shards_may_differ(ranks2):
    assert ranks2.run(cases.drift, cases.a_shard) == [("nothing", "")] * 2


def test_models_that_differ_are_an_error_not_a_hang(ranks2):
    said = ranks2.run(cases.different_models)
    assert said[0] == said[1]
    for kind, text in said[0]:
        assert kind == "ValueError"
        assert "ranks disagree" in text


def test_copies_may_lie_otherwise_in_memory(ranks4):
    found = ranks4.run(cases.other_strides)
    assert found == [[found[0][0], True, "RuntimeError"]] * 4


def test_norms_that_are_not_finite_are_told(ranks2):
    for infinite, nan in ranks2.run(cases.not_finite):
        assert math.isinf(infinite)
        assert math.isnan(nan)


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


def sharded_again(drifting: bool) -> list[tuple[str, str]]:
    """fully_shard makes new parameters: those of our norms say again that their gradients are partial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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


@pytest.mark.parametrize("drifting", [False, True])
def test_replicas_under_fully_shard_are_summed_and_compared(drifting, ranks4):
    for unsummed, summed, clipped, compared, lost in ranks4.run(sharded_again, drifting):
        assert unsummed[0] == "RuntimeError"
        assert "call finalize_gradients(model) after backward" in unsummed[1]
        assert summed == clipped == ("nothing", "")
        assert compared[0] == ("RuntimeError" if drifting else "nothing")
        assert "check_replicas: 'weight' differs" in compared[1] or not drifting
        assert lost[0] == "TypeError"
        assert "which has lost what was said of it" in lost[1]
