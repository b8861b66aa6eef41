"""The page about a run: complete, well-formed, and true to its numbers."""

import re
from xml.etree import ElementTree

import pytest

from tpkernels import plan_groups
from tpkernels.training.report import LEFT, RIGHT, WIDTH, facts_of, loss_curve, page
from tpkernels.training.trainer import StepReport


def reports_of(*losses):
    return [StepReport(step, loss, 1.0, 1e-3, 0.5, 64) for step, loss in enumerate(losses, start=1)]


def points_of(svg):
    (line,) = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in line.split()]


def test_curve_goes_from_edge_to_edge_and_down_with_the_loss():
    svg = loss_curve(reports_of(4.0, 3.0, 2.5, 2.0))
    ElementTree.fromstring(svg)
    points = points_of(svg)
    assert points[0][0] == LEFT
    assert points[-1][0] == WIDTH - RIGHT
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # down on the page
    assert heights[1] - heights[0] == pytest.approx(2 * (heights[3] - heights[2]), abs=0.2)


@pytest.mark.parametrize("losses", [(3.0,), (2.0, 2.0), (1e-9, 0.0), (5e8, 1.0)])
def test_any_losses_make_a_curve(losses):
    svg = loss_curve(reports_of(*losses))
    ElementTree.fromstring(svg)
    assert len(points_of(svg)) == len(losses)
    assert svg.count('text-anchor="end"') < 12


def test_losses_that_are_no_numbers_are_left_out():
    assert len(points_of(loss_curve(reports_of(3.0, float("nan"), 2.0)))) == 2
    assert "No loss" in loss_curve(reports_of(float("inf")))


def test_page_stands_by_itself_and_escapes():
    reports = reports_of(4.0, 2.0)
    html = page(
        "<run>", [("data", "a & b"), *facts_of(reports)], reports, plan_groups(world_size=4, tensor=2), "<x>"
    )
    assert "&lt;run&gt;" in html
    assert "a &amp; b" in html
    assert "<pre>&lt;x&gt;</pre>" in html
    assert "4.0000 at step 1, 2.0000 at step 2" in html
    assert "128 tokens/s" in html
    assert not re.search(r'(src|href)="', html.replace('xmlns:xlink="', ""))
    assert html.count("<svg") == 2
