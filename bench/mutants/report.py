"""Results in a JSON file, and as tables in Markdown."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]  # by key of the mutant
JUDGED = Path(__file__).with_name("judged.json")


def read(path: Path | None) -> Results:
    found: Results = json.loads(path.read_text()) if path and path.exists() else {}
    return found


def write(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def table(results: Results, left_out: Mapping[str, int], judged: Mapping[str, str] | None = None) -> str:
    """Rooms, then survivors. Invisible: judged to be equivalent or unreachable; a share is of the others."""
    judged = json.loads(JUDGED.read_text()) if judged is None else judged
    rooms: dict[str, list[str]] = defaultdict(list)
    for key, found in results.items():
        verdict = judged.get(key, "")
        invisible = found["result"] == "survived" and verdict.startswith(("equivalent", "unreachable"))
        for room in (found["room"], "all"):
            rooms[room].append("invisible" if invisible else found["result"])
    lines = [
        "| room | mutants | killed | survived | equivalent or unreachable | share |",
        "|---|---|---|---|---|---|",
    ]
    for room in [*sorted(rooms.keys() - {"all"}), *(["all"] if rooms else [])]:
        killed, survived, invisible = (
            rooms[room].count(what) for what in ("killed", "survived", "invisible")
        )
        share = f"{killed / (killed + survived):.0%}" if killed + survived else "-"
        tried = killed + survived + invisible
        lines.append(f"| {room} | {tried} | {killed} | {survived} | {invisible} | {share} |")
    lines += ["", "| survivor | where tests got to | judged |", "|---|---|---|"]
    for key, found in sorted(results.items()):
        if found["result"] == "survived":
            got_to = {None: "not known", False: "no test gets to the line", True: "the line"}[
                found.get("reached")
            ]
            got_to += "" if found["in_time"] else ", out of time"
            lines.append(f"| `{key.replace('|', chr(92) + '|')}` | {got_to} | {judged.get(key, '')} |")
    absent = [
        f"Not tried: `{key}`: {found['by']}." for key, found in results.items() if found["result"] == "absent"
    ]
    skipped = [f"Left out: {number} places in code that {why}." for why, number in left_out.items()]
    return "\n".join([*lines, "", *absent, *skipped]) + "\n"
