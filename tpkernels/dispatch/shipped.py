"""Choices that come with the package, for GPUs that someone has timed: `shipped/<gpu>.json`.

Each is what `python -m tpkernels tune --json FILE` wrote on that GPU. Versions may differ from the user's: a
choice of last month is a better guess than none, and `tune` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tpkernels.dispatch.cache import Choice, ForeignFile, parse
from tpkernels.dispatch.log import warnings
from tpkernels.dispatch.versions import gpu_slug

FOLDER = Path(__file__).parent / "shipped"


def shipped_choices(gpu: str, folder: Path = FOLDER) -> Mapping[str, Choice]:
    """What is shipped for a GPU of this name; nothing for most."""
    path = folder / f"{gpu_slug(gpu)}.json"
    try:
        versions, choices = parse(path.read_text(encoding="utf-8"))
        if versions.get("gpu") != gpu:
            raise ForeignFile(f"it was written for {versions.get('gpu')}")
        return choices
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warning("ignoring %s: %s", path, error)
        return {}
