"""Named random streams, the same on all tensor-parallel ranks or different on each.

    default                 the same on all tensor-parallel ranks (dropout between layers)
    data-parallel-rng       seeded like the default stream, but a stream of its own
    model-parallel-rng      different on each tensor-parallel rank (dropout inside a split layer)
    expert-parallel-rng     different for each expert shard

The generators are torch's own global ones, for the CPU and for the current CUDA device: inside `fork(name)`
all random numbers come from that stream. Megatron's streams do not change the CPU's generator, nor do these
after `manual_seed(seed, cuda_only=True)`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload

from tpkernels.errors import warn
from tpkernels.groups.state import current, overwritten

DEFAULT_STREAM = "default"
DATA_PARALLEL_STREAM = "data-parallel-rng"
MODEL_PARALLEL_STREAM = "model-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"

# Megatron's offsets between the streams' seeds: a run that began with Megatron continues with the same
# numbers.
_MODEL_PARALLEL_OFFSET = 2718
_EXPERT_PARALLEL_OFFSET = 1024
_EXPERT_RANK_STRIDE = 100

_NO_BACKWARD = -1  # torch's id outside of a backward

Generators = dict[str, Tensor]  # device type -> state of that device's generator
# A stream's state: by device type, or for one device as in Megatron
GivenState = Mapping[str, Tensor] | Tensor | torch.Generator


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states of all streams at one moment."""

    live: str
    states: Mapping[str, Generators]
    cpu: Tensor  # the CPU generator's state, which CUDA-only streams do not include


def _checked_cuda_only(cuda_only: bool) -> bool:
    if cuda_only and not torch.cuda.is_available():
        raise RuntimeError(
            "cuda_only=True: expected a CUDA device, found none; "
            "leave cuda_only out to seed the CPU's generator"
        )
    return cuda_only


class RngTracker:
    """Random streams by name; one is live in torch's generators, the states of the others are kept here.

    cuda_only: streams do not include the CPU's generator, and forks do not change it
    """

    def __init__(self, *, cuda_only: bool = False) -> None:
        self._waiting: dict[str, Generators] = {}
        self._seeds: set[int] = set()
        self._live = DEFAULT_STREAM
        self._restored_in = _NO_BACKWARD  # the backward in which all streams were restored
        self._cuda_only = _checked_cuda_only(cuda_only)

    @property
    def _devices(self) -> list[str]:
        """The device types of a stream's generators."""
        found = ["cuda"] if torch.cuda.is_available() else []
        return found if self._cuda_only else ["cpu", *found]

    def reset(self, *, cuda_only: bool | None = None) -> None:
        """Remove every named stream. The default stream continues.

        cuda_only: whether later streams are CUDA-only; None: as before
        """
        self._check_not_forked("reset")
        self._cuda_only = _checked_cuda_only(self._cuda_only if cuda_only is None else cuda_only)
        self._waiting.clear()
        self._seeds.clear()

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts from `seed`. The live stream does not change."""
        if name == DEFAULT_STREAM or name in self._waiting:
            raise ValueError(f"random stream {name!r} exists already")
        seed = checked_seed(seed)
        if seed in self._seeds:
            raise ValueError(f"seed {seed} is taken by another random stream: the two would draw alike")
        self._waiting[name] = {
            device: _generator(device).manual_seed(seed).get_state() for device in self._devices
        }
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream `name` inside the block. Blocks nest, also with the same name."""
        if name != DEFAULT_STREAM and name not in self._waiting:
            known = ", ".join(dict.fromkeys([DEFAULT_STREAM, *self._waiting]))
            raise ValueError(
                f"no random stream {name!r}; known are {known}; "
                "tpkernels.manual_seed(seed) adds the usual ones"
            )
        outside = self._live
        if name == outside:  # nothing to do, and no reason to initialize CUDA
            yield
            return
        self._check_not_recomputed_by_others(name)
        if is_capturing():
            raise RuntimeError(
                f"random stream {name!r}: a CUDA graph is being captured, in which torch sets no random "
                "states; set dropout to 0, or keep layers that draw from this stream out of the graph"
            )
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outside)

    def get_states(self) -> dict[str, Generators]:
        """Return every stream's state, the default stream's included, for checkpoints."""
        return {**self._waiting, self._live: _read(self._devices)}

    def set_states(self, states: Mapping[str, GivenState]) -> None:
        """Set all streams to states from `get_states`, and remove streams without a state.

        states: or those of Megatron's tracker: a tensor or generator for each stream except the default
            stream. The default stream and the CPU's states, which Megatron does not have, continue.
        """
        needed = sorted({DEFAULT_STREAM, self._live})
        if isinstance(states, Mapping) and _is_megatrons(states) and needed == [DEFAULT_STREAM]:
            present = self.get_states()
            given = {name: self._sorted(state) for name, state in states.items()}
            for name, state in given.items():
                _check_devices(name, state, self._devices)
            given = {name: present.get(name, {}) | state for name, state in given.items()}
            given[DEFAULT_STREAM] = present[DEFAULT_STREAM]
        elif isinstance(states, Mapping) and set(needed) <= states.keys():
            given = {name: self._sorted(state) for name, state in states.items()}
        else:
            raise ValueError(
                f"expected states from get_states(), with those of {needed}; outside of a fork also those of "
                "Megatron's tracker, a tensor or generator for each named stream"
            )
        for name, generators in given.items():
            _check_state(name, generators, self._devices[0])
        self._waiting = given
        self._restored_in = _this_backward()
        _write(given[self._live], self._devices)

    def _sorted(self, state: object) -> Generators:
        """Sort a given state of a stream by device type."""
        if isinstance(state, Mapping):
            return dict(state)
        if isinstance(state, torch.Generator):
            return {state.device.type: state.get_state()}
        if not isinstance(state, Tensor):
            return {}  # refused later by an error with its name
        is_cpus = "cpu" in self._devices and state.numel() == torch.Generator().get_state().numel()
        return {"cpu" if is_cpus else "cuda": state}

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all streams, and of the live stream's name, for `replay`."""
        return Snapshot(self._live, self.get_states(), torch.get_rng_state())

    @contextmanager
    def replay(self, moment: Snapshot) -> Iterator[None]:
        """Draw the same numbers as after `moment` inside the block; afterwards all streams continue."""
        present, restored_in = self.snapshot(), self._restored_in
        self.return_to(moment)
        self._restored_in = _this_backward()
        try:
            yield
        finally:
            self.return_to(present)
            self._restored_in = restored_in

    def return_to(self, moment: Snapshot) -> None:
        """Set all streams, and the choice of the live stream, to a snapshot."""
        self._live = moment.live
        self._waiting = dict(moment.states)
        torch.set_rng_state(moment.cpu)
        _write(moment.states[moment.live], self._devices)

    def _switch(self, name: str) -> None:
        self._waiting[self._live] = _read(self._devices)
        _write(self._waiting[name], self._devices)
        self._live = name

    def _check_not_recomputed_by_others(self, name: str) -> None:
        """Raise in a backward whose recomputation has not restored the waiting streams."""
        backward = _this_backward()
        if backward not in (_NO_BACKWARD, self._restored_in):
            raise RuntimeError(
                f"random stream {name!r}: expected tpkernels.checkpoint around layers that draw from it, got "
                "a backward that computes them again by other means, such as torch.utils.checkpoint, which "
                "restores torch's own generators only: it would draw other numbers than forward did; use "
                "tpkernels.checkpoint, or recompute= of the layers"
            )

    def _check_not_forked(self, action: str) -> None:
        if self._live != DEFAULT_STREAM:
            raise RuntimeError(f"cannot {action} random streams inside fork({self._live!r})")


_TRACKER = RngTracker()


def get_rng_tracker() -> RngTracker:
    """Return the tracker of this process's streams."""
    return _TRACKER


def manual_seed(seed: int, *, cuda_only: bool = False) -> None:
    """Seed torch's generators and the named streams for this rank of the current parallel state.

    cuda_only: only the CUDA device's generator, like Megatron's `model_parallel_cuda_manual_seed`; the CPU's
        is neither seeded nor forked
    """
    state, set_by_caller = current(), overwritten()
    tensor_rank = set_by_caller.get("tensor_rank", state.rank_in("tp"))
    expert_rank = set_by_caller.get("expert_rank", state.rank_in("ep"))
    in_expert = set_by_caller.get("expert_tensor_rank", tensor_rank)
    seed_streams(get_rng_tracker(), seed, tensor_rank, expert_rank, in_expert, cuda_only=cuda_only)
    if cuda_only:
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def seed_streams(
    tracker: RngTracker,
    seed: int,
    tensor_rank: int,
    expert_rank: int,
    rank_in_expert: int,
    *,
    cuda_only: bool,
) -> None:
    """Replace the named streams by new ones, seeded as in Megatron. The live stream does not change."""
    seed = checked_seed(seed)
    seeds = {
        DATA_PARALLEL_STREAM: seed,
        MODEL_PARALLEL_STREAM: seed + _MODEL_PARALLEL_OFFSET + tensor_rank,
        EXPERT_PARALLEL_STREAM: seed
        + _EXPERT_PARALLEL_OFFSET
        + _EXPERT_RANK_STRIDE * expert_rank
        + rank_in_expert,
    }
    seeds = {name: checked_seed(each) for name, each in seeds.items()}
    tracker.reset(cuda_only=cuda_only)
    for name, each in seeds.items():
        tracker.add(name, each)


def checked_seed(seed: int) -> int:
    """Return `seed` as an int that torch accepts; raise otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise TypeError(f"a seed must be an integer, got {seed!r}")
    number = operator.index(seed)
    if not 0 <= number < 2**63:
        raise ValueError(f"a seed must be from 0 to 2**63 - 1, got {number}")
    return number


def draws(function: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments; attention does for its dropout only."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    names = [argument.name for argument in function._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _this_backward() -> int:
    """Return the id of the backward that runs in this thread."""
    return torch._C._current_graph_task_id()


def _generator(device: str) -> torch.Generator:
    return torch.Generator(device)


def _is_megatrons(states: Mapping[str, object]) -> bool:
    """Whether each state is of one device, and there is none for the default stream."""
    return (
        bool(states)
        and DEFAULT_STREAM not in states
        and all(isinstance(state, Tensor | torch.Generator) for state in states.values())
    )


def _check_devices(name: str, given: Generators, devices: list[str]) -> None:
    """Raise unless states fit generators of `devices`.

    For Megatron's states: their devices are inferred from types and sizes.
    """
    for device, state in given.items():
        if device not in devices:
            raise ValueError(
                f"the state of random stream {name!r} is of a generator of {device}, but these streams have "
                f"generators of {', '.join(devices)} only"
            )
        _try(name, device, state)


def _check_state(name: str, generators: Generators, device: str) -> None:
    """Raise unless a stream's states include one of `device`'s generator.

    Called before any change, so that an error leaves the streams unchanged.
    """
    if device not in generators:
        raise ValueError(
            f"the state of random stream {name!r} holds no state of the {device.upper()}'s generator, and "
            "there is none to continue from; manual_seed(seed) adds the usual streams, and "
            "manual_seed(seed, cuda_only=True) adds Megatron's, of a CUDA device only"
        )
    _try(name, device, generators[device])


def _try(name: str, device: str, state: Tensor) -> None:
    try:
        _generator(device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"the state of random stream {name!r} is not one of a generator of {device}: {error}"
        ) from None


def _read(devices: list[str]) -> Generators:
    read = {"cpu": torch.get_rng_state, "cuda": torch.cuda.get_rng_state}
    return {device: read[device]() for device in devices}


def _write(states: Mapping[str, Tensor], devices: list[str]) -> None:
    write = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for device in devices:
        if device in states:
            write[device](states[device])
        else:
            warn(
                "these random states were saved without CUDA: the CUDA generator stays as it is", stacklevel=4
            )
