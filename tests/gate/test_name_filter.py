"""What `--only NAME` takes, and what only looks like it."""

import pytest

from tpkernels.gate.name_filter import has_parts

ENTRY = "gfx942/linear/pointer/bf16/128x128x32/gelu_tanh+bias+z"


@pytest.mark.parametrize(
    "wanted",
    [
        "",
        "/",
        "linear",
        "linear/",
        "/linear",
        "linear/pointer",
        "gfx942",
        "gfx942/*",
        "*bias*",
        "l*r",
        "*+z",
        ENTRY,
    ],
)
def test_parts_in_a_row_are_named(wanted):
    assert has_parts(ENTRY, wanted)


@pytest.mark.parametrize("wanted", ["line", "inear", "linear/bf16", "pointer/linear", "gelu_tanh", "LINEAR"])
def test_half_a_part_is_not_named(wanted):
    assert not has_parts(ENTRY, wanted)


def test_a_name_that_ends_alike_needs_a_wildcard():
    assert not has_parts("gather_linear/pointer/bf16", "linear/pointer")
    assert has_parts("gather_linear/pointer/bf16", "*linear/pointer")
