"""The workflow that others may copy: it is one, and what it calls is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tpkernels.cli import COMMANDS

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "docs" / "ci-workflow.yml"
LINES = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in WORKFLOW.read_text().splitlines()]
LINES = [line for line in LINES if line]
STEP = re.compile(r"^ *(?:- )?(run|uses): (.+)$")
STEPS = [found.groups() for line in LINES if (found := STEP.match(line))]


def test_lines_are_keys_or_items_two_spaces_deeper_than_what_they_belong_to():
    depths = [0]
    for line in LINES:
        indent = len(line) - len(line.lstrip())
        assert re.match(r"^ *(- )?([\w-]+:( .+)?|[^:]+)$", line) or "://" in line or "run: " in line, line
        assert indent % 2 == 0
        assert "\t" not in line
        assert indent <= depths[-1] + 2, line
        depths.append(indent + 2 * line.lstrip().startswith("- "))


def test_it_is_yaml_with_two_jobs():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert set(workflow[True]) == {"push", "schedule", "workflow_dispatch"}, "`on` is true in YAML 1.1"
    assert list(workflow["jobs"]) == ["without-gpu", "on-a-gpu"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 20
        assert all(set(step) & {"run", "uses"} for step in job["steps"])
    assert "self-hosted" in workflow["jobs"]["on-a-gpu"]["runs-on"]


def test_actions_are_of_a_version():
    actions = [what for how, what in STEPS if how == "uses"]
    assert len(actions) >= 4
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in actions), actions


def test_commands_exist():
    targets = re.findall(r"^([a-z0-9.-]+):.*?## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [shlex.split(what) for how, what in STEPS if how == "run"]
    called = {tuple(command[:4]) for command in commands}
    assert ("python", "-m", "tpkernels", "check") in called
    assert ("make", "gpu", "PYTHON=python3") in called
    for command in commands:
        match command:
            case ["python", "-m", "tpkernels", name, *_]:
                assert name in COMMANDS
            case ["make", target, *_]:
                assert target in targets
            case _:
                assert command[:2] == ["pip", "install"]
