"""Until the last op calls `primitives` itself."""

from __future__ import annotations

from typing import Any

from tpkernels.dispatch import primitives


def vocabulary_steps_on(tensor: object) -> Any:
    return primitives
