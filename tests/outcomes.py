"""A pytest plugin that leaves the outcomes of a run as JSON: `-p tests.outcomes --outcomes FILE`."""

import json
from pathlib import Path

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="write the outcomes into FILE, as JSON")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    path = config.getoption("--outcomes")
    if path is None:
        return
    stats = {outcome: terminalreporter.stats.get(outcome, []) for outcome in OUTCOMES}
    report = {
        "exit_code": int(exitstatus),
        "counts": {outcome: len(reports) for outcome, reports in stats.items()},
        "seconds": round(sum(r.duration for r in stats["passed"] + stats["failed"]), 3),
        "failures": {r.nodeid: str(r.longrepr)[-2000:] for r in stats["failed"] + stats["error"]},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
