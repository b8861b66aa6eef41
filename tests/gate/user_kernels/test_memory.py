"""Answers about a user's kernels are kept for as long as the files stay that they came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.children import answers

KERNELS = """
import triton
from sizes import COUNT

@triton.jit
def scale_kernel(x, y, n):
    pass
"""
ITEM = {"kernel": "kernels:scale_kernel", "oracle": None}


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path / "caches"))
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "sizes.py").write_text("COUNT = 3\n")
    asked(tmp_path)
    return tmp_path


def asked(folder: Path, item: dict[str, object] = ITEM) -> children.Answer | str:
    (answer,) = answers(children.__name__, folder, [{**item, "folder": str(folder)}])
    return answer


def test_a_known_answer_starts_no_process(team, monkeypatch):
    before = asked(team)
    monkeypatch.setattr(children, "started", None)
    assert asked(team) == before
    assert before["place"] == "kernels.py:6"


@pytest.mark.parametrize("changed", ["kernels.py", "sizes.py"])
def test_an_edit_of_any_imported_file_asks_anew(changed, team):
    before = asked(team)["sources"]
    (team / changed).write_text((team / changed).read_text() + "\n# an edit\n")
    assert asked(team)["sources"] != before


@pytest.mark.parametrize("variable", ["TRITON_PTXAS_PATH", "PYTHONPATH"])
def test_a_variable_that_may_matter_asks_anew(variable, team, monkeypatch):
    before = asked(team)["sources"]
    monkeypatch.setenv(variable, str(team))
    assert asked(team)["sources"] != before


def test_a_mistake_is_not_kept(team):
    assert "has no 'other'" in asked(team, {**ITEM, "kernel": "kernels:other"})["mistake"]
    (team / "kernels.py").write_text(KERNELS + "other = scale_kernel\n")
    assert "mistake" not in asked(team, {**ITEM, "kernel": "kernels:other"})
