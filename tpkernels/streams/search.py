"""Executes a program in many orders: each must end, with ordered accesses and the same results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.streams.device import MachineError
from tpkernels.streams.execution import Execution
from tpkernels.streams.program import Program
from tpkernels.streams.waves import require_waves_beside

RACES_EVERY = 4  # orders: finding races takes half of the time, and hardly depends on the order


@dataclass(frozen=True)
class Report:
    orders: int
    tasks: int
    steps: int  # of all orders


def search(
    program: Program,
    orders: int,
    expected: Sequence[Sequence[Tensor]] | None = None,
    first_seed: int = 0,
    *,
    waves: bool = False,
) -> Report:
    """Execute a program in `orders` orders, one for each seed; a MachineError has the seed of a failure.

    expected: results of each rank; by default those of the first order
    waves: also check that products leave processors to collectives that may be in flight
    """
    wanted = None if expected is None else [list(results) for results in expected]
    steps = 0
    for seed in range(first_seed, first_seed + orders):
        execution = Execution(program, seed, races=(seed - first_seed) % RACES_EVERY == 0)
        try:
            execution.run()
            if wanted is None:
                wanted = [[each.clone() for each in results] for results in program.results]
            _require_equal(program.results, wanted)
        except MachineError as error:
            raise MachineError(f"seed {seed}: {error}") from error
        steps += execution.steps
    if waves:
        require_waves_beside(program)
    return Report(orders, len(program.tasks), steps)


def _require_equal(found: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]) -> None:
    for rank, (results, expected) in enumerate(zip(found, wanted, strict=True)):
        for number, (result, value) in enumerate(zip(results, expected, strict=True)):
            if result.shape != value.shape:
                raise MachineError(
                    f"result {number} of rank {rank} is {tuple(result.shape)}, expected {tuple(value.shape)}"
                )
            if not torch.equal(result, value):
                wrong = int((result != value).sum())
                raise MachineError(
                    f"result {number} of rank {rank}: {wrong} of {value.numel()} numbers differ from expected"
                )
