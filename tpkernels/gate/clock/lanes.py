"""Functions of plain ints, for lanes one after the other: for what is rare with lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tpkernels.gate.clock.values import Value


def settled(value: Any) -> Any:
    """A plain int where all lanes agree: a warp's number is found by shifting its threads'."""
    if value.__class__ is np.ndarray and (value == value[0]).all():
        return int(value[0])
    return value


def by_lane(compute: Callable[..., int]) -> Callable[..., Value]:
    """For what is rare with lanes: one after the other."""

    def run(*values: Any) -> Value:
        if all(value.__class__ is not np.ndarray for value in values):
            return compute(*values)
        lanes = np.broadcast_arrays(*values, np.empty(32))[:-1]
        return np.array([compute(*map(int, lane)) for lane in zip(*lanes, strict=True)], dtype=np.int64)

    return run


def by_lane_all(compute: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Value, ...]]:
    def run(*values: Any) -> tuple[Value, ...]:
        if all(value.__class__ is not np.ndarray for value in values):
            return compute(*values)
        lanes = np.broadcast_arrays(*values, np.empty(32))[:-1]
        found = [compute(*map(int, lane)) for lane in zip(*lanes, strict=True)]
        return tuple(np.array(column) for column in zip(*found, strict=True))

    return run
