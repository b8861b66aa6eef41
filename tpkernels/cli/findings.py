"""What `doctor` finds: one thing, how it is, and in words what that means."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

PREFIX = "tpkernels-finding: "  # before each line of the probe, to tell it from what libraries print


@dataclass(frozen=True)
class Finding:
    name: str
    health: Literal["ok", "note", "problem"]  # a note costs something, a problem stops work
    text: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    return Finding(name, "note", text)


def problem(name: str, text: str) -> Finding:
    return Finding(name, "problem", text)
