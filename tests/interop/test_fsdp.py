"""Models that tensor-parallel ranks and fully_shard split train, clip, save and load as unsharded ones."""

from __future__ import annotations

import pytest
import torch

from tests.interop import fsdp_cases as cases


def require_alike(found, expected, steps):
    """Losses, norms and weights."""
    for told, _ in found:
        assert torch.allclose(torch.tensor(told), torch.tensor(expected[0][-steps:]), rtol=1e-6, atol=0)
    weights = found[0][1]
    assert weights.keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-9), name


@pytest.mark.parametrize("kind", cases.KINDS)
def test_runs_of_2_by_2_are_the_unsharded_one_and_go_on_anywhere(kind, ranks4, ranks1, tmp_path):
    (expected,) = ranks1.run(cases.run, kind, 1, 1, str(tmp_path / "unsharded"))
    require_alike(ranks4.run(cases.run, kind, 2, 2, str(tmp_path / "a")), expected, cases.STEPS + 2)
    for sizes, pool in (((4, 1), ranks4), ((1, 4), ranks4), ((1, 1), ranks1)):
        require_alike(pool.run(cases.resume, kind, *sizes, str(tmp_path / "a")), expected, 2)
    require_alike(ranks4.run(cases.resume, kind, 2, 2, str(tmp_path / "unsharded")), expected, 2)


def test_torchs_own_tools_see_the_unsharded_model_in_dtensors(ranks4, ranks1, tmp_path):
    (reference,) = ranks1.run(cases.unsharded_by_torch)
    assert ranks4.run(cases.by_torch, str(tmp_path / "checkpoint"), reference) == [[]] * 4


def test_dtensors_of_a_model_on_the_meta_device(ranks4):
    assert ranks4.run(cases.from_meta) == [[]] * 4


def test_what_cannot_be_dtensors_is_refused_before_anything_is_replaced(ranks2):
    expected = [
        ("ValueError", "plan: 'blocks.*.qkv': expected weights of which each rank holds one range of rows"),
        ("ValueError", "as_dtensor=True: expected a DeviceMesh"),
        ("TypeError", "is a DTensor; expected a plain tensor: use fully_shard"),
    ]
    for said in ranks2.run(cases.refused):
        assert [kind for kind, _ in said] == [kind for kind, _ in expected]
        for (_, text), (_, part) in zip(said, expected, strict=True):
            assert part in text


def test_norm_counts_replicas_of_shards_once(ranks4):
    for norm, expected in ranks4.run(cases.of_hybrid_mesh):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_exact_norm_has_the_same_bits_under_fully_shard(ranks1, ranks4):
    (expected,) = ranks1.run(cases.exact_norms, 1, 1)
    for sizes in ((2, 2), (4, 1), (1, 4)):
        assert ranks4.run(cases.exact_norms, *sizes) == [expected] * 4


def test_partial_gradients_of_dtensors_are_summed_once(ranks2):
    assert ranks2.run(cases.of_marked_norm) == [[True, True]] * 2
