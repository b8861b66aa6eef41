"""Megatron's random streams and `checkpoint`, over `groups.random`: the streams that our layers draw from.

With CUDA the streams are states of its generator alone, as in Megatron. Without CUDA they are states of the
CPU's generator, so that programs run there, too. Seeding does not change the CPU's generator that the caller
draws from: it gives the numbers of a stream only inside `fork(name)`, and only without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from tpkernels.groups import random as streams
from tpkernels.groups.random import DEFAULT_STREAM, MODEL_PARALLEL_STREAM, RngTracker, Snapshot
from tpkernels.interop.megatron_core import parallel_state
from tpkernels.layers.checkpoint import recomputed

__all__ = [
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "initialize_rng_tracker",
    "is_checkpointing",
    "model_parallel_cuda_manual_seed",
]

T = TypeVar("T")
States = Mapping[str, Tensor | torch.Generator]


class CudaRNGStatesTracker:
    """Megatron's tracker over ours: a state is one tensor; the default stream is not included."""

    def __init__(
        self,
        use_cudagraphable_rng: bool = False,
        is_inference_rng_tracker: bool = False,
        *,
        tracker: RngTracker | None = None,
    ) -> None:
        """tracker: the streams, by default new ones"""
        if use_cudagraphable_rng:
            raise NotImplementedError(
                "use_cudagraphable_rng: expected False: tpkernels' streams are states, not generators that "
                "CUDA graphs register"
            )
        self.use_cudagraphable_rng = False
        self.is_inference_rng_tracker = is_inference_rng_tracker
        self.tracker = RngTracker(cuda_only=torch.cuda.is_available()) if tracker is None else tracker

    def is_initialized(self) -> bool:
        """Whether there are streams."""
        return bool(self.get_states())

    def reset(self) -> None:
        """Forget every stream."""
        self.tracker.reset()

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each stream: of the CUDA generator, or of the CPU's without CUDA."""
        return {
            name: state["cuda"] if "cuda" in state else state["cpu"]
            for name, state in self.tracker.get_states().items()
            if name != DEFAULT_STREAM
        }

    @property
    def states_(self) -> dict[str, Tensor]:
        """As `get_states`."""
        return self.get_states()

    def set_states(self, states: States) -> None:
        """Set the streams to states from `get_states`, ours or Megatron's, and drop other streams."""
        if states:
            self.tracker.set_states(states)
        else:
            self.tracker.reset()

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts from `seed`."""
        self.tracker.add(name, seed)

    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> AbstractContextManager[None]:
        """Draw from the stream `name` inside the block."""
        return self.tracker.fork(name)


class _InferenceTracker(CudaRNGStatesTracker):
    """A tracker for inference, which draws from the default stream only."""

    def add(self, name: str, seed: int) -> None:
        """Nothing."""

    def set_states(self, states: States) -> None:
        """Nothing."""

    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> AbstractContextManager[None]:
        """Nothing: draw from the default stream."""
        return nullcontext()


class _TrackerOfProcess:
    """The tracker that `get_cuda_rng_tracker` returns, and the depth of running checkpoints."""

    tracker: CudaRNGStatesTracker | None = None
    checkpoints: int = 0  # that are running


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make the tracker of this process, unless there is one."""
    if use_te_rng_tracker:
        raise NotImplementedError("use_te_rng_tracker: expected False: the streams are tpkernels'")
    if force_reset or _TrackerOfProcess.tracker is None:
        chosen = _InferenceTracker if inference_rng_tracker else CudaRNGStatesTracker
        _TrackerOfProcess.tracker = chosen(
            use_cudagraphable_rng, inference_rng_tracker, tracker=streams.get_rng_tracker()
        )


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Return the tracker of this process. Only the first call's arguments count."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert _TrackerOfProcess.tracker is not None
    return _TrackerOfProcess.tracker


def get_all_rng_states() -> dict[str, Tensor]:
    """The state of each stream of this process."""
    return get_cuda_rng_tracker().get_states()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
    *,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seed the CUDA generator and the named streams of this rank, not the CPU's generator.

    tp_rank, ep_rank, etp_rank: by default those of the current parallel state
    gtp_remat_rank and after: arguments of newer Megatrons, which change nothing for one rank
    """
    if not isinstance(force_reset_rng, bool):
        raise TypeError(
            f"force_reset_rng: expected True or False, got {force_reset_rng!r}: newer Megatrons take "
            "gtp_remat_rank in its place; pass both by keyword"
        )
    for size in (gtp_remat_world_size, egtp_remat_world_size):
        if size not in (None, 1):
            raise NotImplementedError(f"gtp_remat_world_size: expected 1, got {size}")
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
    streams.seed_streams(
        streams.get_rng_tracker(),
        seed,
        parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank,
        parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank,
        (parallel_state.get_expert_tensor_parallel_rank() or 0) if etp_rank is None else etp_rank,
        cuda_only=torch.cuda.is_available(),
    )
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def checkpoint(function: Callable[..., T], distribute_saved_activations: bool | None, *args: Any) -> T:
    """Compute function(*args), and compute it again in backward.

    distribute_saved_activations: each tensor-parallel rank saves its shard of args[0]. The argument itself
        does not change; Megatron replaces its data by the shard.
    """

    def running(*given: Any) -> T:
        _TrackerOfProcess.checkpoints += 1
        try:
            return function(*given)
        finally:
            _TrackerOfProcess.checkpoints -= 1

    return recomputed(running, bool(distribute_saved_activations), args, {})


def is_checkpointing() -> bool:
    """Whether a function of `checkpoint` is running, for the first or the second time."""
    return _TrackerOfProcess.checkpoints > 0


# Functions that Megatron's own CheckpointWithoutOutput takes from its module.


def _get_all_rng_states() -> tuple[Snapshot]:
    return (streams.get_rng_tracker().snapshot(),)


def _set_all_rng_states(moment: Snapshot) -> None:
    streams.get_rng_tracker().return_to(moment)


@contextmanager
def _fork_rng() -> Iterator[None]:
    tracker = streams.get_rng_tracker()
    with tracker.replay(tracker.snapshot()):
        yield
