"""The page about a run: complete, escaped, and true to its numbers."""

import re
import sys

import pytest

from tpkernels import plan_groups
from tpkernels.pictures.charts import TimeSpan
from tpkernels.pictures.figure import NO_MATPLOTLIB
from tpkernels.training.report import Proof, RunRecord, at_once, write_report
from tpkernels.training.trainer import StepReport

PLAN = plan_groups(world_size=4, tensor=2)
SPANS = [
    TimeSpan(rank, doing, "", start, stop, phase)
    for rank in (0, 1)
    for doing, phase, start, stop in (("computes", "forward", 0, 2), ("transfers", "", 1, 3))
]


PROOF = Proof(["2 ranks", "sequential", "unsharded"], [[4.0, 2.0], [4.0, 2.0], [4.0, 2.0000002]], 1e-4)


def page_of(run, folder):
    write_report(folder / "index.html", run)
    return (folder / "index.html").read_text(encoding="utf-8")


def run_of(*losses, title="run", spans=SPANS, on_gpu=False, **more):
    reports = [StepReport(step, loss, 1.0, 1e-3, 0.5, 64) for step, loss in enumerate(losses, start=1)]
    return RunRecord(title=title, reports=reports, spans=spans, plan=PLAN, on_gpu=on_gpu, **more)


def test_page_stands_by_itself_and_escapes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    path = tmp_path / "new" / "index.html"
    said = write_report(path, run_of(4.0, 2.0, title="<run>", known=[("data", "a & b")], sample="<x>"))
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
    said = write_report(tmp_path / "index.html", run_of(*range(40, 0, -1)))
    assert said == NO_MATPLOTLIB
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "no pictures: expected matplotlib" in html
    assert re.findall(r"<th>(\d+)</th>", html) == [str(step) for step in range(4, 41, 4)]
    assert '<th>40</th><td class="number">1.0000</td>' in html
    assert "ranks computed during 50% of" in html
    assert html.count("<svg") == 1  # the groups, which need nothing


def test_proof_is_on_the_page_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = page_of(run_of(4.0, 2.0, proof=PROOF), tmp_path)
    (row,) = re.findall(r'<th>2</th>((?:<td class="number">[^<]*</td>){4})', html)
    assert re.findall(">([^<]+)<", row) == ["2.0000000", "2.0000000", "2.0000002", "1.0e-07"]
    assert "Largest difference 1.0e-07 of the loss; allowed 1e-04." in html
    assert "unsharded" not in page_of(run_of(4.0, 2.0), tmp_path)


@pytest.mark.parametrize(
    ("losses", "holds"),
    [([2.0, 2.0], True), ([2.0, 2.001], False), ([2.0, float("nan")], False), ([2.001, 2.0], False)],
)
def test_proof_fails_where_one_step_of_one_layout_differs(losses, holds):
    for others in ([[2.0, 2.0], losses], [losses, [2.0, 2.0]]):
        assert Proof(["a", "b", "c"], [[2.0, 2.0], *others], 1e-4).holds is holds


@pytest.mark.parametrize(
    ("spans", "said"),
    [(SPANS, "ranks computed during 50% of"), (SPANS[::2], "nothing was in flight"), ([], "no")],
)
def test_share_that_is_hidden_is_of_the_time_in_flight(spans, said):
    assert at_once(spans).startswith(said)
