"""Every kind of picture: what it says, and that nothing of it is cut, lost or malformed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.pictures.reading import hinted, outside, shapes, words
from tests.pictures.samples import CALLS, NAN, SAMPLES, STEP, hopper, ratios
from tpkernels.pictures.bars import FILLS, LOSS, WIN, Bar, bars
from tpkernels.pictures.curve import HEIGHT, WIDTH, curve
from tpkernels.pictures.lanes import LANE, lanes
from tpkernels.pictures.roofline import Work
from tpkernels.pictures.scales import labels, log_ticks, round_ticks
from tpkernels.pictures.svg import Picture, shortened, width_of

PHASES = ["forward", "backward", "optimizer"]
each_picture = pytest.mark.parametrize("name", SAMPLES)


def corners(svg):
    (line,) = shapes(svg, "polyline")
    return [tuple(map(float, point.split(","))) for point in line.get("points").split()]


@each_picture
def test_picture_is_whole(name):
    svg = SAMPLES[name]
    ElementTree.fromstring(svg)  # well-formed, whatever it was told to write
    assert outside(svg) == []
    assert "nan" not in svg
    assert "inf" not in svg.replace(">inf<", "")


@each_picture
def test_words_do_not_lie_on_each_other(name):
    boxes = []
    for text in shapes(SAMPLES[name], "text"):
        size = float(text.get("font-size"))
        width = 0.85 * width_of(text.text, size)
        left = float(text.get("x")) - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        base = float(text.get("y"))
        for other, (x, y, right, bottom) in boxes:
            apart = left > right or left + width < x or base - 0.7 * size > bottom or base < y
            assert apart, f"{text.text!r} lies on {other!r}"
        boxes.append((text.text, (left, base - 0.7 * size, left + width, base)))


def test_cut_words_and_shapes_are_noticed():
    picture = Picture(100, 50, "sheet")
    picture.text(90, 20, "too far right")
    picture.line(0, 0, 50, 60)
    assert len(outside(picture.to_svg())) == 2


def test_drawing_again_gives_the_same_text():
    program = "from tests.pictures.samples import SAMPLES; print(hash(tuple(SAMPLES.values())))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": "0", "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_curve_goes_from_edge_to_edge_and_down_with_the_value():
    points = corners(curve("Loss", [(1, 4.0), (2, 3.0), (3, 2.5), (4, 2.0)], across="step"))
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # down on the page
    assert heights[1] - heights[0] == pytest.approx(2 * (heights[3] - heights[2]), abs=0.2)
    assert points[0][0] < 0.1 * WIDTH
    assert points[-1][0] > 0.85 * WIDTH
    assert 0 < heights[0] < 0.2 * HEIGHT


def test_curve_says_how_many_values_are_left_out():
    svg = curve("Loss", [(1, 3.0), (2, NAN), (3, 2.0)], across="step")
    assert len(corners(svg)) == 2
    assert "1 of 3 cannot be drawn" in words(svg)
    assert "2 of 2 cannot be drawn" in words(SAMPLES["curve_of_nothing"])


def test_long_curve_keeps_its_highest_and_lowest_values():
    values = [(float(step), 1.0) for step in range(50_000)]
    values[777], values[40_000] = (777.0, 9.0), (40_000.0, -9.0)
    points = corners(curve("Loss", values, across="step"))
    assert len(points) < 2500
    assert points == sorted(points, key=lambda point: point[0])
    assert {min(y for _, y in points), max(y for _, y in points)} < {y for _, y in points}
    assert max(y for _, y in points) - min(y for _, y in points) > 0.5 * HEIGHT


def test_spans_lie_on_one_scale_and_in_lanes():
    svg = SAMPLES["lanes_of_panels"]
    boxes = {hint: (float(b.get("x")), float(b.get("width"))) for hint, b in hinted(svg, "rect").items()}
    assert set(boxes) == {
        "own rows: 300 ms",
        "piece 1: 100 ms",
        "piece <2>: 10 ms",
        "all rows: 350 ms",
        "all rows: 200 ms",
    }
    assert boxes["all rows: 350 ms"][1] == pytest.approx(3.5 * boxes["piece 1: 100 ms"][1], abs=4)
    assert boxes["all rows: 200 ms"][0] == pytest.approx(boxes["own rows: 300 ms"][0], abs=0.1)
    assert {"Calls", "at once: 400 ms", "half as long: 200 ms", "rank 1 computes", "own rows"} <= set(
        words(svg)
    )


def test_phases_have_colours_that_a_legend_explains():
    svg = lanes("One step", {"step 3": STEP})
    assert [word for word in words(svg) if word in PHASES] == PHASES  # and not again on each block
    blocks = [box for box in shapes(svg, "rect") if float(box.get("height")) == LANE]
    assert len(blocks) == len(STEP)
    assert len({block.get("fill") for block in blocks}) == 4
    assert set(hinted(svg, "rect")) == {f"{name}: 100 ms" for name in (*PHASES, "transfers")}
    assert "forward" not in words(lanes("Calls", {"at once": CALLS}))


def test_wins_and_losses_go_either_way_from_one_and_twice_is_as_long_as_half():
    rows = [Bar("win", 2.0, 1.9, 2.1), Bar("loss", 0.5, 0.45, 0.55), Bar("even", 1.1, 0.9, 1.2)]
    svg = bars("Ratios", rows)
    by_name = {hint.partition(":")[0]: box for hint, box in hinted(svg, "rect").items()}
    fills = [by_name[name].get("fill") for name in ("win", "loss", "even")]
    assert fills == list(FILLS.values())
    win, loss = ((float(by_name[n].get("x")), float(by_name[n].get("width"))) for n in ("win", "loss"))
    assert win[0] == pytest.approx(loss[0] + loss[1], abs=0.2)
    assert win[1] == pytest.approx(loss[1], abs=0.2)
    assert {"1 faster", "1 slower", "1 within the spread", "2.00", "0.50", "1.10"} <= set(words(svg))


def test_a_ratio_that_is_no_number_is_written_and_not_drawn():
    svg = SAMPLES["bars_of_no_numbers"]
    assert hinted(svg, "rect") == {}
    assert {"no number", "inf", "0", "-2", "0 faster"} <= set(words(svg))


@pytest.mark.parametrize(
    ("bar", "verdict"), [(Bar("", 1.5), WIN), (Bar("", 0.9, NAN, None), LOSS), (Bar("", 1.2, 1.3, 1.4), WIN)]
)
def test_verdict_of_a_spread_that_is_not_known_is_the_ratios(bar, verdict):
    assert bar.verdict == verdict


def test_every_row_has_a_name_of_its_own_however_long():
    svg = bars("Ratios", ratios(40))
    names = [text for text in words(svg) if text.startswith("llama3-70b")]
    assert len(set(names)) == 40


def test_work_lies_below_the_roof_and_its_ridge_where_both_meet():
    at_ridge = Work("best", "ours", 989e12, 3.35e12, 1.0)
    half = Work("half", "ours", 989e12, 3.35e12, 2.0)
    svg = hopper("H100", [at_ridge, half])
    by_name = {hint.partition(",")[0]: dot for hint, dot in hinted(svg, "circle").items()}
    _, ridge, _ = corners(svg)
    best = float(by_name["best"].get("cx")), float(by_name["best"].get("cy"))
    assert best == pytest.approx(ridge, abs=0.2)
    assert float(by_name["half"].get("cy")) > best[1]
    assert any("50% of the roof" in hint for hint in hinted(svg, "circle"))


def test_work_that_cannot_be_drawn_is_counted():
    assert "3 of 4 cannot be drawn" in words(SAMPLES["roofline_odd"])


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.2), (0.2, 8.0), (1e-7, 1e7), (3.0, 3.1), (1.0, 1.0)])
def test_logarithmic_ticks_are_few_and_hold_one(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)
    assert (1.0 in ticks) == (low <= 1 <= high)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.0, 2.0), (0.0, 0.0), (-3e5, 4e9), (1e8, 1e8 + 1)])
def test_round_ticks_enclose_and_differ(low, high):
    ticks = round_ticks(low, high)
    assert ticks[0] <= low <= high <= ticks[-1]
    assert 2 <= len(ticks) <= 9
    assert len(set(labels(ticks))) == len(ticks)


def test_shortened_words_keep_both_ends_and_fit():
    assert shortened("short", 12, 100) == "short"
    cut = shortened("llama3-70b-tp8-8192-fc_down", 12, 120)
    assert cut.startswith("llama")
    assert cut.endswith("down")
    assert width_of(cut, 12) <= 120


def test_control_characters_are_replaced():
    picture = Picture(100, 20, "\x00")
    picture.text(0, 10, "a\x1bb")
    assert words(picture.to_svg()) == ["a\ufffdb"]
    assert shapes(picture.to_svg(), "title")[0].text == "\ufffd"
