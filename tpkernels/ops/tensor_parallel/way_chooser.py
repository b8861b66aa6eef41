"""Which of several ways moves a shape: timed by all ranks of a group at once, and the same on all of them.

    1. what the ranks have in their caches, if all have the same
    2. timing now: each rank times each way, the slowest rank's time counts, and the fastest way wins
    3. the default, where a rank may not time

Ways are collective, so no rank decides by itself: each decision is taken from what all have told each other,
and each rank runs each way equally often. A way that a rank cannot open, or that gives other numbers there,
is dropped on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from torch import Tensor

from tpkernels.dispatch import log
from tpkernels.dispatch.cache import Cache, Choice

Run = Callable[[], Tensor]
Clock = Callable[[str, Run], float]  # milliseconds of one run of a way; runs it once
Tell = Callable[[Sequence[str]], list[list[str]]]  # our texts -> those of each rank, in order

ROUNDS = 7  # a number, and not a time: all ranks must run as often
MARGIN = 0.02  # of the default's time: less is noise
TOLERANCE = 1e-2  # of the norm: ways round at different places

Source = Literal["cached", "timed", "not timed", "only one"]


@dataclass(frozen=True)
class Way:
    """One way to move rows and to compute what hides it.

    open: what it needs; an error here drops the way on all ranks. Ranks that open together tell each other
    recovers: whether an error in a run leaves nothing under way that another rank would take for its own
    """

    name: str
    open: Callable[[], Run]
    close: Callable[[], None] = lambda: None
    recovers: bool = False


@dataclass(frozen=True)
class Verdict:
    """Who moves it, and why."""

    name: str
    source: Source
    milliseconds: Mapping[str, float] = field(default_factory=dict)  # of the slowest rank
    detail: str = ""

    def __str__(self) -> str:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        words = self.detail or ", ".join(f"{name} {ms:.4g} ms" for name, ms in times)
        return f"{self.name} ({self.source}{': ' * bool(words)}{words})"


class WayChooser:
    """Chooses for one group."""

    def __init__(self, tell: Tell, clock: Clock, cache: Cache) -> None:
        self._tell, self._clock, self._cache = tell, clock, cache

    def choose(self, key: str, ways: Sequence[Way], default: str, why_not: str = "") -> Verdict:
        """All ranks of the group call this at once. The way that wins is open then, and no other.

        default: a name among `ways`
        why_not: why this rank may not time now
        """
        cached = self._cache.get(key)
        told = self._tell([default, cached.name if cached else "", why_not, ",".join(w.name for w in ways)])
        offered = [set(names.split(",")) for *_, names in told]
        in_order = sorted(ways, key=lambda way: way.name)  # on all ranks the same
        possible = {way.name: way for way in in_order if all(way.name in names for names in offered)}
        # defaults may differ, as sizes of weight shards may: the first that is possible everywhere
        default = next((name for name, *_ in told if name in possible), min(possible))
        kept = {name for _, name, _, _ in told}
        if len(kept) == 1 and kept <= possible.keys():
            return self._cached(key, possible, kept.pop(), default)
        for rank, (_, _, why, _) in enumerate(told):
            if why:
                return Verdict(default, "not timed", detail=f"rank {rank}: {why}")
        return self._timed(key, possible, default)

    def _cached(self, key: str, possible: Mapping[str, Way], name: str, default: str) -> Verdict:
        run, why = self._opened(possible[name])
        if run is None:
            self._drop(key, possible[name], why)
            return Verdict(default, "not timed", detail=why)
        choice = self._cache.get(key)
        return Verdict(name, "cached", choice.milliseconds if choice else {})

    def _timed(self, key: str, possible: Mapping[str, Way], default: str) -> Verdict:
        if len(possible) == 1:
            return Verdict(default, "only one")
        run, why = self._opened(possible[default])
        if run is None:
            self._drop(key, possible[default], why)
            return Verdict(default, "not timed", detail=why)
        runs, expected = {default: run}, run()
        for name, way in possible.items():
            if name != default:
                run, why = self._opened(way, expected)
                if run is None:
                    self._drop(key, way, why)
                else:
                    runs[name] = run
        if len(runs) == 1:
            return Verdict(default, "only one", detail="no other works")
        milliseconds = self._slowest(runs)
        fastest = min(milliseconds, key=milliseconds.__getitem__)
        wins = milliseconds[fastest] < (1 - MARGIN) * milliseconds[default]
        name = fastest if wins else default
        for other in runs.keys() - {name}:
            possible[other].close()
        self._cache.put(key, Choice(name, milliseconds))
        return Verdict(name, "timed", milliseconds)

    def _opened(self, way: Way, expected: Tensor | None = None) -> tuple[Run | None, str]:
        """What to run, or why not: the same on all ranks.

        expected: what a run gives; None leaves it untried
        """
        run, problem = None, ""
        try:
            run = way.open()
            if expected is not None and way.recovers:
                problem = _mismatch(run(), expected)
        except Exception as error:  # whatever it is, the others wait to be told
            problem = f"{type(error).__name__}: {error}"
        if problem := self._first_problem(problem):
            return None, problem
        assert run is not None
        if expected is not None and not way.recovers:
            problem = self._first_problem(_mismatch(run(), expected))
        return (None, problem) if problem else (run, "")

    def _first_problem(self, ours: str) -> str:
        """Of all ranks, in their order."""
        problems = enumerate(self._tell([ours]))
        return next((f"rank {rank}: {theirs}" for rank, (theirs,) in problems if theirs), "")

    def _drop(self, key: str, way: Way, why: str) -> None:
        way.close()
        log.warnings.warning("%s dropped for %s: %s", way.name, key, why)

    def _slowest(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """The median of each way on the rank where it takes longest."""
        names = list(runs)
        samples: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                samples[name].append(self._clock(name, runs[name]))
        ours = " ".join(f"{median(samples[name]):.6g}" for name in names)
        by_rank = [[float(word) for word in times.split()] for (times,) in self._tell([ours])]
        return {name: max(times) for name, times in zip(names, zip(*by_rank, strict=True), strict=True)}


def _mismatch(found: Tensor, expected: Tensor) -> str:
    """How far a result is off, in words; nothing if it is right."""
    if found.shape != expected.shape:
        return f"its result is {tuple(found.shape)}, expected {tuple(expected.shape)}"
    # the caller's own numbers may overflow, in the first steps of fp16: what is left is compared
    there = expected.isfinite()
    wanted = expected.float().where(there, 0.0)
    error, size = float((found.float().where(there, 0.0) - wanted).norm()), float(wanted.norm())
    if error <= TOLERANCE * size:  # a NaN is not
        return ""
    return f"its result is off by {error:.1e} of {size:.1e}"
