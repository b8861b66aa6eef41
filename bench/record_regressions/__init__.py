"""`python -m bench record_regressions`: is each kernel told that became slower, and none that did not?

Facts of each side lie in facts.json, as the side's Triton compiled it. `--record` makes those of the
installed Triton anew; others may be installed for it in folders of their own:

    pip install --target FOLDER --no-deps triton==3.6.0
    PYTHONPATH=FOLDER python -m bench record_regressions --record
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.record_regressions.pairs import PAIRS, Pair
from tpkernels.cli import Progress, write_json, written_to
from tpkernels.gate.ahead_of_time import CompileJob, Facts, compile_all
from tpkernels.gate.causes import Change, at_least, changes

FACTS = Path(__file__).with_name("facts.json")
PROCESSES = 2
FLAGGED = 1  # of the unchanged, at most


@dataclass(frozen=True, slots=True)
class Judged:
    """A pair, and what is told of it."""

    pair: Pair
    before: Facts
    after: Facts
    changes: Sequence[Change]  # the worst first

    @property
    def worse(self) -> list[Change]:
        return at_least(self.changes, "worse")

    @property
    def is_named(self) -> bool:
        """Whether the worst that is told is the cause."""
        return bool(self.worse) and self.worse[0].what in self.pair.causes

    def __str__(self) -> str:
        told = self.worse[0].text if self.worse else "nothing is worse"
        verdict = "ok" if (self.is_named if self.pair.causes else not self.worse) else "WRONG"
        return f"{verdict:<5}  {self.pair.name:<26}  {told}"

    def as_json(self) -> dict[str, Any]:
        pair = self.pair
        return {
            "name": pair.name,
            "says": pair.says,
            "tritons": [pair.before.triton, pair.after.triton],
            "causes": pair.causes,
            "is_told": bool(self.worse),
            "is_named": self.is_named,
            "changes": [[one.severity, one.what, one.text] for one in self.changes],
            "before": self.before.as_json(),
            "after": self.after.as_json(),
        }


def judge(pair: Pair, facts: Mapping[str, Facts]) -> Judged:
    before, after = facts[f"{pair.name}/before"], facts[f"{pair.name}/after"]
    return Judged(pair, before, after, changes(before, after, pair.before.architecture))


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument(
        "--record", action="store_true", help="compile the installed Triton's sides, keep facts"
    )
    parser.add_argument("--json", type=written_to, metavar="FILE", help="write facts and changes into FILE")


def main(options: Namespace) -> int:
    if options.record:
        recorded = {name: facts.as_json() for name, facts in (read() | compiled()).items()}
        rows = (f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded))
        FACTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    facts = read()
    judged = [judge(pair, facts) for pair in PAIRS]
    print(*judged, sep="\n")
    slower, alike = ([one for one in judged if bool(one.pair.causes) is has] for has in (True, False))
    told, named = sum(bool(one.worse) for one in slower), sum(one.is_named for one in slower)
    flagged = sum(bool(one.worse) for one in alike)
    print(f"\nof {len(slower)} regressions {told} are told, {named} by their cause")
    print(f"of {len(alike)} pairs that did not change {flagged} are flagged")
    write_json(options.json, {"pairs": [one.as_json() for one in judged]})
    return int(named < len(slower) or flagged > FLAGGED)


def read() -> dict[str, Facts]:
    """The recorded facts, by "PAIR/before" and "PAIR/after"."""
    if not FACTS.exists():
        return {}
    return {name: Facts.from_json(row) for name, row in json.loads(FACTS.read_text(encoding="utf-8")).items()}


def compiled() -> dict[str, Facts]:
    """The facts of all sides of the installed Triton; RuntimeError if one does not compile."""
    import triton

    jobs = {
        f"{pair.name}/{when}": CompileJob(side.entry, side.architecture)
        for pair in PAIRS
        for when, side in (("before", pair.before), ("after", pair.after))
        if side.triton == triton.__version__
    }
    with Progress("compiling", len(jobs)) as step:
        found = compile_all([*jobs.values()], PROCESSES, step)
    for name, facts in zip(jobs, found, strict=True):
        if isinstance(facts, str):
            raise RuntimeError(f"{name}: {facts}")
    # how long it took is of no interest, and no two runs alike
    return {
        name: replace(facts, seconds=0.0)
        for name, facts in zip(jobs, found, strict=True)
        if isinstance(facts, Facts)
    }
