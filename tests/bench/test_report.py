"""`python -m bench report`: every result is on the page, in a picture, and nothing that was not measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.recorded import Unreadable, read
from bench.report import main
from tests.bench.synthetic import results, written
from tests.pictures.reading import hinted, words
from tpkernels.pictures.figure import NO_MATPLOTLIB

pytest.importorskip("matplotlib", reason="matplotlib draws pictures")


@pytest.fixture
def told(tmp_path, capsys):
    """Runs the command; returns what it printed, and the page."""

    def run(*arguments):
        target = tmp_path / "page" / "report.html"
        assert main([*map(str, arguments), "-o", str(target)]) == 0
        return capsys.readouterr().out, target.read_text(encoding="utf-8")

    return run


def svgs_of(html):
    found = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    for svg in found:
        ElementTree.fromstring(svg)
    return found


def headings(html):
    return re.findall(r"<h2>(.*?)</h2>", html)


def test_page_of_a_run_has_every_case_and_stands_by_itself(told, tmp_path):
    found = results()
    said, html = told(written(tmp_path, "run", found))
    assert not re.search(r'src=|href="[^#]|@import|url\([^#]', html)
    assert headings(html) == [
        "Failed",
        "Against the naive way",
        "Roofline",
        "What a call costs on the host",
        "All cases",
    ]
    svgs = svgs_of(html)
    bars = {hint.partition(":")[0] for svg in svgs for hint in hinted(svg)}
    for one in (case["extra_info"] for case in found["benchmarks"]):
        name = f"{one['shape']} {one['pass']}"
        assert name in bars or f"{one['op']} {name}" in bars
        assert html.count(f"<th>{one['op']} {name}</th>") == 1
    assert "test_y[&lt;z&gt;]\nE  off by 1 &amp; 2" in html
    for fact in ("NVIDIA H100 80GB HBM3", "2.11.0", "A Processor", "2026-01-02T03:04:05", "0123456789ab"):
        assert fact in html
    assert re.match(r"73 cases: \d+ faster, \d+ slower, \d+ within the spread; 1 failed\npage ", said)


def test_two_runs_are_compared_by_their_spreads(told, tmp_path):
    before, after = results(), results()
    cases = after["benchmarks"]
    for number, factor in ((0, 1.5), (1, 0.5), (2, 1.04)):  # of a spread of 0.98 to 1.03 in both
        for key in ("ratio", "ratio_quartile_low", "ratio_quartile_high"):
            cases[number]["extra_info"][key] *= factor
    cases[3]["extra_info"]["ratio_quartile_low"] = None
    del cases[4], before["benchmarks"][5:7]
    after["benchmarks"][-1]["extra_info"]["device"] = "cpu"
    old, new = written(tmp_path, "old", before), written(tmp_path, "new", after)
    _, html = told(old, new)
    assert "2 of 69 ratios changed by more than the spreads of both runs. 1 lack a ratio" in html
    assert f"Only in {old}: 1. Only in {new}: 2. The runs differ in device" in html
    changes = svgs_of(html)[0]
    ratios = [float(re.search(r": ([\d.]+),", hint)[1]) for hint in hinted(changes)]
    assert ratios == pytest.approx([0.5, 1.5])
    assert "1 faster" in words(changes)


@pytest.mark.parametrize(
    "benchmarks",
    [
        [],
        [{}],
        [{"fullname": "a", "extra_info": None}],
        [{"name": "a", "extra_info": {"ratio": "fast", "versions": 3, "ratio_to_x": []}}],
        [{"fullname": "a::test_b[c]", "extra_info": {"ratio": float("nan"), "ours_ms": float("inf")}}],
        [{"fullname": "a", "extra_info": {"ratio": 1.5}}, {"fullname": "a", "extra_info": {"ratio": 0}}],
        [{"fullname": "a", "extra_info": {"op": "<&>", "shape": "\x00" * 300, "ratio": 8, "new": {}}}],
        [{"fullname": "a", "extra_info": {"ratio": 10**400, "ours_ms": 1e308, "flops": -1}}],
        [{"fullname": "test_host_cost[f]", "extra_info": {"ratio": 0.5, "least_ratio": -1}}],
    ],
)
def test_missing_and_strange_values_are_no_mistake(benchmarks, told, tmp_path):
    path = written(tmp_path, "run", {"benchmarks": benchmarks, "machine_info": [], "outcomes": 7})
    _, html = told(path, path)
    svgs_of(html)
    assert "All cases" in headings(html)
    assert "<&>" not in html


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON, got"),
        ("[" * 100_000, "expected JSON, got it is nested too deeply"),
        ("[]", "expected the JSON of benchmarks"),
        ('{"benchmarks": 3}', "expected the JSON of benchmarks"),
        ('[{"a": 1}]', "expected the JSON of benchmarks"),
        ('{"traceEvents": [{"ph": "X", "name": "python"}]}', "expected a trace with threads such as"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(Unreadable, match=message):
        read(path)
    with pytest.raises(SystemExit) as ended:
        main([str(path), "-o", str(tmp_path / "report.html")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_absent_files_and_too_many_runs_are_refused(tmp_path, capsys):
    path = written(tmp_path, "run", {"benchmarks": []})
    for arguments, message in (
        ([tmp_path / "absent.json"], "cannot read"),
        ([path, path, path], "expected the results of one run, or of two to compare, got 3"),
        ([path, "-o", path / "below" / "a.html"], "cannot write"),
    ):
        with pytest.raises(SystemExit):
            main(["-o", str(tmp_path / "report.html"), *map(str, arguments)])
        assert message in capsys.readouterr().err


def test_without_matplotlib_there_is_a_page_all_the_same(told, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said, html = told(written(tmp_path, "run", results()), "--png", tmp_path / "png")
    assert f"pictures  {NO_MATPLOTLIB}" in said
    assert "no pictures: expected matplotlib" in html
    assert html.count("<table>") == 3  # the environment, costs on the host, all cases
    assert not svgs_of(html)
    assert not (tmp_path / "png").exists()
