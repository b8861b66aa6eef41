"""What `qualify` found on a model of GPU: its checks, and the file in the user's cache that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tpkernels.dispatch.cache import Versions
from tpkernels.dispatch.cache import versions_for as versions_for
from tpkernels.files import cache_folder, parsed, read_text, replace_text

FORMAT = 1


@dataclass(frozen=True)
class Check:
    """One line of the table of `qualify`: what was tried, and what came of it."""

    part: str  # kernels, transports, calls, graphs, times, buckets, trials, ranks
    name: str
    status: Literal["right", "wrong", "left out"]
    text: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Qualification:
    """A run of `qualify`."""

    versions: Versions
    ranks: int
    seed: int
    checks: Sequence[Check]
    auto: str  # what TPKERNELS_TRANSPORT=auto will do, and why

    @property
    def right(self) -> bool:
        return bool(self.checks) and not any(check.status == "wrong" for check in self.checks)

    def as_json(self) -> str:
        content = {"format": FORMAT, "right": self.right, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    def table(self) -> str:
        lines = [
            f"{check.status:<8}  {check.part:<10}  {check.name:<{self._width}}  {check.text}"
            for check in self.checks
        ]
        return "\n".join(lines)

    @property
    def _width(self) -> int:
        return max((len(check.name) for check in self.checks), default=0)


def versions_here() -> Versions:
    """Return the versions of the GPU of this process, or of the CPU."""
    return versions_for(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def path_for(versions: Versions) -> Path | None:
    """Return where a report is kept; None where there is no folder for caches."""
    folder = cache_folder()
    return None if folder is None else folder / f"qualified_{versions.slug}.json"


def keep(report: Qualification) -> None:
    """Keep a report instead of the one of these versions; OSError where it cannot be written."""
    path = path_for(report.versions)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, report.as_json())


def known(versions: Versions) -> dict[str, Any] | None:
    """Return the report kept of these versions; None if there is none that can be read."""
    path = path_for(versions)
    try:
        content = None if path is None else parsed(read_text(path))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    return content if content.get("versions") == asdict(versions) else None
