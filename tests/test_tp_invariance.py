"""TP-invariance: what turns it on, what is refused, and the tree in which sums are added."""

from __future__ import annotations

import runpy

import pytest

import tpkernels
from tests.segments import in_op, tp_invariance
from tpkernels.tp_invariance import own_segments, segments_of_op, tree_sum


@pytest.mark.parametrize(("value", "segments"), [("", 0), ("0", 0), ("8", 8), ("1", 1), ("1024", 1024)])
def test_environment_turns_it_on(value, segments, monkeypatch):
    monkeypatch.setenv("TPKERNELS_TP_INVARIANT", value)
    assert runpy.run_path(tpkernels.tp_invariance.__file__)["default"].segments == segments


@pytest.mark.parametrize("value", ["yes", "-8", "8.0", "6", "2048"])
def test_environment_that_says_nothing_of_use_is_refused(value, monkeypatch):
    monkeypatch.setenv("TPKERNELS_TP_INVARIANT", value)
    with pytest.raises(ValueError, match=r"TPKERNELS_TP_INVARIANT.*power of two"):
        runpy.run_path(tpkernels.tp_invariance.__file__)


def test_a_call_sets_the_default():
    with tp_invariance(0):
        tpkernels.tp_invariant()
        assert tpkernels.tp_invariance.default.segments == 8
        tpkernels.tp_invariant(segments=2)
        assert tpkernels.tp_invariance.default.segments == 2


@pytest.mark.parametrize(
    ("segments", "error", "said"),
    [(wrong, ValueError, f"a power of two up to 1024, got {wrong}") for wrong in (3, 12, -2, 2048)]
    + [(wrong, TypeError, "expected a whole number") for wrong in (True, 8.0, "8", None)],
)
def test_other_numbers_have_no_common_tree_and_other_types_are_refused(segments, error, said):
    with pytest.raises(error, match=said):
        tpkernels.tp_invariant(segments)


def test_kernels_are_told_while_an_op_runs_and_not_after_an_error():
    seen = []

    def op() -> None:
        with in_op(8):
            seen.append(segments_of_op())
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        op()
    assert seen == [8]
    assert segments_of_op() == 0


def test_each_rank_has_as_many_segments():
    assert [own_segments("an op", 8, ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert own_segments("an op", 0, 3) == 0
    for ranks in (3, 6, 16):
        said = f"an op: expected .* the 8 segments of TP-invariance, got {ranks}"
        with pytest.raises(ValueError, match=said):
            own_segments("an op", 8, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_have_subtrees_of_one_tree(ranks):
    """Of numbers for which another order of adding gives another sum."""
    parts = [1.0] + 7 * [2.0**-53]
    own = 8 // ranks
    of_ranks = [tree_sum(parts[rank * own : (rank + 1) * own]) for rank in range(ranks)]
    assert tree_sum(of_ranks) == tree_sum(parts)
    assert sum(parts) != tree_sum(parts)
