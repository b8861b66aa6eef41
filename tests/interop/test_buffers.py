"""What a model on the meta device holds besides its checkpoint is computed again, or missed by name."""

from __future__ import annotations

import pytest

from tests.interop.buffer_cases import carried_over, computed_again, set_by_hand, tied_again


@pytest.mark.parametrize("kind", ["reset", "configured", "told"])
def test_buffers_are_computed_again(kind, ranks2):
    assert ranks2.run(computed_again, kind) == [[], []]


@pytest.mark.parametrize("kind", ["alone", "half"])
def test_buffers_that_nobody_can_compute_are_named(kind, ranks2):
    first, second = ranks2.run(set_by_hand, kind)
    assert first == second
    *both, one, differs = first
    for error, text in both:
        assert error == "RuntimeError"
        assert "expected the numbers of 'scaled.factors', 'scaled.shift', which the model was built" in text
    assert "expected the numbers of 'scaled.shift', which" in one[1]
    assert differs == []


def test_tied_weights_stay_tied(ranks2):
    assert ranks2.run(tied_again) == [[], []]


def test_buffers_that_are_there_are_not_emptied(ranks2):
    assert ranks2.run(carried_over) == [[], []]
