"""The numerical half of `check`, a program of its own: every launcher, interpreted, against float64.

Prints one JSON line a case: its name, its largest error as a part of what is allowed, and in words what is
wrong. Run with TRITON_INTERPRET=1; the one argument is a part of the names to run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from tpkernels.cli.numeric_cases import BF16, FP16, FP32, Case, Results, cases
from tpkernels.kernels import launch

# norm-wise against float64: about one and a half correct roundings of the result
BOUND: Mapping[torch.dtype, float] = {FP32: 3e-7, FP16: 3e-4, BF16: 2.5e-3}
MARGIN = 64  # elements on each side; keeps the 16-byte alignment that descriptors need
CANARY = 7.0


class Outputs:
    """Allocates for `launch.empty`: NaN, which must be overwritten, inside canaries, which must not."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * MARGIN,), CANARY, dtype=dtype, device=device)
        self.buffers.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].fill_(float("nan")).view(shape)

    def take_overruns(self) -> int:
        """How many outputs allocated since the last call have been written outside of."""
        margins = [torch.cat([buffer[:MARGIN], buffer[MARGIN + count :]]) for buffer, count in self.buffers]
        self.buffers.clear()
        return sum(bool((margin != CANARY).any()) for margin in margins)


def part_of_bound(actual: Tensor | None, exact: Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ over what the dtype is allowed; NaN where a value is missing."""
    if actual is None or actual.shape != exact.shape:
        return float("nan")
    error = (actual.double() - exact).norm() / exact.norm()
    return float(error) / BOUND[actual.dtype]


def examine(case: Case, outputs: Outputs) -> dict[str, str | float]:
    """The line that is printed of a case."""
    try:
        results: Results = case.run()
    except Exception as error:  # a kernel that does not run is a finding
        outputs.take_overruns()
        return {"case": case.name, "error": float("nan"), "failure": f"{type(error).__name__}: {error}"}
    errors = {what: part_of_bound(*pair) for what, pair in results.items()}
    failures = [
        f"{what} is off by {error:.3g} times the bound" if error == error else f"{what} holds NaN"
        for what, error in errors.items()
        if not error < 1
    ]
    if outputs.take_overruns():
        failures.append("written outside an output")
    return {"case": case.name, "error": max(errors.values()), "failure": "; ".join(failures)}


def main(only: str = "") -> None:
    torch.manual_seed(20261121)
    outputs = Outputs()
    launch.empty = outputs.empty
    for case in cases():
        if only in case.name:
            print(json.dumps(examine(case, outputs)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
