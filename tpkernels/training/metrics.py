"""A run's lines of JSON, one a step: they go on after a restart, also where the last was cut off."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TextIO

from tpkernels.files import parsed, read_bytes, replace_text, unused


def opened_after(path: Path, done: int) -> tuple[TextIO, str]:
    """Where lines after so many steps are written, and what there is to say of the lines before.

    What a run wrote beyond its last checkpoint is dropped, for those steps are made again. Lines that hold no
    step, as a run leaves one that is killed while it writes, stay in a copy of the file.
    """
    said = ""
    if done and path.is_file():
        lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
        steps = [_step_of(line) for line in lines]
        damaged = [number for number, step in enumerate(steps, start=1) if step is None and lines[number - 1]]
        if damaged:
            aside = unused(path.with_name(f"{path.name}.damaged"))
            shutil.copy2(path, aside)
            said = f"{path}: line {damaged[0]} holds no step; left out, and the file as it was is {aside}"
        kept = [line for line, step in zip(lines, steps, strict=True) if step is not None and step <= done]
        replace_text(path.resolve(), "".join(f"{line}\n" for line in kept))
        return path.open("a", encoding="utf-8"), said
    return path.open("w", encoding="utf-8"), said


def _step_of(line: str) -> int | None:
    try:
        found = parsed(line)
    except ValueError:
        return None
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else None
