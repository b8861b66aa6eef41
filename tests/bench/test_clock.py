"""The table of docs/clock.md is what the clock says now, of figures whose kernels compile fast."""

import re
from pathlib import Path

import pytest

from bench.clock.published import measured
from bench.clock.validation import Judged, judged, pairs_in_order, summary, table

PAGE = Path(__file__).parents[2] / "docs" / "clock.md"
NAMES = ("awaited, 2 buffers, 128x128x64, 4 warps", "rotated, depth 512", "rotated, depth 16384")


def judge(names: tuple[str, ...]) -> list[Judged]:
    return list(judged(one for one in measured() if one.name in names))


@pytest.fixture(scope="module")
def found(compiler):
    return compiler.run(judge, NAMES)


@pytest.mark.sweep  # compiles
def test_the_page_shows_what_the_clock_says(found):
    rows = [line for line in table(found) if NAMES[0] in line or "rotated" in line]
    assert len(rows) == 3
    for row in rows:
        assert row in PAGE.read_text()


def test_the_page_has_every_figure():
    text = PAGE.read_text()
    shown = re.findall(r"^\| (fitted|kept back) \| (.*?) \| (\d+) \|", text, re.MULTILINE)
    assert shown == [
        ("fitted" if one.fitted else "kept back", one.name, f"{one.tflops:.0f}") for one in measured()
    ]


@pytest.mark.sweep
def test_summary_and_order_are_of_the_errors(found):
    assert summary(found).figures == 3
    assert summary(found).rank == 1.0  # 495 < 540 < 670
    assert abs(summary(found).worst) == max(abs(100 * one.error) for one in found)
    assert pairs_in_order(found) == (3, 3)
    assert pairs_in_order([found[0], *reversed(found[1:])]) == (3, 3)
