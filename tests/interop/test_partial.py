"""Parameters that every rank keeps, and that see its features only, are trained as if there were one."""

from __future__ import annotations

import pytest

from tests.interop.partial_cases import WAYS, data_parallel, declared, refused, trained_alike, without_sums


@pytest.mark.parametrize("how", WAYS)
def test_adamw_does_what_it_does_unsharded(how, ranks2):
    assert ranks2.run(trained_alike, how, timeout=120) == [[], []]


def test_adamw_on_four_ranks(ranks4):
    assert ranks4.run(trained_alike, "plain") == [[]] * 4


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_under_data_parallel_wrappers(wrapper, ranks4):
    assert ranks4.run(data_parallel, wrapper) == [[]] * 4


def test_plan_may_say_it_and_is_checked(ranks2):
    first, second = ranks2.run(declared)
    assert first == second
    assert first["declared"] == []
    kind, text = first["untold"]
    assert kind == "ValueError"
    assert "'attentions.0.scale' stands beside layers that are split, and it cannot be told" in text
    for case, name in (("wrong", "q_norm.weight"), ("whole one", "norms.1.weight")):
        kind, text = first[case]
        assert kind == "ValueError"
        assert f"{name}' is off by" in text, text
    assert "'attentions.0.scale' stands beside layers that are split" in first["reentrant"][1]


def test_what_cannot_be_right_is_refused(ranks2):
    first, second = ranks2.run(refused)
    assert first == second
    expected = {
        "all heads": "'attentions.0.q.1' does not take this rank's features, though it takes all of them",
        "gate": "reaches both full features and, past no column, those that ranks split",
        "norm": "the first module whose output differs is 'down', and the last before it that agrees is 'up'",
    }
    for case, part in expected.items():
        assert first[case][0] == "ValueError"
        assert part in first[case][1], first[case]


def test_gradients_without_sums_are_seen(ranks2):
    for kind, text in ranks2.run(without_sums):
        assert kind == "ValueError"
        assert "the gradient of 'attentions." in text
        assert "is off by" in text
