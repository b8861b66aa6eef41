"""Checks that tensor-parallel ranks call a model with the same inputs; an error names those that differ.

If tensor-parallel ranks read different batches, their results are meaningless, yet replicas need not drift:
masks and pixel values act between layers. So in its first call a layer finds the outermost module that is
being called, the root. Ranks compare checksums of the root's input tensors in its first, second, fourth,
eighth, ... call, and in every 100th (TPKERNELS_CHECK_REPLICAS).

Tensors that may differ are not compared:

DTensors       their placements say what differs
activations    tensors that require gradients; in calls without gradients any floating ones, such as keys and
               values of this rank's heads
shards         all inputs, if layers of the root take shards of tokens or features, and none of them makes any
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.groups.checksums import sums_on_device
from tpkernels.groups.random import is_capturing
from tpkernels.groups.state import current_or_none
from tpkernels.layers import replicas
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.replicas import agree_on_data, differs_between_ranks

_MOST_ELEMENTS = 2**22  # of one tensor that are compared
_DEEPEST = 6  # containers in containers
_CALL = nn.Module._wrapped_call_impl.__code__  # what runs when a module is called


def find_root_before(layer: nn.Module) -> None:
    """Register a hook that finds the root in the first call of `layer`.

    layer: a module with a `world`, or with such modules inside
    """
    layer.register_forward_pre_hook(_find_root)


def look_at_compiled(parent: nn.Module, name: str, module: nn.Module) -> None:
    """torch's hook for a module that becomes an attribute: find the root from the wrapper of a compiled one.

    Hooks of layers inside a compiled module do not run.
    """
    if name == "_orig_mod" and any(map(_is_split, module.modules())):
        find_root_before(parent)


def _is_split(module: nn.Module) -> bool:
    return isinstance(getattr(module, "world", None), TensorWorld)


def _find_root(layer: nn.Module, _: object) -> None:
    if torch.compiler.is_compiling():
        return
    for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is _find_root]:
        del layer._forward_pre_hooks[key]
    world = next(filter(_is_split, layer.modules())).world
    assert isinstance(world, TensorWorld)
    state = current_or_none()
    if world.size == 1 or (state is not None and not set(world.ranks) <= set(state.ranks("tp"))):
        return  # ranks of experts, for example, have batches of their own
    found = _outermost_call()
    if not any(isinstance(hook, Batches) for hook in found["self"]._forward_pre_hooks.values()):
        batches = Batches(world)
        found["self"].register_forward_pre_hook(batches, with_kwargs=True)
        batches(found["self"], found["args"], found["kwargs"])


def _outermost_call() -> Mapping[str, Any]:
    """Find `self`, `args` and `kwargs` of the outermost module call on the stack."""
    frame: FrameType | None = inspect.currentframe()
    found = frame
    while frame is not None:
        found, frame = (frame if frame.f_code is _CALL else found), frame.f_back
    assert found is not None, "a hook runs while its module is called"
    return found.f_locals


class Batches:
    """A forward pre-hook of the root that compares its inputs between ranks in some calls."""

    def __init__(self, world: TensorWorld) -> None:
        self._world = world
        self._calls = 0
        self._comparing: _Comparing | None = None  # begun by the call before, on a GPU

    def __call__(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not replicas.steps_between_checks or _is_no_ordinary_call():
            return
        if self._comparing is not None:
            comparing, self._comparing = self._comparing, None
            comparing.wait()
        self._calls = calls = self._calls + 1
        if calls & (calls - 1) and calls % replicas.steps_between_checks:
            return
        if not _takes_shards(root):
            named = [*_data_of(root, args, kwargs)]
            comparing = _Comparing(type(_unwrapped(root)).__name__, named, self._world)
            if comparing.arrival is None:
                comparing.wait()
            else:
                self._comparing = comparing

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_calls": 0, "_comparing": None}


class _Comparing:
    """A comparison of checksums over ranks.

    arrival: the event after which the host has the result; None: the host has it
    """

    @torch.no_grad()
    def __init__(self, request: str, named: list[tuple[str, Tensor]], world: TensorWorld) -> None:
        self._request, self._group = f"inputs of {request}", world.group
        self._described = [f"'{name}' {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
        self._sums = sums_on_device([_some_of(tensor) for _, tensor in named])
        weights = torch.arange(1, 2 * len(named) + 1, 2, device=self._sums.device)
        described = zlib.crc32("\n".join(self._described).encode())
        differ = differs_between_ranks((self._sums * weights).sum() + described, self._group)
        self._differ, self.arrival = _on_host(differ)

    def wait(self) -> None:
        """Wait for the result; all ranks raise the same error if inputs differ."""
        if self.arrival is not None:
            self.arrival.synchronize()
        if self._differ:
            sums = [f"{total % 2**64:016x}" for total in self._sums.tolist()]
            described = zip(self._described, sums, strict=True)
            agree_on_data(self._request, [f"{said} with checksum {s}" for said, s in described], self._group)


def _on_host(flag: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Copy a flag to the host; return it with the event after which the copy is done, or None."""
    if flag.is_cpu:
        return flag, None
    there = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
    return there, torch.accelerator.current_stream(flag.device).record_event()


def _is_no_ordinary_call() -> bool:
    """Whether a call is a recomputation in backward, or is captured into a CUDA graph."""
    if torch._C._current_graph_task_id() != -1:
        return True
    return is_capturing()


def _takes_shards(root: nn.Module) -> bool:
    """Whether inputs of the root are shards: its layers take shards, and none of them makes any."""
    layers = [vars(module) for module in root.modules()]
    shared = [layer for layer in layers if layer.get("sequence_parallel") is True]
    makes_tokens = any("vocab_start_index" in layer for layer in shared)
    takes_features = any(layer.get("input_is_parallel") is True for layer in layers)
    makes_features = any(layer.get("gather_output") is False for layer in layers)
    return (bool(shared) and not makes_tokens) or (takes_features and not makes_features)


def _data_of(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the inputs that must be the same on all ranks."""
    names = _names_of(_unwrapped(root))[: len(args)]
    names += [f"argument {number}" for number in range(len(names), len(args))]
    for name, value in chain(zip(names, args, strict=True), kwargs.items()):
        yield from ((n, tensor) for n, tensor in _tensors_in(name, value, _DEEPEST) if _is_data(tensor))


def _names_of(root: nn.Module) -> list[str]:
    """The names of positional parameters of `forward`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(root.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _unwrapped(root: nn.Module) -> nn.Module:
    """The module inside wrappers, such as torch.compile's or DistributedDataParallel."""
    while not _names_of(root) and len(root._modules) == 1 and (inner := next(root.children(), None)):
        root = inner
    return root


def _tensors_in(name: str, value: object, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, Mapping):
        inner = ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{name}[{number}]", each) for number, each in enumerate(value))
    elif is_dataclass(value):
        inner = ((f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value))
    if depth:
        for longer, each in inner:
            yield from _tensors_in(longer, each, depth - 1)


def _is_data(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a DTensor, or no numbers at all
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    return not tensor.requires_grad and (is_integral or torch.is_grad_enabled())


def _some_of(tensor: Tensor) -> Tensor:
    """The tensor, or evenly spread elements of a huge tensor."""
    tensor = tensor.as_subclass(Tensor).detach().resolve_conj().resolve_neg()
    while (excess := -(-tensor.numel() // _MOST_ELEMENTS)) > 1:
        longest = max(range(tensor.ndim), key=tensor.size)
        tensor = tensor[(slice(None),) * longest + (slice(None, None, min(excess, tensor.size(longest))),)]
    return tensor
