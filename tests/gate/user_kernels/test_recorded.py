"""Results as recorded: sketches tell a change by its norm, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from tpkernels.gate.user_kernels import recorded

RESULT = torch.randn(300, 41, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(300, 41, generator=torch.Generator().manual_seed(2))
HOLE = RESULT.clone()
HOLE[3, 4] = float("nan")
WHOLE = torch.arange(40, dtype=torch.int32)


@pytest.mark.parametrize("part", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sketch_tells_how_far_a_result_moved(part, dtype):
    before, after = RESULT.to(dtype), (RESULT.double() + part * OTHER.double()).to(dtype)
    told = recorded.moved(recorded.sketch(after), recorded.sketch(before))
    true = float((after.double() - before.double()).norm() / before.double().norm())
    assert told == pytest.approx(true, rel=0.4)


@pytest.mark.parametrize(("now", "before"), [(HOLE, RESULT), (WHOLE + 1, WHOLE), (WHOLE, WHOLE.float())])
def test_results_that_cannot_be_compared_are_infinitely_far(now, before):
    assert recorded.moved(recorded.sketch(now), recorded.sketch(before)) == float("inf")


@pytest.mark.parametrize(
    "result", [RESULT, HOLE, WHOLE, RESULT.t()], ids=["floats", "hole", "whole", "strided"]
)
def test_equal_results_have_not_moved_after_a_file(result, tmp_path):
    recorded.write({"case": {"y": recorded.sketch(result)}}, tmp_path / "results.json")
    kept = recorded.read(tmp_path / "results.json")["case"]["y"]
    assert recorded.moved(recorded.sketch(result.clone()), kept) == 0


def test_a_damaged_file_of_results_is_told(tmp_path):
    path = tmp_path / "results.json"
    assert recorded.read(path) == {}
    path.write_text(json.dumps({"result": {}}))
    with pytest.raises(ValueError, match="holds no results: --update records them anew"):
        recorded.read(path)
