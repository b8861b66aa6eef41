"""`python -m bench report`: every result is on the page, in a picture, and nothing that was not measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.recorded import Case, Unreadable, read
from bench.report import main
from bench.timeline import chrome_trace
from tests.bench.synthetic import overlaps, results, written
from tests.pictures.reading import hinted, words
from tests.pictures.samples import CALLS, LATER
from tpkernels.pictures.figure import NO_MATPLOTLIB

pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
ROOT = Path(__file__).parents[2]


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


def test_every_picture_and_table_has_a_caption(told, tmp_path):
    trace = written(tmp_path, "column", chrome_trace({"at once": CALLS}))
    before, after = written(tmp_path, "before", results()), results()
    after["benchmarks"][0]["extra_info"] |= {
        "ratio": 9.0,
        "ratio_quartile_low": 8.9,
        "ratio_quartile_high": 9.1,
    }
    overlap = written(tmp_path, "overlap", overlaps())
    _, html = told(before, written(tmp_path, "after", after), overlap, trace)
    figures = re.findall(r"<figure><svg.*?</svg>\s*<figcaption>(.+?)</figcaption></figure>", html, re.DOTALL)
    assert len(figures) == len(svgs_of(html)) >= 7
    assert html.count("<table>") == html.count("<table><caption>") == 5
    assert "2 of 3. Each bar" in html


def test_times_are_told_in_the_unit_that_suits_them(told, tmp_path):
    found = results()
    found["benchmarks"] = found["benchmarks"][:3]
    for one, ours in zip(found["benchmarks"], (0.01849, 4.5175, 1234.5), strict=True):
        one["extra_info"] |= {"ours_ms": ours, "naive_ms": None}
    _, html = told(written(tmp_path, "run", found))
    cells = re.findall(r">([\d.]+ (?:µs|ms|s))</td>", html)
    assert cells == ["18.5 µs", "4.52 ms", "1.23 s"]


def test_bars_are_at_most_forty_to_a_picture(told, tmp_path):
    _, html = told(written(tmp_path, "run", results()))
    titles = [ElementTree.fromstring(svg)[0].text for svg in svgs_of(html)]
    assert titles == ["linear, 1 to 40 of 72", "linear, 41 to 72 of 72", "Other ops", "NVIDIA H100 80GB HBM3"]


def test_roofline_has_ours_and_naive_of_each_case_that_has_one(told, tmp_path):
    _, html = told(written(tmp_path, "run", results()))
    roof = svgs_of(html)[-1]
    assert len(hinted(roof)) == 2 * 72
    assert "roof: 989 Tflop/s, 3.35 TB/s" in words(roof)
    found = results()
    for case in found["benchmarks"]:
        case["extra_info"]["dtype"] = "float32"  # which the roof is not of
    assert "Roofline" not in headings(told(written(tmp_path, "other", found))[1])


def test_host_cost_is_told_as_times_naives(told, tmp_path):
    found = results()
    found["benchmarks"] = found["benchmarks"][-1:]
    found["benchmarks"][0]["extra_info"] |= {
        "ratio": 0.5,
        "ratio_quartile_low": 0.4,
        "ratio_quartile_high": 0.8,
    }
    page = told(written(tmp_path, "run", found))[1]
    row = re.search(r"<th>4x16x16 forward</th>(.*?)</tr>", page)[1]
    assert re.findall(r">([^<]+)</td>", row) == ["2.00", "1.25 to 2.50", "2.50"]
    assert "not kept" not in page
    found["benchmarks"][0]["extra_info"]["least_ratio"] = 0.51
    broken = told(written(tmp_path, "broken", found))[1]
    assert "1.96, not kept" in broken
    assert "0.510, not kept" in broken


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


def test_runs_that_are_alike_have_nothing_to_show(told, tmp_path):
    found = results()
    found["benchmarks"] = found["benchmarks"][:3]
    path = written(tmp_path, "run", found)
    _, html = told(path, path)
    assert "0 of 3 ratios changed" in html
    assert "The runs differ" not in html
    assert len(svgs_of(html)) == 2  # ratios to naive, and the roofline


def test_overlap_and_time_line_are_shown_with_or_without_a_run(told, tmp_path):
    trace = written(tmp_path, "column", chrome_trace({"at once": CALLS, "in turn": LATER}))
    _, html = told(written(tmp_path, "overlap", overlaps()), trace)
    assert headings(html) == ["Transfers behind products", "Time line"]
    bars, lanes = svgs_of(html)
    assert any(": 1.5, spread" in hint for hint in hinted(bars))
    assert "nothing was timed" in html
    assert {"at once: 400 ms", "in turn: 200 ms", "rank 1 computes"} <= set(words(lanes))
    assert "own rows: 300 ms" in hinted(lanes)


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
    "content",
    [
        [{"link": 3, "shape": [], "milliseconds": 7}, {"link": "l", "error": {}}],
        [{"link": "l", "milliseconds": {"product": 0, "overlapped": 0, "sequential": "s"}}],
        {
            "traceEvents": [
                {"name": "process_name", "pid": [], "args": {"name": None}},
                {"name": "thread_name", "pid": [], "tid": {}, "args": {"name": "rank 7 " + "x" * 300}},
                {"name": "thread_name", "pid": 1, "args": 3},
                {"ph": "X", "pid": [], "tid": {}, "ts": 1e300, "dur": 5, "name": None},
                {"ph": "X", "pid": [], "tid": {}, "ts": "now", "dur": 5},
            ]
        },
    ],
)
def test_strange_overlaps_and_traces_are_no_mistake(content, told, tmp_path):
    svgs_of(told(written(tmp_path, "strange", content))[1])


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


def test_pictures_become_files(told, tmp_path):
    found = [written(tmp_path, "run", results()), written(tmp_path, "overlap", overlaps())]
    said, html = told(*found, "--png", tmp_path / "png")
    names = {path.name for path in (tmp_path / "png").iterdir()}
    assert names == {
        "ratios-linear-1.png",
        "ratios-linear-2.png",
        "ratios-Other_ops.png",
        "roofline-h100.png",
        "overlap-overlap.png",
    }
    assert len(svgs_of(html)) == len(names)
    assert f"pictures  5 in {tmp_path / 'png'}" in said


def test_without_matplotlib_there_is_a_page_all_the_same(told, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said, html = told(written(tmp_path, "run", results()), "--png", tmp_path / "png")
    assert f"pictures  {NO_MATPLOTLIB}" in said
    assert "no pictures: expected matplotlib" in html
    assert html.count("<table>") == 3  # the environment, costs on the host, all cases
    assert not svgs_of(html)
    assert not (tmp_path / "png").exists()


def test_a_case_without_words_is_known_by_its_test():
    case = Case("bench/test_linear.py::test_linear[llama-forward]", {})
    assert (case.op, case.label) == ("test_linear", "llama-forward")
    assert Case("odd", {}).op == Case("odd", {}).label == "odd"
