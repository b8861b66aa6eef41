"""torch's `parallelize_module` with our styles: outputs and gradients are those of torch's own."""

from __future__ import annotations

import pytest

from tests.interop import style_cases as cases


@pytest.mark.parametrize("plan", cases.PLANS)
def test_plans_compute_what_torch_does(plan, ranks2):
    assert ranks2.run(cases.unlike, plan) == [{"LayerNorm": [], "RMSNorm": []}] * 2


@pytest.mark.parametrize(
    ("style", "inputs", "outputs"),
    [
        ("ColwiseParallel", ("R", "S(0)", "S(1)", "S(2)", "S(-1)"), ("R", "S(2)", "S(-1)")),
        ("RowwiseParallel", ("R", "S(2)", "S(-1)"), ("R", "S(0)", "S(1)")),
    ],
)
def test_layouts_are_computed_as_torch_does_or_refused(style, inputs, outputs, ranks2):
    for said in ranks2.run(cases.each_layout, style):
        for (given, wanted, kind), outcome in said.items():
            if given in inputs and wanted in outputs:
                assert outcome == "same", (given, wanted, kind)
            else:
                assert outcome.startswith(f"ValueError: {style}: "), (given, wanted, kind)
                assert "_layouts: expected" in outcome
                assert "use torch's own style" in outcome


def test_what_styles_do_not_take_is_an_error_that_names_it(ranks2):
    expected = [
        (
            "ValueError",
            "ColwiseParallel: expected features that the 2 ranks divide, got Linear(in_features=4",
        ),
        (
            "ValueError",
            "RowwiseParallel: expected features that the 2 ranks divide, got Linear(in_features=5",
        ),
        ("ValueError", "expected a mesh of one dimension, such as mesh['tp']"),
        ("TypeError", "expected an nn.Linear with its own forward, got Scaled"),
        ("TypeError", "expected an nn.Linear with its own forward, got Embedding"),
        ("ValueError", "input_layouts: expected Replicate() for an nn.Embedding, got S(-1)"),
        ("ValueError", "expected an nn.Embedding without max_norm"),
        ("TypeError", "expected an nn.LayerNorm or nn.RMSNorm with its own forward, got Dropout"),
        ("ValueError", "expected a norm over one dimension that has a weight"),
        ("TypeError", "expected an nn.Linear or nn.Embedding with its own forward, got ColwiseLinear"),
        ("ValueError", "ColwiseParallel: input_layouts: expected Replicate() or Shard(dim), got P(sum)"),
    ]
    for said in ranks2.run(cases.refused):
        assert [kind for kind, _ in said] == [kind for kind, _ in expected]
        for (_, text), (_, part) in zip(said, expected, strict=True):
            assert part in text


def test_styles_go_under_fully_shard(ranks4):
    for wrong, (kind, text) in ranks4.run(cases.under_fully_shard):
        assert wrong == []
        assert kind == "TypeError"
        assert "after fully_shard, set its attribute sequence_parallel" in text
