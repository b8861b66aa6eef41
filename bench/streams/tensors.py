"""Tensors that look like a GPU's, in memory of the CPU; their computation is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from bench.streams.device import (
    AllocatorBlock,
    Device,
    MachineError,
    Span,
    Step,
    current_device,
)

# Products of torch, by the library that computes them, as torch's sources from 2.11 to 2.15 say: the one that
# is preferred, or always cuBLASLt, as for `addmm` of a bias.
_PREFERRED, _LT = ("mm", "addmm", "bmm", "baddbmm", "addmm_"), ("_addmm_activation", "_scaled_mm")


class VirtualTensor(Tensor):
    """A tensor of a virtual GPU."""

    elem: Tensor  # in the memory of its device
    block: AllocatorBlock  # freed with the last tensor in it

    @staticmethod
    def __new__(cls, elem: Tensor, block: AllocatorBlock) -> VirtualTensor:
        made: VirtualTensor = Tensor._make_wrapper_subclass(
            cls, elem.shape, strides=elem.stride(), storage_offset=elem.storage_offset(), dtype=elem.dtype
        )
        made.elem, made.block = elem, block
        return made

    # properties are defined below
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    device = property(lambda self: self.block.device.device)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        raise MachineError("the host copies device memory and waits: the machine records before it runs")

    numpy = tolist = item = cpu  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.block.used_elsewhere = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _dispatched(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"


class OnDevice(TorchDispatchMode):
    """Makes tensors for a CUDA device on the virtual device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each call, which would cost more than the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        options = dict(kwargs) if kwargs else {}
        options.pop("pin_memory", None)
        if VirtualTensor in types or any(map(_is_virtual, args)):
            return _dispatched(func, args, options)
        if not _is_cuda(options.get("device")):
            return func(*args, **options)
        return uploaded(func(*args, **(options | {"device": torch.device("cpu")})))


_tensor, _to = torch.tensor, Tensor.to


def tensor_stand_in(data: object, *, device: Any = None, **options: Any) -> Tensor:
    """Replaces `torch.tensor`."""
    made = _tensor(data, **options)
    return uploaded(made) if _is_cuda(device) else made


def moved(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
    """Replaces `Tensor.to`."""
    wanted = options.get("device", given[0] if given else None)
    if not _is_cuda(wanted):
        to_host = isinstance(wanted, (str, torch.device)) and torch.device(wanted).type == "cpu"
        return tensor.cpu() if to_host else _to(tensor, *given, **options)
    options.pop("device", None)
    others = [each for each in given if not _is_cuda(each)]
    there = tensor if isinstance(tensor, VirtualTensor) else uploaded(tensor)
    return _to(there, *others, **options) if others or options else there


def _is_virtual(argument: object) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(map(_is_virtual, argument))
    return isinstance(argument, VirtualTensor)


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def uploaded(values: Tensor) -> VirtualTensor:
    """Return a copy on the device, made in the current stream."""
    device = current_device()
    requires_grad, values = values.requires_grad, values.detach().clone()
    found, step = _new(device, values)
    device.enqueue("made or copied to the device", [[step]], on_processors=False)
    if requires_grad:
        found.requires_grad_()
    return found


def _new(device: Device, values: Tensor) -> tuple[VirtualTensor, Step]:
    block = device.allocate(values.nbytes or 1)
    elem = device.tensor(block, values.shape, values.stride(), values.dtype)
    elem.copy_(values)

    def fill() -> None:
        elem.copy_(values)

    return VirtualTensor(elem, block), Step(fill, writes=spans_of(elem))


def wrapped(device: Device, elem: Tensor) -> VirtualTensor:
    """Return shared memory as a tensor of this rank; it is never freed."""
    return VirtualTensor(elem, device.everlasting)


def spans_of(elem: Tensor) -> tuple[Span, ...]:
    """Return spans of a tensor's elements; several if its rows are not adjacent."""
    if not elem.numel():
        return ()
    dense = elem.is_contiguous() or elem.ndim < 2
    extent = sum((size - 1) * stride for size, stride in zip(elem.shape, elem.stride(), strict=True)) + 1
    if dense or extent == elem.numel():
        start = elem.data_ptr()
        return ((start, start + extent * elem.element_size()),)
    return tuple(span for part in elem.unbind() for span in spans_of(part))


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Run an operator on the memory's current values, for the results' shapes, and record it to run later."""
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor)]
    device, name = current_device(), func.overloadpacket.__name__
    if name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"):
        raise MachineError(f"the host reads device memory ({name}): the machine records before it runs")
    changed = list(_changed(func, args, kwargs))
    if name == "copy_" and not isinstance(args[0], VirtualTensor) and not _is_non_blocking(args, kwargs):
        raise MachineError("the host copies device memory and waits: the machine records before it runs")
    written_here = {id(tensor) for tensor in changed}

    def operand(leaf: object) -> object:
        """Read host tensors now, as a blocking copy does."""
        if type(leaf) is Tensor and id(leaf) not in written_here:
            return leaf.clone()
        return _elem(leaf)

    plain_args, plain_kwargs = tree_map(operand, (tuple(args), dict(kwargs)))
    result = func(*plain_args, **plain_kwargs)
    of_plain = {id(_elem(tensor)): tensor for tensor in changed}
    elems: list[Tensor] = []  # of results that are new
    writes = [tensor.elem for tensor in changed if isinstance(tensor, VirtualTensor)]

    def back(found: object) -> object:
        if not isinstance(found, Tensor):
            return found
        if id(found) in of_plain:
            return of_plain[id(found)]
        for tensor in inputs:
            if found.untyped_storage().data_ptr() == tensor.elem.untyped_storage().data_ptr():
                return VirtualTensor(found, tensor.block)
        made, _ = _new(device, found)
        elems.append(made.elem)
        writes.append(made.elem)
        return made

    results = tree_map(back, result)
    if not writes and not changed:
        return results
    if name in ("empty_like", "new_empty", "new_empty_strided"):
        return results

    def run() -> None:
        again = func(*plain_args, **plain_kwargs)
        if elems:
            owned = [
                leaf for leaf in tree_leaves(again) if isinstance(leaf, Tensor) and id(leaf) not in of_plain
            ]
            for elem, computed in zip(elems, owned, strict=True):
                elem.copy_(computed)

    written = {id(elem) for elem in writes}
    reads = [tensor.elem for tensor in inputs if id(tensor.elem) not in written and "like" not in name]
    # a word in memory that ranks share is a flag: it orders other accesses
    flags = [
        elem.data_ptr() for elem in writes if elem.nbytes == 4 and device.program.is_shared(elem.data_ptr())
    ]
    plain = [elem for elem in writes if elem.data_ptr() not in flags]
    step = Step(run, _all_spans(reads), _all_spans(plain), raises=lambda: flags)
    on_processors = not _by_copy_engine(device, name, [*writes, *reads])
    device.enqueue(name, [[step]], on_processors=on_processors, leaves=_left_by(device, name, args))
    return results


def _left_by(device: Device, name: str, args: Sequence[Any]) -> int | None:
    """Return how many processors a product of torch leaves free: cuBLAS none; None for other operators."""
    if name not in (*_PREFERRED, *_LT):
        return None
    by_lt = name in _LT or (name == "addmm" and args[0].ndim == 1)  # a fused bias
    reads_setting = by_lt or device.settings.library == torch._C._BlasBackend.Cublaslt
    return device.settings.reserved or 0 if reads_setting else 0


def _by_copy_engine(device: Device, name: str, elems: Sequence[Tensor]) -> bool:
    """Whether a copy engine copies: contiguous rows to another rank or to the host; else a kernel does."""
    dense = all(elem.is_contiguous() for elem in elems)
    return (
        name == "copy_"
        and dense
        and (len(elems) < 2 or not all(device.holds(elem.data_ptr()) for elem in elems))
    )


def _is_non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _elem(leaf: object) -> object:
    if isinstance(leaf, VirtualTensor):
        return leaf.elem
    if isinstance(leaf, torch.device) and leaf.type == "cuda":
        return torch.device("cpu")
    return leaf


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = (
                kwargs.get(argument.name) if argument.kwarg_only else (args[number : number + 1] or [None])[0]
            )
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield leaf


def _all_spans(elems: Sequence[Tensor]) -> tuple[Span, ...]:
    return tuple(span for elem in elems for span in spans_of(elem))
