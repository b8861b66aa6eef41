"""The numerical half of `check`, a program of its own: every launcher, interpreted, against float64.

Prints one JSON line a case: its name, its largest error as a part of what is allowed, and in words what is
wrong. Run with TRITON_INTERPRET=1; the one argument says which names to run, see `named`.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from tpkernels.gate.accuracy import BOUND, Frames, relative_error
from tpkernels.gate.name_filter import has_parts
from tpkernels.gate.numeric_cases import Case, Results, cases
from tpkernels.kernels import launch


def part_of_bound(actual: Tensor | None, exact: Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ over what the dtype is allowed; NaN where a value is missing."""
    if actual is None or actual.shape != exact.shape:
        return float("nan")
    return relative_error(actual, exact) / BOUND[actual.dtype]


def _flaw(actual: Tensor | None, exact: Tensor, error: float) -> str:
    if actual is None:
        return "is missing"
    if actual.shape != exact.shape:
        return f"has shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    return f"is off by {error:.3g} times the bound" if error == error else "holds NaN"


def examine(case: Case, frames: Frames) -> dict[str, str | float]:
    """The line that is printed of a case."""
    try:
        results: Results = case.run()
    except Exception as error:  # a kernel that does not run is a finding
        frames.take_overruns()
        return {"case": case.name, "error": float("nan"), "failure": f"{type(error).__name__}: {error}"}
    errors = {what: part_of_bound(*pair) for what, pair in results.items()}
    failures = [f"{what} {_flaw(*results[what], error)}" for what, error in errors.items() if not error < 1]
    if frames.take_overruns():
        failures.append("written outside an output")
    largest = max(errors.values(), key=lambda error: (error != error, error))  # NaN above all numbers
    return {"case": case.name, "error": largest, "failure": "; ".join(failures)}


def main(only: str = "") -> None:
    torch.manual_seed(20261121)
    frames = Frames()
    launch.empty = frames.empty
    for case in cases():
        if has_parts(case.name, only):
            print(json.dumps(examine(case, frames)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
