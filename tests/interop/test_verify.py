"""A plan with which a model computes something else is refused before the model is touched."""

from __future__ import annotations

from tests.interop.verify_cases import (
    faults_seen,
    in_float32,
    like_the_whole_in_bfloat16,
    refused_and_unchanged,
    told_when_not_compared,
)


def test_wrong_plans_are_refused_and_change_nothing(ranks2):
    first, second = ranks2.run(refused_and_unchanged)
    assert first == second
    by_values = (
        "the first module whose output differs is 'inner.out', and the last before it that agrees is "
        "'inner.qkv.2' (1e-05 is allowed, in torch.float64). Mend the plan; the model is as it was"
    )
    expected = {
        "by default": ("ValueError", "'inner' does not take this rank's features, though it takes all of"),
        "by values": ("ValueError", by_values),
        "by name": ("ValueError", by_values),
        "by position": ("ValueError", by_values),
        "unlike": ("ValueError", "verify: expected the same inputs on all tensor-parallel ranks"),
        "other shapes": ("ValueError", "ranks disagree"),
        "do not run": ("ValueError", "verify: the unsharded model does not run with these inputs"),
        "of no kind": ("TypeError", "verify: expected example inputs (a tensor, a tuple, or a mapping"),
        "True": ("TypeError", "verify: expected example inputs"),
    }
    for case, (kind, part) in expected.items():
        assert (first[case][0], part in first[case][1]) == (kind, True), first[case]
        assert first[f"{case} left"] is True, case
    assert (first["calls"], first["rng"]) == (0, True)


def test_it_says_when_it_could_not_compare(ranks2):
    first, second = ranks2.run(told_when_not_compared)
    assert second == {case: [] for case in first}
    assert [len(first[case]) for case in ("no inputs", "off", "large", "large, asked")] == [1, 0, 1, 0]
    assert "was not compared with the unsharded one: no inputs with which it runs" in first["no inputs"][0]
    assert "numbers, and a comparison takes 26 bytes for each; pass verify=" in first["large"][0]


def test_it_sees_what_zeros_hide_and_models_without_numbers(ranks2):
    first, second = ranks2.run(faults_seen)
    assert first == second
    assert "the first module whose output differs is 'blocks.0.out', and the last" in first["bias"][1]
    assert "the first module whose output differs is 'inner.out'" in first["meta"][1]
    assert "'inner' does not take this rank's features" in first["meta, by default"][1]
    assert first["meta, right"] == first["meta, right by default"] == ("nothing", "")


def test_models_that_know_no_float64_are_compared_in_float32(ranks2):
    for right, wrong in ranks2.run(in_float32):
        assert right == ""
        assert "(1e-03 is allowed, in torch.float32)" in wrong


def test_right_plans_of_other_models_pass(ranks2):
    assert ranks2.run(like_the_whole_in_bfloat16) == [["", "", ""]] * 2
