"""Chooses the candidate that computes a problem on a GPU. The first of these that knows one decides:

    1. what this process has chosen before
    2. the user's cache on disk
    3. timing now: on random operands of the same layout, each candidate checked against plain torch first
    4. plain torch, where timing is not allowed

A candidate other than torch must win by MARGIN, and plain torch is always among those timed: nobody is made
slower than with `F.linear`. A small product costs what launching it takes, but not where a captured graph is
replayed: one candidate is chosen for eager calls and one for graphs. Timing is not allowed while a CUDA graph
is captured or torch.compile traces, since neither may wait for the GPU, nor with TPKERNELS_TUNE=0.

Choosing takes half a minute at most: when CHECKING_SECONDS are over, what was not tried yet stays so, and is
told.

A choice changes who computes a product on this rank, never what is communicated, when, or in which shape:
that is decided elsewhere, from global shapes. Ranks choose for themselves until they are given a store to
agree through (see `cache`): then a choice is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from threading import Lock
from time import perf_counter
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from tpkernels.dispatch import log
from tpkernels.dispatch.cache import Cache, Choice, KeyValueStore, Published, versions_for
from tpkernels.dispatch.candidates import TORCH, Candidate, TargetGpu, candidates, gpu_of
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Primitive, R
from tpkernels.dispatch.soundness import mismatch, results_of, scratch_like, spoil_freed
from tpkernels.dispatch.timing import CudaTimer, Runs, Timer, Times
from tpkernels.env import env_flag
from tpkernels.files import cache_folder
from tpkernels.kernels.operands import are_halves
from tpkernels.kernels.target import fp32_precision

MARGIN = 0.02  # of the usual one's time: less is noise, and torch is lighter to launch
# of compiling candidates and comparing their results. One that has begun then is finished: compiling took 14
# at most where it was measured (erf, on two busy cores). Timing takes about one.
CHECKING_SECONDS = 15.0
MOST_REMEMBERED = 4096  # calls: with batches of any length each brings new ones, of a few hundred bytes

Source = Literal[
    "only candidate",
    "only one",
    "agreed",
    "cached",
    "timed",
    "not timed",
    "not timed now",
    "timing failed",
]


class HasName(Protocol):
    """A candidate of a choice: anything with a name."""

    @property
    def name(self) -> str: ...


Chosen = TypeVar("Chosen", bound=HasName, covariant=True)  # a candidate, or a way to move rows


@dataclass(frozen=True, slots=True)
class Decision(Generic[Chosen]):
    """A choice with its reason: the candidate that computes a problem, or the way that moves rows."""

    key: str
    candidate: Chosen
    source: Source
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    captured: Chosen | None = None  # in a captured graph; None: the same

    @property
    def choice(self) -> Choice:
        """What the cache keeps: names and times."""
        return Choice(self.candidate.name, self.milliseconds, self.captured.name if self.captured else "")

    def __str__(self) -> str:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        words = self.detail or ", ".join(f"{name} {ms:.4g} ms" for name, ms in times)
        also = f", in captured graphs {self.captured.name}" if self.captured else ""
        return f"{self.key}: {self.candidate.name}{also} ({self.source}{': ' * bool(words)}{words})"


def winner(milliseconds: Mapping[str, float], usual: str = TORCH.name) -> str:
    """Return the name of the fastest, if it beats the usual one by MARGIN, else that of the usual one."""
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    return fastest if milliseconds[fastest] < (1 - MARGIN) * milliseconds[usual] else usual


def obstacle(device: torch.device) -> str | None:
    """Return why nothing can be timed at this moment, or None."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if capturing(device):
        return "a CUDA graph is being captured"
    return None


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Chooser:
    """Chooses a candidate for each problem on one device, and calls it."""

    def __init__(
        self,
        device: torch.device,
        gpu: TargetGpu,
        timer: Timer,
        cache: Cache,
        obstacle: Callable[[torch.device], str | None] = obstacle,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.gpu = gpu
        self._device = device
        self._timer = timer
        self.cache = cache
        self._obstacle = obstacle
        self._clock = clock
        self._published: Published | None = None
        self._functions: dict[object, Callable[..., Any]] = {}
        self._lock = Lock()  # forward and backward run in two threads, which must not time at once

    def call(self, record: Primitive[..., R], *arguments: Any) -> R:
        """Compute a primitive by the candidate that is chosen for its arguments."""
        signature = _signature(record.name, arguments)
        function = self._functions.get(signature)
        if function is None:
            with self._lock:
                function = self._functions.get(signature) or self._choose(record, arguments, signature)
        result: R = function(*arguments)
        return result

    def agree_through(self, store: KeyValueStore) -> None:
        """From now on choose as the other ranks that were given this store.

        What was chosen before is chosen again: others may have chosen otherwise.
        """
        if self._published is None or self._published.store is not store:
            with self._lock:
                self._published = Published(store, self.cache.versions.slug)
                self._functions.clear()

    def call_into(self, record: Primitive[..., Any], out: Sequence[Tensor], *arguments: Any) -> None:
        """Compute a primitive into given tensors, by the candidate that is chosen for its arguments."""
        signature = _signature(record.name, arguments, out)
        function = self._functions.get(signature)
        if function is None:
            with self._lock:
                function = self._functions.get(signature) or self._choose(record, arguments, signature, out)
        function(out, *arguments)

    def _choose(
        self,
        record: Primitive[..., Any],
        arguments: tuple[Any, ...],
        signature: object,
        out: Sequence[Tensor] = (),
    ) -> Callable[..., Any]:
        if self._published is None:
            decision = self._own(record, arguments, out)
            lasts = decision.source != "not timed now"
        else:
            lasts = self._obstacle(self._device) is None
            decision = self._agreed(record, arguments, out, self._published, "" if lasts else " now")
        log.choices.info("%s", decision)
        function = self._bound(decision, record, arguments, out)
        if lasts:
            if len(self._functions) >= MOST_REMEMBERED:
                self._functions.clear()  # what is chosen again is in the cache
            self._functions[signature] = function
        return function

    def _bound(
        self,
        decision: Decision[Candidate],
        record: Primitive[..., Any],
        arguments: tuple[Any, ...],
        out: Sequence[Tensor],
    ) -> Callable[..., Any]:
        """Return the function that computes a problem, if need be by another candidate in graphs."""

        def of(candidate: Candidate) -> Callable[..., Any]:
            return candidate.bind_into(record) if out else candidate.bind(record)

        eager = of(decision.candidate)
        if decision.captured is None:
            return eager
        captured = of(decision.captured)
        if self._obstacle(self._device) is None:
            # a kernel is compiled and loaded by its first call, which eager warm-ups would not make
            depth = record.problem(*arguments, out=out).depth
            try:
                scratch = scratch_like((*out, *arguments), depth, self._device)
                captured(*([scratch[: len(out)]] if out else []), *scratch[len(out) :])
            except Exception as error:  # out of memory, most likely
                log.warnings.warning(
                    "%s dropped for %s in captured graphs: %s", decision.captured.name, decision.key, error
                )
                return eager
        return lambda *arguments: (captured if capturing(self._device) else eager)(*arguments)

    def _own(
        self, record: Primitive[..., Any], arguments: tuple[Any, ...], out: Sequence[Tensor]
    ) -> Decision[Candidate]:
        return self.known(record, arguments, out) or self._torch_or_timed(record, arguments, out)

    def _agreed(
        self,
        record: Primitive[..., Any],
        arguments: tuple[Any, ...],
        out: Sequence[Tensor],
        published: Published,
        moment: str,
    ) -> Decision[Candidate]:
        """Return the choice of the rank that decides first.

        moment: nothing can be timed now, and one rank may know more than another: what they agree on is not
            what they would agree on later, and is kept apart
        """
        problem = record.problem(*arguments, out=out)
        if len(self.candidates(record, problem)) == 1:
            return Decision(problem.key, TORCH, "only candidate")
        own, choice = None, published.get(problem.key + moment)
        if choice is None:
            own = self._own(record, arguments, out)
            choice = published.put(problem.key + moment, own.choice)
            if choice.names == own.choice.names:
                return own
        found: list[Candidate] = []
        for name in choice.names:
            candidate = self._named(name, record, problem)
            if candidate is None:
                log.warnings.warning(
                    "other ranks compute %s by %s, which is no candidate here: results may differ in bits",
                    problem.key,
                    name,
                )
                return own or self._own(record, arguments, out)
            found.append(candidate)
        if choice.milliseconds:  # else nobody has timed it
            self.cache.put(problem.key, choice)
        return _decision(problem, found, "agreed", choice)

    def _torch_or_timed(
        self, record: Primitive[..., Any], arguments: tuple[Any, ...], out: Sequence[Tensor]
    ) -> Decision[Candidate]:
        key = record.problem(*arguments, out=out).key
        if not env_flag("TPKERNELS_TUNE", default=True):
            return Decision(key, TORCH, "not timed", detail="TPKERNELS_TUNE=0")
        if why := self._obstacle(self._device):
            return Decision(key, TORCH, "not timed now", detail=why)
        return self.timed(record, arguments, out)

    def known(
        self, record: Primitive[..., Any], arguments: tuple[Any, ...], out: Sequence[Tensor] = ()
    ) -> Decision[Candidate] | None:
        """Return the choice that is on disk, or the only candidate; None if timing must tell."""
        problem = record.problem(*arguments, out=out)
        if len(self.candidates(record, problem)) == 1:
            return Decision(problem.key, TORCH, "only candidate")
        choice = self.cache.get(problem.key)
        found = [self._named(name, record, problem) for name in choice.names] if choice else []
        there = [one for one in found if one is not None]
        if choice is None or len(there) < len(found):  # a candidate that is gone
            return None
        return _decision(problem, there, "cached", choice)

    def _named(self, name: str, record: Primitive[..., Any], problem: Problem) -> Candidate | None:
        found = (one for one in self.candidates(record, problem) if one.name == name)
        return next(found, None)

    def timed(
        self,
        record: Primitive[..., Any],
        arguments: tuple[Any, ...],
        out: Sequence[Tensor] = (),
        seconds: float = CHECKING_SECONDS,
    ) -> Decision[Candidate]:
        """Time the candidates now, and keep the fastest on disk.

        Tensors among the arguments are looked at, never read or written: they may be on the meta device.
        out: what the caller has written into; the ways are timed with results of their own
        seconds: after these no further candidate is tried
        """
        problem = record.problem(*arguments, out=out)
        wanted = self.candidates(record, problem)
        try:
            times = self.times(record, problem, wanted, arguments, seconds=seconds)
        except Exception as error:  # out of memory, most likely: a comparison takes more than torch alone
            log.warnings.warning("cannot time %s (%s): torch computes it", problem.key, error)
            return Decision(problem.key, TORCH, "timing failed", detail=str(error))
        return self.keep(problem, wanted, times)

    def candidates(self, record: Primitive[..., Any], problem: Problem) -> tuple[Candidate, ...]:
        """List the candidates, in the order in which they are tried."""
        return candidates(record, problem, self.gpu)

    def times(
        self,
        record: Primitive[..., Any],
        problem: Problem,
        wanted: Sequence[Candidate],
        arguments: tuple[Any, ...],
        *,
        seconds: float = inf,
    ) -> Times:
        """Time the candidates that agree with torch."""
        return self._timer(self._sound_runs(record, problem, wanted, arguments, seconds))

    def keep(self, problem: Problem, timed: Sequence[Candidate], times: Times) -> Decision[Candidate]:
        """Choose by these times, and keep the choice on disk."""
        eager, captured = winner(times.eager), winner(times.captured)
        choice = Choice(eager, times.eager, captured if captured != eager else "")
        self.cache.put(problem.key, choice)
        by_name = {candidate.name: candidate for candidate in timed}
        return _decision(problem, [by_name[name] for name in choice.names], "timed", choice)

    def _sound_runs(
        self,
        record: Primitive[..., Any],
        problem: Problem,
        wanted: Sequence[Candidate],
        arguments: tuple[Any, ...],
        seconds: float = inf,
    ) -> Runs:
        """Return the candidates that agree with torch, each bound to the same scratch operands."""
        began = self._clock()
        scratch = scratch_like(arguments, problem.depth, self._device)
        expected = results_of(record, record.by_torch, scratch)
        runs, untried = {}, []
        for candidate in wanted:
            if candidate != TORCH and self._clock() - began >= seconds:
                untried.append(candidate.name)
                continue
            function = candidate.bind(record)
            try:
                spoil_freed(expected)
                found = mismatch(results_of(record, function, scratch), expected, problem)
            except Exception as error:  # whatever a compiler or a launch raises: torch is there
                found = f"{type(error).__name__}: {error}"
            if found:
                log.warnings.warning("%s dropped for %s: %s", candidate.name, problem.key, found)
            else:
                runs[candidate.name] = partial(function, *scratch)
        if untried:
            log.warnings.warning(
                "%s: not tried within %g seconds: %s; `python -m tpkernels tune --again` does",
                *(problem.key, seconds, ", ".join(untried)),
            )
        return runs


def _decision(
    problem: Problem, found: Sequence[Candidate], source: Source, choice: Choice
) -> Decision[Candidate]:
    """Make a decision of a choice. found: the candidates that it names"""
    candidate, *captured = found
    return Decision(problem.key, candidate, source, choice.milliseconds, captured=next(iter(captured), None))


def _signature(name: str, arguments: tuple[Any, ...], out: Sequence[Tensor] = ()) -> object:
    """Return a key of all that a problem depends on. It is made in every call, and must be quick."""
    # all products multiply their second argument
    precision = fp32_precision() if arguments[1].dtype is torch.float32 else ""
    signature: list[object] = [name, precision]
    for argument in (*out, "into", *arguments) if out else arguments:
        if isinstance(argument, Tensor):
            signature += (argument.dtype, argument.shape, argument.stride(), argument.data_ptr() & 15)
        else:
            signature.append(argument)
    if name == "glu":
        signature.append(are_halves(arguments[1], arguments[2]))
    return tuple(signature)


@cache
def chooser_on(device: torch.device) -> Chooser:
    """Return the chooser of a GPU of this machine, with its cache"""
    log.show_choices_if_asked()
    gpu = gpu_of(device)
    cache = Cache(cache_folder(), versions_for(gpu.name))
    return Chooser(device, gpu, CudaTimer(device), cache)
