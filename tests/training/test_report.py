"""The page about a run: complete, escaped, and true to its numbers."""

import re
import sys

import pytest

from tests.pictures.reading import words
from tpkernels import plan_groups
from tpkernels.pictures.figure import NO_MATPLOTLIB
from tpkernels.pictures.lanes import Span
from tpkernels.training.report import at_once, pictures_of, write
from tpkernels.training.trainer import StepReport

PLAN = plan_groups(world_size=4, tensor=2)
SPANS = [
    Span(rank, doing, "", start, stop, phase)
    for rank in (0, 1)
    for doing, phase, start, stop in (("computes", "forward", 0, 2), ("transfers", "", 1, 3))
]


def reports_of(*losses):
    return [StepReport(step, loss, 1.0, 1e-3, 0.5, 64) for step, loss in enumerate(losses, start=1)]


def test_page_stands_by_itself_and_escapes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    path = tmp_path / "new" / "index.html"
    known = [("data", "a & b")]
    said = write(path, "<run>", reports_of(4.0, 2.0), SPANS, PLAN, known=known, sample="<x>")
    assert said == ", ".join(str(path.with_name(f"{name}.png")) for name in ("loss", "timeline", "plan"))
    assert all(path.with_name(f"{name}.png").is_file() for name in ("loss", "timeline", "plan"))
    html = path.read_text(encoding="utf-8")
    assert "&lt;run&gt;" in html
    assert "a &amp; b" in html
    assert "<pre>&lt;x&gt;</pre>" in html
    assert "4.0000 at step 1, 2.0000 at step 2" in html
    assert "128 tokens/s" in html
    assert not re.search(r'(src|href)="[^#]', html)
    assert html.count("<svg") == 3
    assert NO_MATPLOTLIB not in html


def test_without_matplotlib_there_is_a_page_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = write(tmp_path / "index.html", "run", reports_of(*range(40, 0, -1)), SPANS, PLAN)
    assert said == NO_MATPLOTLIB
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "no pictures: expected matplotlib" in html
    assert re.findall(r"<th>(\d+)</th>", html) == [str(step) for step in range(4, 41, 4)]
    assert '<th>40</th><td class="number">1.0000</td>' in html
    assert "ranks computed during 50% of" in html
    assert html.count("<svg") == 1  # the groups, which need nothing


def test_curve_says_where_it_begins_and_ends():
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    svg = pictures_of(reports_of(3.0, 2.5, float("nan")), [], PLAN)["loss"].svg
    assert "Loss: 3.000 at step 1, nan at step 3" in words(svg)
    assert "1 of 3 cannot be drawn" in words(svg)


def test_time_line_says_which_ranks_it_shows():
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    svg = pictures_of(reports_of(3.0, 2.0), SPANS, PLAN)["timeline"].svg
    assert "Step 2: what was computed, and what was in flight, on 2 of 4 ranks" in words(svg)
    assert "rank 1 transfers" in words(svg)
    assert "timeline" not in pictures_of(reports_of(3.0), [], PLAN)


@pytest.mark.parametrize(
    ("spans", "said"),
    [(SPANS, "ranks computed during 50% of"), (SPANS[::2], "nothing was in flight"), ([], "no")],
)
def test_share_that_is_hidden_is_of_the_time_in_flight(spans, said):
    assert at_once(spans).startswith(said)
