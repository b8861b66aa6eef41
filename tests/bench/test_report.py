"""`python -m bench report`: every result is on the page, in a picture, and nothing that was not measured."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from bench.__main__ import main
from bench.results import NEEDED, BadFile, read
from tests.pictures.reading import hinted

pytest.importorskip("matplotlib", reason="matplotlib draws pictures")


@pytest.fixture
def told(tmp_path, capsys):
    """Runs the command; returns what it printed, and the page."""

    def run(*arguments):
        target = tmp_path / "page" / "report.html"
        assert main(["report", *map(str, arguments), "-o", str(target)]) == 0
        return capsys.readouterr().out, target.read_text(encoding="utf-8")

    return run


def svgs_of(html):
    found = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    for svg in found:
        ElementTree.fromstring(svg)
    return found


def headings(html):
    return re.findall(r"<h2>(.*?)</h2>", html)


def case(shape, ratio, **more):
    info = {key: 1.0 for key in NEEDED} | {"op": "linear", "shape": shape, "pass": "forward", "device": "cpu"}
    info |= {"ratio": ratio, "ratio_quartile_low": 0.98 * ratio, "ratio_quartile_high": 1.03 * ratio}
    name = f"bench/test_linear.py::test_linear[{shape}]"
    return {"fullname": name, "extra_info": info | {"versions": {"torch": "2"}} | more}


def written(folder, name, benchmarks, **more):
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"benchmarks": benchmarks} | more))
    return path


def test_page_has_every_case_and_stands_by_itself(told, tmp_path):
    shapes = [f"4096x{width}" for width in range(50)]
    failed = {"failures": {"bench/test_x.py::test_y[<z>]": "E  off by 1 & 2"}}
    said, html = told(written(tmp_path, "run", [case(shape, 1.2) for shape in shapes], outcomes=failed))
    assert said.startswith("50 cases: 50 faster, 0 slower, 0 within the spread; 1 failed\npage ")
    assert headings(html) == ["Failed", "Against the naive way", "All cases"]
    assert "test_y[&lt;z&gt;]\nE  off by 1 &amp; 2" in html
    assert not re.search(r'src=|href="[^#]|@import|url\([^#]', html)
    assert len(svgs_of(html)) == 2, "at most 40 bars to a picture"
    bars = {hint.partition(":")[0] for svg in svgs_of(html) for hint in hinted(svg)}
    assert bars == {f"{shape} forward" for shape in shapes}
    assert all(html.count(f"<th>linear {shape} forward</th>") == 1 for shape in shapes)


EXPECTED = "expected results of benchmarks"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON, got"),
        ("[" * 100_000, "expected JSON, got it is nested too deeply"),
        ("[]", EXPECTED),
        ('{"benchmarks": 3}', EXPECTED),
        (
            '{"benchmarks": [{"fullname": "a", "extra_info": {"ratio": 1.5}}]}',
            EXPECTED,
        ),
        (json.dumps({"benchmarks": [case("a", float("nan"))]}), EXPECTED),
        (json.dumps({"benchmarks": [case("a", 1.0, ratio_quartile_low="fast")]}), EXPECTED),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_text(content)
    with pytest.raises(BadFile, match=message):
        read(path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path), "-o", str(tmp_path / "report.html")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
