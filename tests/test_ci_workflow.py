"""The workflows that others copy: each takes nothing from this repository but the package."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tpkernels.cli import COMMANDS, main
from tpkernels.gate.user_kernels.init import workflow as workflow_of

yaml = pytest.importorskip("yaml")
requirements = pytest.importorskip("packaging.requirements")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DOCS.glob("ci-workflow*.yml"))}
JOBS = [
    pytest.param(workflow, job, id=f"{name}-{label}")
    for name, workflow in WORKFLOWS.items()
    for label, job in workflow["jobs"].items()
]
WRITTEN = yaml.safe_load(workflow_of(ROOT / "docs"))  # by `check --init`
JOBS += [pytest.param(WRITTEN, job, id=f"init-{label}") for label, job in WRITTEN["jobs"].items()]
EVERY_JOB = pytest.mark.parametrize(("workflow", "job"), JOBS)
PYTHONS = ("python", "venv/bin/python")


def commands(job: dict[str, Any]) -> list[list[str]]:
    return [shlex.split(step["run"], comments=True) for step in job["steps"] if "run" in step]


def modules(job: dict[str, Any]) -> list[list[str]]:
    """What follows `python -m`."""
    return [command[2:] for command in commands(job) if command[0] in PYTHONS and command[1] == "-m"]


def installs(job: dict[str, Any]) -> list[list[str]]:
    return [words[2:] for words in modules(job) if words[:2] == ["pip", "install"]]


def wanted(words: list[str]) -> list[str]:
    """What an installation asks for, without its options."""
    ours = iter(words)
    found = []
    for word in ours:
        if word == "--index-url":
            next(ours)
        elif not word.startswith("-"):
            found.append(word)
    return found


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_is_named_by_the_pages_and_says_where_to_copy_it(name):
    assert f"({name})" in (DOCS / "ci.md").read_text()
    assert "(docs/ci.md" in (ROOT / "README.md").read_text()
    assert "copy it to .github/workflows/" in (DOCS / name).read_text().split("\nname:")[0]
    assert set(WORKFLOWS[name]) == {"name", True, "env", "jobs"}, "`on` is true in YAML 1.1"


@EVERY_JOB
def test_a_job_can_be_copied(workflow, job):
    """It installs the library before it calls it, and needs nothing but a checkout of its user's own."""
    assert workflow["env"]["LIBRARY"].startswith("tpkernels @ git+https://")
    assert job["timeout-minutes"] <= 20
    for step in job["steps"]:
        assert len({"run", "uses"} & set(step)) == 1
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
    called = [command for command in commands(job) if command[2:3] == ["tpkernels"]]
    (installing,) = [command for command in commands(job) if "$LIBRARY" in command]
    assert called
    assert all(commands(job).index(installing) < commands(job).index(command) for command in called)
    assert all(command[0] in (*PYTHONS, "python3") for command in commands(job))
    words = {word for command in commands(job) for word in command}
    assert not words & {"make", "-c", "-r", "-e", ".", "constraints.txt"}
    assert not {word for word in words if "." in word and "/" not in word and (ROOT / word).exists()}
    if "self-hosted" not in job["runs-on"]:  # such a runner has a torch for its GPUs
        first, second = installs(job)
        assert wanted(first)[0].startswith("torch==")
        assert first[first.index("--index-url") + 1] == "https://download.pytorch.org/whl/cpu"
        assert "$LIBRARY" in second


def constraints() -> dict[str, str]:
    """The versions of our own CI on a Python that workflows use."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [requirements.Requirement(line.split(" #")[0]) for line in lines if re.match(r"\w", line)]
    python = {"python_version": "3.12"}
    return {
        one.name: str(one.specifier) for one in found if one.marker is None or one.marker.evaluate(python)
    }


@pytest.mark.parametrize(("workflow", "job"), JOBS[: -len(WRITTEN["jobs"])])
def test_pins_are_those_of_our_own_ci(workflow, job):
    pins = [requirements.Requirement(one) for words in installs(job) for one in wanted(words) if "==" in one]
    assert {one.name: str(one.specifier) for one in pins}.items() <= constraints().items()
    if "self-hosted" not in job["runs-on"]:
        assert {one.name for one in pins} == {"torch", "triton", "numpy"}


@cache
def help_of(command: str) -> str:
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    return printed.getvalue()


@EVERY_JOB
def test_commands_and_their_options_exist(workflow, job):
    called = [words[1:] for words in modules(job) if words[0] == "tpkernels"]
    assert called
    for name, *arguments in called:
        assert name in COMMANDS
        for option in (word for word in arguments if word.startswith("-")):
            assert f" {option} " in help_of(name)
    written = {step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")}
    assert written == {words[words.index("--json") + 1] for words in called if "--json" in words}
