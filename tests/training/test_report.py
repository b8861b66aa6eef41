"""The page about a run: complete, escaped, and true to its numbers."""

import re
import sys

import pytest

from tpkernels import plan_groups
from tpkernels.pictures.figure import NO_MATPLOTLIB
from tpkernels.training.report import Proof, write_report
from tpkernels.training.trainer import StepReport

PROOF = Proof(["2 ranks", "sequential", "unsharded"], [[4.0, 2.0], [4.0, 2.0], [4.0, 2.0000002]], 1e-4)


def written(path, *losses, title="run", **more):
    reports = [StepReport(step, loss, 1.0, 1e-3, 0.5, 64) for step, loss in enumerate(losses, start=1)]
    plan = plan_groups(world_size=4, tensor=2)
    return write_report(path, title, reports, plan=plan, unit="rank", **more), path.read_text("utf-8")


def test_page_stands_by_itself_and_escapes(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    path = tmp_path / "new" / "index.html"
    said, html = written(path, 4.0, 2.0, title="<run>", known=[("data", "a & b")], sample="<x>")
    assert said == str(path.with_name("loss.png"))
    assert path.with_name("loss.png").is_file()
    assert "&lt;run&gt;" in html
    assert "a &amp; b" in html
    assert "<pre>&lt;x&gt;</pre>" in html
    assert "4.0000 at step 1, 2.0000 at step 2" in html
    assert "128 tokens/s" in html
    assert "unsharded" not in html  # there was no proof
    assert not re.search(r'(src|href)="[^#]', html)
    assert html.count("<svg") == 2  # losses and groups


def test_without_matplotlib_there_is_a_page_with_the_proof_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said, html = written(tmp_path / "index.html", *range(40, 0, -1), proof=PROOF)
    assert said == NO_MATPLOTLIB
    assert [file.name for file in tmp_path.iterdir()] == ["index.html"]
    assert NO_MATPLOTLIB in html
    assert '<th>40</th><td class="number">1.0000</td>' in html
    assert html.count("<svg") == 1  # the groups, which need nothing
    (row,) = re.findall(r'<th>2</th>((?:<td class="number">[^<]*</td>){4})', html)
    assert re.findall(">([^<]+)<", row) == ["2.0000000", "2.0000000", "2.0000002", "1.0e-07"]
    assert "Largest difference 1.0e-07 of the loss; allowed 1e-04." in html


@pytest.mark.parametrize(
    ("losses", "holds"),
    [([2.0, 2.0], True), ([2.0, 2.001], False), ([2.0, float("nan")], False), ([2.001, 2.0], False)],
)
def test_proof_fails_where_one_step_of_one_layout_differs(losses, holds):
    for others in ([[2.0, 2.0], losses], [losses, [2.0, 2.0]]):
        assert Proof(["a", "b", "c"], [[2.0, 2.0], *others], 1e-4).holds is holds
