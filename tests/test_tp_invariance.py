"""The mode of TP-invariance: what turns it on, what is refused, and when it is too late."""

from __future__ import annotations

import runpy

import pytest

import tpkernels
from tpkernels import tp_invariance
from tpkernels.tp_invariance import Mode, tree_sum


@pytest.fixture(autouse=True)
def _off_and_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_invariance.mode, "segments", 0)
    monkeypatch.setattr(tp_invariance.mode, "used_by", "")


@pytest.mark.parametrize(("value", "segments"), [("", 0), ("0", 0), ("8", 8), ("1", 1), ("1024", 1024)])
def test_environment_turns_it_on(value, segments, monkeypatch):
    monkeypatch.setenv("TPKERNELS_TP_INVARIANT", value)
    assert runpy.run_path(tp_invariance.__file__)["mode"].segments == segments


@pytest.mark.parametrize("value", ["yes", "-8", "8.0", "6", "2048"])
def test_environment_that_says_nothing_of_use_is_refused(value, monkeypatch):
    monkeypatch.setenv("TPKERNELS_TP_INVARIANT", value)
    with pytest.raises(ValueError, match=r"TPKERNELS_TP_INVARIANT.*power of two"):
        runpy.run_path(tp_invariance.__file__)


def test_a_call_turns_it_on_and_off():
    tpkernels.tp_invariant()
    assert tp_invariance.mode.segments == 8
    tpkernels.tp_invariant(segments=2)
    assert tp_invariance.mode.segments == 2
    tpkernels.tp_invariant(0)
    assert tp_invariance.mode.segments == 0


@pytest.mark.parametrize(
    ("segments", "error", "said"),
    [(wrong, ValueError, f"a power of two up to 1024, got {wrong}") for wrong in (3, 12, -2, 2048)]
    + [(wrong, TypeError, "expected a whole number") for wrong in (True, 8.0, "8", None)],
)
def test_other_numbers_have_no_common_tree_and_other_types_are_refused(segments, error, said):
    with pytest.raises(error, match=said):
        tpkernels.tp_invariant(segments)


def test_what_was_built_keeps_its_segments():
    tpkernels.tp_invariant(8)
    tp_invariance.mode.fix("a layer")
    tpkernels.tp_invariant(8)
    with pytest.raises(RuntimeError, match=r"tp_invariant\(4\): a layer has used 8 segments already"):
        tpkernels.tp_invariant(4)
    with pytest.raises(RuntimeError, match="before groups and layers are made"):
        tpkernels.tp_invariant(0)


def test_each_rank_has_as_many_segments():
    assert [Mode(8).own_segments("an op", ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert Mode(0).own_segments("an op", 3) == 0
    for ranks in (3, 6, 16):
        said = f"an op: expected .* the 8 segments of TP-invariance, got {ranks}"
        with pytest.raises(ValueError, match=said):
            Mode(8).own_segments("an op", ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_have_subtrees_of_one_tree(ranks):
    """Of numbers for which another order of adding gives another sum."""
    parts = [1.0] + 7 * [2.0**-53]
    own = 8 // ranks
    of_ranks = [tree_sum(parts[rank * own : (rank + 1) * own]) for rank in range(ranks)]
    assert tree_sum(of_ranks) == tree_sum(parts)
    assert sum(parts) != tree_sum(parts)
