"""Find the constants that are not public, on the fitted half of the published timings alone: minutes.

python -m bench.clock.fit
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

from bench.clock.published import Measured, measured
from bench.clock.validation import Costs, judged
from tpkernels.gate.clock.model import Board
from tpkernels.gate.clock.rates import SmRates

TRIED = {
    "fetch": (34.0, 37.0, 40.0, 44.0, 48.0, 54.0),
    "copy_latency": (450.0, 550.0, 650.0, 750.0),
    "store_latency": (300.0, 600.0),
    "products_queued": (2, 4, 8),
    "poll": (10.0, 20.0, 40.0, 80.0),
}
CLOCKS = [1e9 * (1.20 + 0.02 * step) for step in range(21)]  # of Board.full


def fitted(machine: SmRates, costs: Costs) -> tuple[float, Board]:
    """The least root mean square of the errors over `Board.full`, and the board it is at."""
    figures = [one for one in measured() if one.fitted]
    boards = (replace(Board(), full=full) for full in CLOCKS)
    return min(
        ((_rms(figures, machine, board, costs), board) for board in boards), key=lambda found: found[0]
    )


def _rms(figures: list[Measured], machine: SmRates, board: Board, costs: Costs) -> float:
    errors = [one.error for one in judged(figures, machine, board, costs)]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def main() -> None:
    costs, machine = Costs(), SmRates()
    best, board = fitted(machine, costs)
    print(f"now: {100 * best:.2f} % at {board.full / 1e9:.2f} GHz", flush=True)
    assert set(TRIED) <= {field.name for field in fields(SmRates)}
    for name in (*TRIED, "fetch"):
        for value in TRIED[name]:
            tried = replace(machine, **{name: value})  # type: ignore[arg-type]  # products_queued has whole ones
            if tried == machine:
                continue
            found, at = fitted(tried, costs)
            print(f"{name} {value}: {100 * found:.2f} % at {at.full / 1e9:.2f} GHz", flush=True)
            if found < best:
                best, board, machine = found, at, tried
        print(f"-> {100 * best:.2f} %: {machine} {board}", flush=True)


if __name__ == "__main__":
    main()
