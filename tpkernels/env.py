"""What the environment sets: flags, and how many SMs a collective may take."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Blocks of a collective of NCCL, each of which occupies a processor: its own choice on an H100, and the most
# that we let it take where it runs beside products.
NCCL_BLOCKS = 16


def env_choice(name: str, values: Sequence[str]) -> str:
    """Return the variable, by default the first of `values`; ValueError if it is none of them."""
    value = os.environ.get(name) or values[0]
    if value not in values:
        raise ValueError(f"{name} is {value!r}; expected {', '.join(values[:-1])} or {values[-1]}")
    return value


def env_or_safe(name: str, default: str, safe: str) -> str:
    """Return the variable; under TPKERNELS_SAFE=1 the safe value, and ValueError if another was asked for."""
    if not env_flag("TPKERNELS_SAFE", default=False):
        return os.environ.get(name, default)
    if (value := os.environ.get(name, safe)) != safe:
        raise ValueError(f"TPKERNELS_SAFE=1 takes {name}={safe}, got {value!r}; unset one of them")
    return safe


def env_flag(name: str, default: bool) -> bool:
    """Whether the variable is 1; ValueError for a value other than 0 and 1, which is never ignored."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}; expected 0 or 1")
    return value == "1" if value else default
