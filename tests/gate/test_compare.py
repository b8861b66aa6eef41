"""Two Tritons or two revisions: what is told, in which words, and what cannot be had."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.gate.test_causes import PRODUCT, ROWS
from tpkernels.gate import compare, render
from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.compare import FactsOrError, OriginFacts
from tpkernels.gate.user_kernels.config import read
from tpkernels.gate.user_kernels.record import ConfigError

ROOT = Path(__file__).parents[2]
WORSE = "a pipeline of 4 is one of 2"


def found(label: str, version: str, **kernels: Facts | str) -> OriginFacts:
    return OriginFacts(
        label,
        version,
        {(name, "sm_90"): FactsOrError(facts, ("kernels.py", 7)) for name, facts in kernels.items()},
    )


@pytest.fixture
def page(monkeypatch):
    """What is told of these two sides, whichever is compiled first."""
    sides = [
        found(
            "Triton 3.9.0",
            "3.9.0",
            product=replace(PRODUCT, pipeline=(2, 2)),
            rows=ROWS,
            new=ROWS,
            broken="no",
        ),
        found("Triton 3.7.1", "3.7.1", product=PRODUCT, rows=ROWS, gone=ROWS, broken=ROWS),
    ]
    monkeypatch.setattr(compare, "_compiled", lambda *_: sides.pop(0))
    wanted = compare.Wanted(None, "", ["sm_90"], "", 1)
    return lambda fails="worse": compare.compare(str(folder_of_triton()), wanted, fails, print)


def folder_of_triton() -> Path:
    import triton

    return Path(triton.__file__).parents[1]


def test_an_upgrade_is_told_from_the_older_to_the_newer(page):
    told = page()
    assert told.title == "Triton 3.7.1 -> Triton 3.9.0"
    assert {row.name: [one.text for one in row.changes] for row in told.rows} == {
        "product on sm_90": [WORSE],
        "rows on sm_90": [],
        "gone on sm_90": ["only with Triton 3.7.1"],
        "broken on sm_90": ["does not compile: no"],
        "new on sm_90": ["only since Triton 3.9.0"],
    }
    assert told.summary == "5 kernels: 1 severe, 1 worse, 2 note; 2 fail"
    cells = dict(zip(told.headings, told.rows[0].cells, strict=True))
    assert (cells["copied ahead"], cells["registers"], cells["loop"]) == ("4+4 -> 2+2", "168", "100")


@pytest.mark.parametrize(
    ("fails", "failing"),
    [
        ("severe", {"broken"}),
        ("worse", {"broken", "product"}),
        ("note", {"broken", "product", "gone", "new"}),
    ],
)
def test_the_config_names_what_fails(page, fails, failing):
    assert {row.name.split()[0] for row in page(fails).rows if row.fails} == failing


def test_text_and_markdown_have_a_table_of_what_changed(page):
    told = page()
    lines = render.text(told).splitlines()
    assert f"FAIL product on sm_90: worse: {WORSE}" in lines
    assert [line.split()[0] for line in lines[3:7]] == ["product", "broken", "gone", "new"]
    table = [line.split(" | ") for line in render.markdown(told).splitlines() if line.startswith("| ")]
    assert len({len(line) for line in table}) == 1
    assert table[1][-1] == f"{WORSE} |"


def test_json_and_junit_are_read_again(page):
    told = page()
    assert json.loads(render.as_json(told))["rows"][0]["changes"][0]["text"] == WORSE
    suite = ElementTree.fromstring(render.junit(told))
    assert (suite.get("tests"), suite.get("failures")) == ("5", "2")
    assert [case.get("name").split()[0] for case in suite if case.find("failure") is not None] == [
        "product",
        "broken",
    ]


def test_annotations_name_the_line_of_a_kernel(page):
    first, *_ = render.github(page()).splitlines()
    assert first == f"::error file=kernels.py,line=7,title=product on sm_90%3A worse::{WORSE}"


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))
"""
TABLE = """
[kernels.copy]
kernel = "mine:copy"
signature = { x_ptr = "*fp32", y_ptr = "*fp32" }
constants = { BLOCK = 1024 }
"""


@pytest.fixture
def repository(tmp_path):
    """With a revision of a kernel, and the kernel that another one replaced in the checkout."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "gate.toml").write_text(TABLE)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "mine.py").write_text(KERNEL.replace("tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) + 1"))
    return tmp_path


def checked(folder, *words, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tpkernels", "check", "--config", "gate.toml", *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
    )


def test_a_revision_is_compared_with_the_checkout(repository):
    """A planted fault: an offset of one element takes the width of loads and stores away."""
    ran = checked(repository, "--compare", "HEAD", "--format", "github")
    assert ran.returncode == 1, ran.stderr
    told = "::error file=mine.py,line=6,title=copy on sm_90%3A worse::a store is narrower: "
    assert told in ran.stdout
    (repository / "gate.toml").write_text(f'[compare]\nfails = "severe"\n{TABLE}')
    assert checked(repository, "--compare", "HEAD").returncode == 0


REFUSED = {
    "no_revision": (["--compare", "nowhere"], "--compare: no 'nowhere': git rev-parse"),
    "no_config": (["--compare", "HEAD", "--config", "new.toml"], "HEAD has no new.toml"),
    "no_such_triton": (["--compare", "triton==0.0.0"], "cannot install triton==0.0.0: ERROR: "),
    "formats_alone": (["--format", "junit"], "--format is about --compare"),
    "budgets": (["--compare", "HEAD", "--update"], "--compare looks at no budgets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line(repository, case):
    words, told = REFUSED[case]
    (repository / "new.toml").write_text(TABLE)
    ran = checked(repository, *words, PIP_NO_INDEX="1", TPKERNELS_CACHE_DIR=str(repository / "cache"))
    assert ran.returncode == 2
    assert told in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_unknown_severity_is_refused_by_key(tmp_path):
    (tmp_path / "gate.toml").write_text(f'{TABLE}\n[compare]\nfails = "loud"\n')
    with pytest.raises(ConfigError, match=r"gate\.toml: compare: expected fails = one of"):
        read(tmp_path / "gate.toml")


def test_a_triton_is_installed_once(monkeypatch, tmp_path):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    asked = []

    def pip(command, **_):
        asked.append(command[-1])
        (Path(command[-2]) / "triton").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    folders = {compare._installed("triton==3.9.0") for _ in range(2)}
    assert folders == {tmp_path / "tritons" / "triton==3.9.0"}
    assert asked == ["triton==3.9.0"]
