"""How long candidates take on a GPU.

Times are medians of rounds in which every candidate runs once, in turns, so that a drift of clocks or a busy
neighbour hits all alike. Before each run the L2 cache is overwritten, as the rest of a model would do. A run
counts as the longer of its time on the GPU and its time on the host: a launch that takes longer than what it
launches is what a small product costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch

Runs = Mapping[str, Callable[[], object]]
Timer = Callable[[Runs], dict[str, float]]  # milliseconds by name

WARM_UPS = 3
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
SECONDS = 0.5  # after these no further round begins


def rounds(
    runs: Runs,
    once: Callable[[Callable[[], object]], float],
    clock: Callable[[], float] = perf_counter,
) -> dict[str, float]:
    """The median of what `once` says of each run; a different one goes first in each round."""
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    began = clock()
    for i in range(MOST_ROUNDS):
        first = i % len(names)
        for name in (*names[first:], *names[:first]):
            samples[name].append(once(runs[name]))
        if i + 1 >= FEWEST_ROUNDS and clock() - began > SECONDS:
            break
    return {name: median(values) for name, values in samples.items()}


class CudaTimer:
    """Times on the current stream of a device, and waits for nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, runs: Runs) -> dict[str, float]:
        with torch.cuda.device(self._device):
            cache_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
            flush = torch.empty(2 * cache_bytes, dtype=torch.int8, device=self._device)
            for run in runs.values():
                for _ in range(WARM_UPS):
                    run()

            def once(run: Callable[[], object]) -> float:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                start.record()
                launching = perf_counter()
                run()
                launched = perf_counter()
                end.record()
                end.synchronize()
                on_gpu: float = start.elapsed_time(end)
                return max(on_gpu, 1e3 * (launched - launching))

            return rounds(runs, once)
