"""Chooses the candidate that computes a shape on a GPU. The first of these that knows one decides:

    1. what this process has chosen before, or another rank has published
    2. the user's cache on disk
    3. timing now: on random operands of the same layout, each candidate checked against plain torch first
    4. plain torch, where timing is not allowed

A candidate other than torch must win by MARGIN, and plain torch is always among those timed: nobody is made
slower than with `F.linear`. A small product costs what launching it takes, but not where a captured graph is
replayed: one candidate is chosen for eager calls and one for graphs. Timing is not allowed while a CUDA graph
is captured or torch.compile traces, since neither may wait for the GPU, nor with TPKERNELS_TUNE=0. A choice
that was timed beside other work is made again, after some calls and by the next process.

Choosing takes half a minute at most: when CHECKING_SECONDS are over, what was not tried yet stays so, and is
logged. Ranks wait so much longer for a rank that may be choosing.

A choice changes who computes a product on this rank, never what is communicated, when, or in which shape:
that is decided elsewhere, from global shapes. Ranks choose for themselves until they are given a store to
agree through (see `cache`): then a choice is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.dispatch import log
from tpkernels.dispatch.cache import Cache, Choice, KeyValueStore, Published, versions_for
from tpkernels.dispatch.candidates import TuneKey, candidates, tune_key
from tpkernels.dispatch.checking import mismatch, poison_freed, results_of, scratch_like
from tpkernels.dispatch.record import Candidate, Primitive
from tpkernels.dispatch.timing import CudaStream, Timeable, Timer, time_on
from tpkernels.env import env_flag
from tpkernels.files import cache_folder
from tpkernels.kernels.operands import are_halves
from tpkernels.kernels.target import Target, fp32_precision, target_of

MARGIN = 0.03  # of the usual one's time: less is noise, and torch is lighter to launch
# of compiling candidates and comparing their results. One that has begun then is finished: compiling took 14
# at most where it was measured (erf, on two busy cores). Timing takes about one.
CHECKING_SECONDS = 15.0
MOST_SECONDS = 30.0  # of a choice
MOST_REMEMBERED = 4096  # calls: with batches of any length each brings new ones, of a few hundred bytes
CALLS_IN_COMPANY = 256  # by a choice that was timed beside other work, before it is made again
MOST_ATTEMPTS = 3  # to choose without company


class Request(NamedTuple):
    """A call of a primitive, for which a candidate is chosen."""

    record: Primitive[..., Any]
    arguments: tuple[Any, ...]  # looked at, never read or written: they may be on the meta device
    out: Sequence[Tensor]  # given tensors for results; none: they are allocated
    key: TuneKey
    candidates: Mapping[str, Candidate]  # by their names, in the order in which they are tried
    not_now: str  # why nothing can be timed at this moment, or ""

    @property
    def name(self) -> str:
        """The key, as files and logs name it."""
        return str(self.key)


def winner(milliseconds: Mapping[str, float], usual: str = "torch", margin: float = MARGIN) -> str:
    """Return the name of the fastest, if it beats the usual one by a margin, else that of the usual one."""
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    return fastest if milliseconds[fastest] < (1 - margin) * milliseconds[usual] else usual


def why_not_now(device: torch.device) -> str:
    """Return why nothing can be timed at this moment, or ""."""
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    return "a CUDA graph is being captured" if capturing(device) else ""


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Autotuner:
    """Chooses a candidate for each shape on one device."""

    def __init__(
        self,
        device: torch.device,
        target: Target,
        timer: Timer,
        cache: Cache,
        why_not_now: Callable[[torch.device], str] = why_not_now,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.target, self.cache = target, cache
        self._device, self._timer, self._why_not_now, self._clock = device, timer, why_not_now, clock
        self._published: Published | None = None
        self._extend_waits: Callable[[timedelta], None] = lambda more: None
        self._ways: dict[object, Callable[..., Any]] = {}
        self._attempts: dict[str, int] = {}  # to choose a key, of which all but the last had company
        self._made: dict[str, int] = {}  # in which attempt this process has timed a key
        self._logged: set[str] = set()  # what is logged once
        self._lock = Lock()  # forward and backward run in two threads, which must not time at once

    def way_of(
        self, record: Primitive[..., Any], arguments: Sequence[Any], out: Sequence[Tensor] = ()
    ) -> Callable[..., Any]:
        """Return what computes a primitive of these arguments. out: given tensors, its first argument"""
        signature = _signature(record.name, arguments, out)
        way = self._ways.get(signature)
        if way is None:
            with self._lock:
                way = self._ways.get(signature)
                if way is None:
                    way = self._choose(self.request(record, arguments, out), signature)
        return way

    def agree_through(self, store: KeyValueStore, extend_waits: Callable[[timedelta], None]) -> None:
        """From now on choose as the other ranks that were given this store.

        What was chosen before is chosen again: others may have chosen otherwise.

        extend_waits: lets this rank's next collective wait for so much longer
        """
        if self._published is None or self._published.store is not store:
            with self._lock:
                self._published = Published(store, self.cache.versions)
                self._extend_waits = extend_waits
                self._ways.clear()

    def request(
        self, record: Primitive[..., Any], arguments: Sequence[Any], out: Sequence[Tensor] = ()
    ) -> Request:
        """Return the request of a call."""
        key = tune_key(record, *arguments, out=out)
        found = {candidate.name: candidate for candidate in candidates(record, key, self.target)}
        return Request(record, tuple(arguments), out, key, found, self._why_not_now(self._device))

    def known(self, request: Request) -> Choice | None:
        """Return the choice that is cached, or the only candidate; None if timing must tell."""
        if len(request.candidates) == 1:
            return Choice("torch", source="only candidate")
        choice = self.cache.get(request.name)
        return choice if choice and request.candidates.keys() >= {*choice.names} else None  # else one is gone

    def timed(self, request: Request, seconds: float = CHECKING_SECONDS) -> Choice:
        """Time the candidates now, and keep the fastest on disk.

        seconds: after these no further candidate is tried
        """
        self._announce(request)
        try:
            times = self._timer(self._checked(request, seconds))
        except Exception as error:  # out of memory, most likely: a comparison takes more than torch alone
            log.warnings.warning("cannot time %s (%s): torch computes it", request.key, error)
            return Choice("torch", source=f"timing failed: {error}")
        eager, captured = winner(times.eager), winner(times.captured)
        choice = Choice(eager, times.eager, captured if captured != eager else "", times.company)
        self.cache.put(request.name, choice)
        return choice

    def _choose(self, request: Request, signature: object) -> Callable[..., Any]:
        agrees = self._published is not None and len(request.candidates) > 1
        choice = self._agreed(request) if agrees else self._own(request)
        log.choices.info("%s: %s", request.key, choice)
        way = self._bound(choice, request)
        if choice.source.startswith("not timed now") or (agrees and request.not_now):
            return way
        attempt = self._attempts.get(request.name, 0)
        if choice.company and attempt + 1 < MOST_ATTEMPTS:
            way = self._for_some_calls(way, signature, request.name, attempt)
        if len(self._ways) >= MOST_REMEMBERED:
            self._ways.clear()  # what is chosen again is in the cache
        self._ways[signature] = way
        return way

    def _for_some_calls(
        self, way: Callable[..., Any], signature: object, name: str, attempt: int
    ) -> Callable[..., Any]:
        """Return a way that is chosen again after some calls, at the same call on all ranks."""
        left = iter(range(CALLS_IN_COMPANY - 1))

        def run(*arguments: Any) -> Any:
            if next(left, None) is None:
                self._attempts[name] = max(self._attempts.get(name, 0), attempt + 1)
                self._ways.pop(signature, None)
            return way(*arguments)

        return run

    def _bound(self, choice: Choice, request: Request) -> Callable[..., Any]:
        """Return the function that computes a request, if need be by another candidate in graphs."""
        found, out = [request.candidates[name] for name in choice.names], request.out
        ways = [candidate.into if out else candidate.run for candidate in found]
        if len(ways) == 1:
            return ways[0]
        eager, captured = ways
        if not request.not_now:
            # a kernel is compiled and loaded by its first call, which eager warm-ups would not make
            try:
                scratch = scratch_like((*out, *request.arguments), request.key.depth, self._device)
                captured(*([scratch[: len(out)]] if out else []), *scratch[len(out) :])
            except Exception as error:  # out of memory, most likely
                dropped = "%s dropped for %s in captured graphs: %s"
                log.warnings.warning(dropped, choice.captured, request.key, error)
                return eager
        return lambda *arguments: (captured if capturing(self._device) else eager)(*arguments)

    def _own(self, request: Request) -> Choice:
        """Return the choice of this rank."""
        known, name, not_now = self.known(request), request.name, request.not_now
        attempt, may_time = self._attempts.get(name, 0), env_flag("TPKERNELS_TUNE", default=True)
        stands = not_now or not may_time or self._made.get(name) == attempt
        if known is not None and (stands or not known.company):
            return known
        if not may_time:
            return Choice("torch", source="not timed: TPKERNELS_TUNE=0")
        if not_now:
            if name not in self._logged:
                self._logged.add(name)
                never = "torch computes %s, which was never timed, as %s: make one eager call before"
                log.warnings.warning(never, name, not_now)
            return Choice("torch", source=f"not timed now: {not_now}")
        self._made[name] = attempt
        return self.timed(request)

    def _agreed(self, request: Request) -> Choice:
        """Return the choice of the rank that decides first.

        Where nothing can be timed now one rank may know more than another: what they agree on is not what
        they would agree on later, and is kept apart, as each attempt to choose without company is.
        """
        assert self._published is not None
        attempt = self._attempts.get(request.name, 0)
        under = f"{request.name}{f' attempt {attempt + 1}' * (attempt > 0)}{' now' * bool(request.not_now)}"
        self._extend_waits(timedelta(seconds=MOST_SECONDS))  # for peers that compile
        own, choice = None, self._published.get(under)
        if choice is None:
            own = self._own(request)
            choice = self._published.put(under, own)
            if choice.names == own.names:
                return own
        missing = [name for name in choice.names if name not in request.candidates]
        if missing:
            log.warnings.warning(
                "other ranks compute %s by %s, which is no candidate here: results may differ in bits",
                *(request.key, missing[0]),
            )
            return own or self._own(request)
        if choice.milliseconds:  # else nobody has timed it
            self._made[request.name] = attempt
            self.cache.put(request.name, choice)
        return choice

    def _announce(self, request: Request) -> None:
        """Log what is chosen before it takes its time; the first choice of a process is a warning."""
        among = f"among {len(request.candidates)} candidates: at most about {MOST_SECONDS:.0f} s"
        log.choices.info("choosing who computes %s, %s", request.key, among)
        if "" not in self._logged:
            self._logged.add("")
            first = "choosing who computes %s, %s for each new shape; TPKERNELS_LOG=choices shows all"
            log.warnings.warning(first, request.key, among)

    def _checked(self, request: Request, seconds: float) -> dict[str, Timeable]:
        """Return the candidates that agree with torch, each bound to the same scratch operands."""
        began, record, key = self._clock(), request.record, request.key
        scratch = scratch_like(request.arguments, key.depth, self._device)
        expected = results_of(record, record.by_torch, scratch)
        runs, untried = dict[str, Timeable](), list[str]()
        for name, candidate in request.candidates.items():
            if name != "torch" and self._clock() - began >= seconds:
                untried.append(name)
                continue
            try:
                poison_freed(expected)
                problem = mismatch(results_of(record, candidate.run, scratch), expected, key)
            except Exception as error:  # whatever a compiler or a launch raises: torch is there
                problem = f"{type(error).__name__}: {error}"
            if problem:
                log.warnings.warning("%s dropped for %s: %s", name, key, problem)
            else:
                runs[name] = partial(candidate.run, *scratch)
        if untried:
            log.warnings.warning(
                "%s: not tried within %g seconds: %s; `python -m tpkernels tune --again` does",
                *(key, seconds, ", ".join(untried)),
            )
        return runs


def _signature(name: str, arguments: Sequence[Any], out: Sequence[Tensor] = ()) -> object:
    """Return a key of all that a choice depends on. It is made in every call, and must be quick."""
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
def autotuner_on(device: torch.device) -> Autotuner:
    """Return the autotuner of a GPU of this machine, with its cache."""
    log.show_if_asked()
    cache = Cache(cache_folder(), versions_for(torch.cuda.get_device_name(device)))
    return Autotuner(device, target_of(device), lambda runs: time_on(CudaStream(device), runs), cache)
