"""Named random streams: ranks draw alike where they must, and apart where they should.

    default                 the same on all tensor-parallel ranks (dropout between layers)
    data-parallel-rng       seeded like the default stream, but a stream of its own
    model-parallel-rng      different on each tensor-parallel rank (dropout inside a split layer)
    expert-parallel-rng     different for each expert shard

The generators are torch's own global ones, for the CPU and for the current CUDA device: whatever draws from
them inside `fork(name)` draws from that stream.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from tpkernels.runtime.state import current, on_the_fly

DEFAULT_STREAM = "default"
DATA_PARALLEL_STREAM = "data-parallel-rng"
MODEL_PARALLEL_STREAM = "model-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"

# Megatron's distances between the streams' seeds: a run started there goes on here with the same numbers.
_MODEL_PARALLEL_OFFSET = 2718
_EXPERT_PARALLEL_OFFSET = 1024
_EXPERT_RANK_STRIDE = 100

Generators = dict[str, Tensor]  # device type -> state of that device's generator


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The streams at some moment."""

    live: str
    states: Mapping[str, Generators]


class RngTracker:
    """Streams by name. One is live in torch's generators; the states of the others wait here."""

    def __init__(self) -> None:
        self._waiting: dict[str, Generators] = {}
        self._seeds: set[int] = set()
        self._live = DEFAULT_STREAM

    def reset(self) -> None:
        """Forget every named stream. The default stream goes on."""
        self._check_not_forked("reset")
        self._waiting.clear()
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """A new stream that starts from `seed`. The live stream is not disturbed."""
        if name == DEFAULT_STREAM or name in self._waiting:
            raise ValueError(f"random stream {name!r} exists already")
        seed = checked_seed(seed)
        if seed in self._seeds:
            raise ValueError(f"seed {seed} is taken by another random stream: the two would draw alike")
        self._waiting[name] = _started_from(seed)
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream `name` inside the block. Nests; the same name inside itself goes on."""
        if name != DEFAULT_STREAM and name not in self._waiting:
            known = ", ".join(dict.fromkeys([DEFAULT_STREAM, *self._waiting]))
            raise ValueError(
                f"no random stream {name!r}; known are {known}; "
                "tpkernels.manual_seed(seed) adds the usual ones"
            )
        outside = self._live
        if name == outside:  # nothing to exchange, and no reason to wake CUDA up
            yield
            return
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outside)

    def get_states(self) -> dict[str, Generators]:
        """Every stream's state, the default stream's too: what a checkpoint keeps."""
        return {**self._waiting, self._live: _read()}

    def set_states(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from what `get_states` gave. Streams that are not among `states` are forgotten."""
        if not isinstance(states, Mapping) or not {DEFAULT_STREAM, self._live} <= states.keys():
            needed = sorted({DEFAULT_STREAM, self._live})
            raise ValueError(f"expected the states that get_states() gave, among them those of {needed}")
        for name, generators in states.items():
            _check_state(name, generators)
        self._waiting = {name: dict(generators) for name, generators in states.items()}
        _write(self._waiting[self._live])

    def snapshot(self) -> Snapshot:
        """All streams as they are, and which is live: what `replay` goes back to."""
        return Snapshot(self._live, self.get_states())

    @contextmanager
    def replay(self, moment: Snapshot) -> Iterator[None]:
        """Draw once more what was drawn after `moment`; afterwards all streams go on from where they are."""
        present = self.snapshot()
        self._return_to(moment)
        try:
            yield
        finally:
            self._return_to(present)

    def _return_to(self, moment: Snapshot) -> None:
        self._live = moment.live
        self._waiting = dict(moment.states)
        _write(moment.states[moment.live])

    def _switch(self, name: str) -> None:
        self._waiting[self._live] = _read()
        _write(self._waiting[name])
        self._live = name

    def _check_not_forked(self, action: str) -> None:
        if self._live != DEFAULT_STREAM:
            raise RuntimeError(f"cannot {action} random streams inside fork({self._live!r})")


_TRACKER = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The streams of this process."""
    return _TRACKER


def manual_seed(seed: int) -> None:
    """Seed torch's generators and the named streams for this rank of the current parallel state."""
    state, changed = current(), on_the_fly()
    seed = checked_seed(seed)
    tensor_rank = state.rank_in("tp") if changed.tensor_rank is None else changed.tensor_rank
    model_seed = checked_seed(seed + _MODEL_PARALLEL_OFFSET + tensor_rank)
    expert_seed = checked_seed(
        seed + _EXPERT_PARALLEL_OFFSET + _EXPERT_RANK_STRIDE * state.rank_in("ep") + tensor_rank
    )
    tracker = get_rng_tracker()
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add(DATA_PARALLEL_STREAM, seed)
    tracker.add(MODEL_PARALLEL_STREAM, model_seed)
    tracker.add(EXPERT_PARALLEL_STREAM, expert_seed)


def checked_seed(seed: int) -> int:
    """`seed` as a plain int that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise TypeError(f"a seed must be an integer, got {seed!r}")
    number = operator.index(seed)
    if not 0 <= number < 2**63:
        raise ValueError(f"a seed must be from 0 to 2**63 - 1, got {number}")
    return number


def _started_from(seed: int) -> Generators:
    states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return states


def _check_state(name: str, generators: object) -> None:
    """Before anything is replaced: a state that torch would not take leaves the streams as they are."""
    if not isinstance(generators, Mapping) or "cpu" not in generators:
        raise ValueError(f"the state of random stream {name!r} holds no state of the CPU's generator")
    try:
        torch.Generator().set_state(generators["cpu"])
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the state of random stream {name!r} is not one of a generator: {error}") from None


def _read() -> Generators:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _write(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
        else:
            warnings.warn(
                "these random states were saved without CUDA: the CUDA generator stays as it is", stacklevel=3
            )
