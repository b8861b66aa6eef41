"""Which kernels that were never run may run in this process: those that passed a trial on this GPU's model.

Before a tile whose warps have roles runs here, a child process tries its kernel, once for each model of GPU
and set of versions. A verdict is a key in the cache, as choices are:

    passed: linear bfloat16 none triton/descriptor/...
    failed: linear bfloat16 none triton/descriptor/...

Ranks share the file. If one rank wrote `passed` and another `failed`, both keys are there, and the failure
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from tpkernels.dispatch import log
from tpkernels.dispatch.cache import Cache, Choice
from tpkernels.dispatch.candidates import Candidate
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.trial import OVER, TrialReport, trial
from tpkernels.dispatch.variant import Variant
from tpkernels.env import env_flag

PASSED, FAILED = "passed: ", "failed: "
# A child's context and matrices take about half of it; what others ask for meanwhile shall be there, too.
FREE_BYTES = 2 * 2**30


class Verdicts:
    """Says which kernels may run on one device, and has those tried that nobody knows."""

    def __init__(
        self,
        cache: Cache,
        trial: Callable[[Sequence[Variant]], TrialReport],
        obstacle: Callable[[], str | None],
    ) -> None:
        """obstacle: why nothing can be tried at this moment; None if it can"""
        self._cache = cache
        self._trial = trial
        self._obstacle = obstacle
        self._given_up = False  # what kept one child from trying would keep the next one from it

    def permits(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether it may run here, as far as is known."""
        if candidate.tile is None or not candidate.tile.in_roles:
            return True
        variant = Variant.of(problem, candidate)
        return self._cache.get(f"{PASSED}{variant}") is not None and not self._failed(variant)

    def admitted(self, problem: Problem, wanted: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Those that may run here, once what was never tried has been, if it can be."""
        refused = [candidate for candidate in wanted if not self.permits(problem, candidate)]
        unknown = [variant for c in refused if not self._failed(variant := Variant.of(problem, c))]
        if unknown and not self._given_up:
            if why := self._obstacle():
                log.choices.info(
                    "no candidate for %s, as it cannot be tried now (%s): %s",
                    problem.key,
                    why,
                    ", ".join(variant.tile for variant in unknown),
                )
            else:
                self._try(unknown)
        return tuple(candidate for candidate in wanted if self.permits(problem, candidate))

    def _failed(self, variant: Variant) -> bool:
        return self._cache.get(f"{FAILED}{variant}") is not None

    def _try(self, variants: Sequence[Variant]) -> None:
        log.choices.info("tried in a child process: %s", ", ".join(map(str, variants)))
        report, gpu = self._trial(variants), self._cache.versions.gpu
        for variant, verdict in report.verdicts.items():
            if verdict.outcome == "passed":
                self._cache.put(f"{PASSED}{variant}", Choice("passed", {}))
            else:
                self._cache.put(f"{FAILED}{variant}", Choice(str(verdict), {}))
                log.warnings.warning(
                    "%s is left out on %s, tried in a child process: %s", variant, gpu, verdict
                )
        if report.obstacle:
            self._given_up = not report.obstacle.endswith(OVER)  # another problem may take less
            log.warnings.warning(
                "no child process can try kernels on %s, so they are left out: %s", gpu, report.obstacle
            )


def verdicts_on(
    device: torch.device, cache: Cache, obstacle: Callable[[torch.device], str | None]
) -> Verdicts:
    """By real trials on a device of this process, at moments when something can be timed on it."""
    return Verdicts(cache, partial(trial, device=device), lambda: obstacle(device) or lack(device))


def lack(device: torch.device) -> str | None:
    """What else keeps a child from trying anything."""
    if device.type != "cuda":
        return f"{device} is no GPU"
    if not env_flag("TPKERNELS_TUNE", default=True):
        return "TPKERNELS_TUNE=0"
    if torch.cuda.mem_get_info(device)[0] < FREE_BYTES:
        return f"less than {FREE_BYTES / 2**30:g} GiB of GPU memory are free"
    return None


def recorded(cache: Cache) -> Iterator[tuple[str, str]]:
    """Each variant that was tried, and what became of it."""
    for key, choice in sorted(cache.choices.items()):
        for prefix in (PASSED, FAILED):
            if key.startswith(prefix):
                yield key.removeprefix(prefix), choice.name
