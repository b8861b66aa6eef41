"""Activation checkpointing: backward computes intermediate results again instead of saving them.

Backward draws the same random numbers again, then sets all streams back to where they were. While a CUDA
graph is captured random states cannot be set, and operators that draw random numbers are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as checkpoint_in_torch

from tpkernels.groups.random import draws, get_rng_tracker, is_capturing
from tpkernels.layers.world import TensorWorld, tensor_world
from tpkernels.ops.tensor_parallel import mappings

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Compute function(*args, **kwargs), and save only the arguments for backward.

    A bool as the first argument is Megatron's `distribute_saved_activations`, and is not passed to
    `function`. If it is True, each tensor-parallel rank saves its shard of the next argument, a tensor that
    is the same on all ranks, and gathers it in backward. Pass a bool of the function's own by keyword.

    Communication in `function` is repeated in backward: all ranks must recompute.
    """
    distribute = False
    if args and isinstance(args[0], bool):
        distribute, args = args[0], args[1:]
        _refuse_own_bool(function, args, kwargs)
    return recomputed(function, distribute, args, kwargs)


def recomputed(
    function: Callable[..., T], distribute: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """As `checkpoint`, with the bool as an argument of its own. distribute: save shards of args[0]"""
    ways: dict[str, Any] = {"use_reentrant": False}
    if is_capturing():
        ways["preserve_rng_state"] = False
        ways["context_fn"] = lambda: (_NoDraws(), _NoDraws())  # type: ignore[no-untyped-call]  # torch's __init__
    elif not torch.compiler.is_compiling():  # the compiler restores random numbers by itself
        tracker = get_rng_tracker()
        moment = tracker.snapshot()
        ways["preserve_rng_state"] = False  # torch knows one stream only
        ways["context_fn"] = lambda: (nullcontext(), tracker.replay(moment))
    with _distributed(args[0] if args else None) if distribute else nullcontext():
        return cast("T", checkpoint_in_torch(function, *args, **ways, **kwargs))


class _NoDraws(TorchDispatchMode):
    """Refuses operators that draw random numbers: in backward they would draw other numbers."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if draws(func, args, kwargs or {}):
            raise RuntimeError(
                f"checkpoint: {func} draws random numbers, and a CUDA graph is being captured, in which "
                "torch cannot draw them again; set dropout to 0, or capture without recomputation"
            )
        return func(*args, **(kwargs or {}))


def _refuse_own_bool(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the bool may be meant for `function` rather than for `checkpoint`."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace inspect.signature
        raise TypeError("checkpoint: expected no bool after the function under torch.compile; leave it out")
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # of a builtin, say
        return
    try:
        signature.bind(*args, **kwargs)
        fits = True
    except TypeError:
        fits = False
    first = next((p for p in signature.parameters.values() if p.name not in kwargs), None)
    own = first is not None and ("bool" in str(first.annotation) or isinstance(first.default, bool))
    if own or not fits:
        raise TypeError(
            "checkpoint: a bool after the function is distribute_saved_activations, as in Megatron's "
            f"checkpoint(function, distribute_saved_activations, *args), but {function} seems to take it "
            f"itself: {signature}; pass the function's own bool by keyword"
        )


@contextmanager
def _distributed(first: object) -> Iterator[None]:
    """Let autograd save this rank's shard of `first`, instead of all of it, inside the block."""
    world = tensor_world()
    if not isinstance(first, Tensor):
        raise TypeError(
            "checkpoint: distribute_saved_activations=True expects a tensor as the first argument of the "
            f"function, got {type(first).__name__}"
        )
    if first.numel() % world.size:
        raise ValueError(
            "checkpoint: distribute_saved_activations=True expects a first argument whose elements the "
            f"{world.size} tensor-parallel ranks divide, got {tuple(first.shape)}"
        )
    if world.size == 1:
        yield
        return

    place = first.data_ptr(), first.shape  # the hooks live as long as the graph, and must not hold `first`

    def pack(saved: Tensor) -> Tensor | _Shard:
        return _Shard(saved, world) if (saved.data_ptr(), saved.shape) == place else saved

    def unpack(kept: Tensor | _Shard) -> Tensor:
        return kept.gathered() if isinstance(kept, _Shard) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Shard:
    """This rank's elements of a tensor that all ranks of a tensor-parallel group hold."""

    def __init__(self, full: Tensor, world: TensorWorld) -> None:
        flat = full.detach().reshape(-1)
        self.elements = flat.tensor_split(world.size)[world.rank].clone()
        self.shape = full.shape
        self.hashes = _hashes(full.detach())
        self.world = world

    @torch.no_grad()
    def gathered(self) -> Tensor:
        flat = mappings.gather_from_sequence_region(self.elements, self.world.group)
        full = flat.view(self.shape)
        if not torch.equal(_hashes(full), self.hashes):  # ranks that differ gather a mixture
            raise RuntimeError(
                "checkpoint: distribute_saved_activations=True expects the first argument of the function to "
                "be the same on all tensor-parallel ranks, but it differed; pass False where ranks hold "
                "different tokens, as under sequence parallelism"
            )
        return full


def _hashes(full: Tensor) -> Tensor:
    """Hash each row and each column: a hash of all elements does not depend on their order."""
    if not full.numel():
        return full.flatten()
    rows = full.flatten(0, -2) if full.ndim > 1 else full[None]
    return torch.cat([torch.hash_tensor(rows, 0), torch.hash_tensor(rows, 1)])
