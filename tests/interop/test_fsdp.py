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
