"""A GPU that computes nothing, for tests marked `gpu` on a machine without one.

Its tensors have shapes, dtypes and a device, but no memory. Torch's operators are asked for shapes alone;
kernels are not run: each launch is bound to the kernel's own parameters, as Triton binds it. Streams, events
and graphs are those of `bench.streams`.

Comparisons of numbers are vacuous in one place, `_read`: a number that the host reads is 0, and a comparison
holds. What shows is a wrong signature, shape, dtype or device, and what this kind of GPU cannot run.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from math import prod
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work, _SymmetricMemory
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.streams.device import Device, Event, Program, Step
from bench.streams.record import torchs_api
from tests.loopback import VirtualHandle
from tests.ranks import RankPool
from tpkernels import reserved_sms
from tpkernels.comm.transports import c10d, select, symmetric
from tpkernels.dispatch import autotune, backends, primitives, timing
from tpkernels.kernels import interpret, launch_plans
from tpkernels.kernels import target as targets
from tpkernels.kernels.target import A100, B200, H100, L40S, MI300, Target

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

T = TypeVar("T")
TARGETS = {"sm_80": A100, "sm_89": L40S, "sm_90": H100, "sm_100": B200, "gfx942": MI300}
_COUNTED = {"_hog_kernel": "started_ptr"}  # its programs count themselves, and the host waits for all
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_FP8 = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}


@dataclass
class StandIn:
    """What a test may ask of the GPU that it ran on."""

    name: str
    target: Target
    device: Device
    launches: Counter[str] = field(default_factory=Counter)  # by kernel
    numbers: dict[int, int] = field(default_factory=dict)  # that the host reads, by address; others are 0
    milliseconds: float = 0.0  # of all work so far: a nanosecond an element

    def works(self, tensors: Sequence[object], name: str = "launch") -> None:
        """Enqueue work on these tensors in the current stream; only a capture keeps it."""
        self.milliseconds += sum(each.numel() for each in tensors if isinstance(each, Tensor)) * 1e-6
        if self.device.capture is not None:
            self.device.enqueue(name, [[Step()]])

    def launched(self, kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
        """Bind a launch as Triton's `JITFunction.run` does."""
        name, parameters = kernel.__name__, _signature(kernel.fn)
        options = {option: named.pop(option) for option in [*named] if option not in parameters.parameters}
        arguments = dict(parameters.bind(*given, **named).arguments)
        compiled = _backend(self.target).parse_options(options)
        if unknown := options.keys() - vars(compiled).keys():
            raise KeyError(f"{name}: Triton knows no options {sorted(unknown)}")
        for argument, value in arguments.items():
            self._require_takes(f"{name}: {argument}", value, compiled.supported_fp8_dtypes)
        sizes = tuple(grid(arguments) if callable(grid) else grid)
        if not all(isinstance(size, int) and 0 <= size < 2**31 for size in sizes):
            raise TypeError(f"{name}: expected a grid of integers, got {sizes}")
        self.device.load(name)
        self.works([*arguments.values()], name)
        if name in _COUNTED:
            self.numbers[arguments[_COUNTED[name]].data_ptr()] = prod(sizes)
        self.launches[name] += 1

    def _require_takes(self, argument: str, value: Any, fp8: Sequence[str]) -> None:
        tensor = value.base if isinstance(value, TensorDescriptor) else value
        if isinstance(value, TensorDescriptor) and not self.target.has_tma:
            raise ValueError(f"{argument} is a descriptor, and the GPU has no TMA")
        if not isinstance(tensor, Tensor):
            return
        if tensor.device.type != "cuda":
            raise ValueError(f"{argument}: a pointer into {tensor.device} cannot be accessed from Triton")
        if _FP8.get(tensor.dtype, "fp8e5") not in fp8:
            raise ValueError(f"{argument}: type {_FP8[tensor.dtype]} is not supported on this GPU")


_signature = cache(inspect.signature)


@cache
def _backend(target: Target) -> BaseBackend:
    hip = target.backend == "hip"
    return make_backend(GPUTarget(*(("hip", "gfx942", 64) if hip else ("cuda", target.capability, 32))))


_addresses = count(1)  # in units of 64 GiB, one for each storage


class GpuTensor(Tensor):
    """A tensor of the GPU, or a copy of its numbers on the host; torch's C++ takes it for one of the CPU."""

    like: Tensor  # on the meta device
    start: int  # address of its storage
    device = property(lambda self: self._device)
    is_cuda = property(lambda self: self._device is CUDA)
    is_cpu = property(lambda self: self._device is CPU)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, among: Sequence[GpuTensor] = ()) -> GpuTensor:
        """among: tensors whose storage it may have"""
        made: GpuTensor = Tensor._make_wrapper_subclass(
            *(cls, like.shape), strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype
        )
        made.like, made._device = like, device  # type: ignore[attr-defined]
        storage = like.untyped_storage()._cdata
        starts = (each.start for each in among if each.like.untyped_storage()._cdata == storage)
        made.start = next(starts, 0) or next(_addresses) << 36
        return made

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def data_ptr(self) -> Any:
        """Return an address that no other storage has, or had before, aligned as torch's allocator does."""
        return self.start + self.storage_offset() * self.element_size()

    def untyped_storage(self) -> Any:
        return self.like.untyped_storage()

    def tolist(self) -> Any:
        return torch.zeros(self.shape, dtype=self.dtype).tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _moved(self, CPU)

    def record_stream(self, stream: torch.Stream) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:  # type: ignore[override]
        return _dispatched(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class NumbersNeeded(RuntimeError):
    """A result has a shape that depends on numbers."""


_current: list[StandIn] = []


def _read(operand: Tensor) -> bool | int | float:
    """Return what the host reads where nothing is: a comparison holds; a number is 0, or as a test says."""
    if operand.dtype == torch.bool:
        return True
    return _current[-1].numbers.get(operand.data_ptr(), torch.zeros((), dtype=operand.dtype).item())


class _OnGpu(TorchDispatchMode):
    """Makes tensors for a CUDA device without memory."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if GpuTensor in types or _is_cuda(options.get("device")) or any(map(_is_ours, _leaves(args))):
            return _dispatched(func, args, options)
        return func(*args, **options)


def _is_ours(argument: object) -> bool:
    return isinstance(argument, GpuTensor)


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(change: Callable[[object], object], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, each) for each in value])
    return change(value)


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Ask an operator for the shapes of its results."""
    name = func.overloadpacket.__name__
    operands = [leaf for leaf in _leaves([*args, *kwargs.values()]) if isinstance(leaf, Tensor)]
    ours = [operand for operand in operands if isinstance(operand, GpuTensor)]
    if func.namespace == "c10d":  # a collective moves nothing
        work = Work.boxed(FakeWork())
        return work if len(func._schema.returns) == 1 else (args[0], work)
    if func.namespace == "symm_mem":  # a word is written
        return args[0]
    if name in ("_local_scalar_dense", "is_nonzero"):
        return _read(ours[0])
    if name == "equal":
        return args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
    if name == "copy_" and not _is_ours(args[0]):  # to memory of the host
        return args[0].fill_(_read(args[1]))
    wanted = kwargs.get("device")
    if name == "_to_copy" and wanted == CPU and not args[0].is_floating_point():  # whose memory is looked at
        return torch.full(args[0].shape, _read(args[0]), dtype=kwargs.get("dtype", args[0].dtype))
    on_gpu = _is_cuda(wanted) if wanted is not None else any(leaf.is_cuda for leaf in ours)
    apart = {str(leaf.device) for leaf in operands if leaf.ndim}
    if len(apart) > 1 and name not in ("copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, got {sorted(apart)}")

    of_plain: dict[int, Tensor] = {}

    def plain(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            made = leaf.like if isinstance(leaf, GpuTensor) else leaf.to("meta")
            of_plain[id(made)] = leaf
            return made
        return None if isinstance(leaf, torch.Generator) else leaf

    plain_args = [_mapped(plain, each) for each in args]
    plain_kwargs = {word: _mapped(plain, each) for word, each in kwargs.items()}
    if wanted is not None:
        plain_kwargs["device"] = torch.device("meta")
    shaped = _scaled_mm_out if func is torch.ops.aten._scaled_mm.out else func
    try:
        found = shaped(*plain_args, **plain_kwargs)
    except NotImplementedError as error:
        raise NumbersNeeded(f"{name}: shapes depend on numbers") from error
    device = CUDA if on_gpu else CPU

    def back(result: object) -> object:
        if not isinstance(result, Tensor):
            return result
        return of_plain[id(result)] if id(result) in of_plain else GpuTensor(result, device, ours)

    results = _mapped(back, found)
    if on_gpu and not func.is_view:
        _current[-1].works([*operands, *_leaves(results)], name)
    return results


def _scaled_mm_out(*given: Any, out: Tensor, **options: Any) -> Tensor:
    """Check and return `out`; torch has no form of it for tensors without memory."""
    made = torch.ops.aten._scaled_mm.default(*given, **options)
    assert (made.shape, made.dtype) == (out.shape, out.dtype)
    return out


_tensor, _to = torch.tensor, Tensor.to


def _made(data: object, *, device: Any = None, **options: Any) -> Tensor:
    """Replaces `torch.tensor`."""
    made = _tensor(data, device="cpu", **options)
    there = torch.empty(0).device if device is None else device  # as a context says
    return GpuTensor(made.to("meta"), CUDA) if _is_cuda(there) else made.to(there)


def _moved(tensor: Tensor, *given: Any, **options: Any) -> Tensor:
    """Replaces `Tensor.to`."""
    places = [each for each in (*given, options.get("device")) if isinstance(each, (str, torch.device))]
    others = [each for each in given if not isinstance(each, (str, torch.device))]
    if not places or (not _is_cuda(places[0]) and not _is_ours(tensor)):
        return _to(tensor, *given, **options)
    options.pop("device", None)
    if isinstance(tensor, GpuTensor) and torch.device(places[0]).type == "meta":
        return _to(tensor.like, *others, **options)
    if _is_cuda(places[0]) != tensor.is_cuda:
        tensor = torch.ops.aten._to_copy(tensor, device=torch.device(places[0]))
    return _to(tensor, *others, **options) if others or options else tensor


class _Generator(torch.Generator):
    """Replaces `torch.Generator`: whatever its device is, nobody draws its numbers there."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    def __init__(self, device: Any = "cpu") -> None:
        self._device = CUDA if _is_cuda(device) else CPU

    device = property(lambda self: self._device)


class _Event(Event):
    """On the stand-in's clock."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.at = _current[-1].milliseconds

    def query(self) -> bool:
        """The stream is held for as long as the host likes."""
        return False

    def elapsed_time(self, end: _Event) -> float:
        self.require_recorded()
        end.require_recorded()
        return end.at - self.at


def _symmetric_bytes(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Replaces `_SymmetricMemory.empty_strided_p2p`."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _rendezvous(memory: Tensor, group_name: GroupName) -> VirtualHandle:
    """Replaces torch's `rendezvous`: memory of the other ranks is there, and nobody else writes it."""
    group = _resolve_process_group(group_name)
    memories = [torch.empty_like(memory) for _ in range(group.size())]
    memories[group.rank()] = memory
    return VirtualHandle(memories, group.rank())


# of a device
_CACHED: tuple[Any, ...] = (
    autotune.autotuner_on,
    primitives.autotuner_on,
    backends._resolved,
    backends._takes_reserved_sms,
    c10d.processors_of,
    reserved_sms.measured,
)


def _forget() -> None:
    """Forget what was found out about another machine."""
    launch_plans.forget()
    for cached in _CACHED:
        cached.cache_clear()


@contextmanager
def stand_in(name: str) -> Iterator[StandIn]:
    """Have `torch.cuda` be a GPU of this kind."""
    target = TARGETS[name]
    major, minor = divmod(target.capability or 94, 10)
    properties = SimpleNamespace(
        name=f"stand-in for {name}",
        multi_processor_count=target.processors,
        major=major,
        minor=minor,
        L2_cache_size=1 << 25,
        total_memory=1 << 36,
        uuid=f"GPU-{name}",
    )
    device = Device(Program(1, target.processors), 0)
    gpu = StandIn(name, target, device)
    cuda = torch.cuda
    changes = [
        *torchs_api(device, properties),
        patch.object(torch, "tensor", _made),
        patch.object(Tensor, "to", _moved),
        patch.object(Tensor, "cuda", lambda tensor, *_, **__: _moved(tensor, CUDA)),
        patch.object(torch, "Generator", _Generator),
        patch.object(torch, "Event", _Event),
        patch.object(cuda, "Event", _Event),
        patch.object(cuda, "is_available", lambda: True),
        patch.object(cuda, "device_count", lambda: 1),
        patch.object(cuda, "set_device", lambda _: None),
        patch.object(cuda, "device", lambda _: nullcontext()),
        patch.object(cuda, "get_device_name", lambda *_: properties.name),
        patch.object(cuda, "get_device_capability", lambda *_: (major, minor)),
        patch.object(cuda, "_sleep", lambda cycles: gpu.works([torch.empty(cycles, device="meta")])),
        patch.object(torch.version, "hip", "7.0" if target.backend == "hip" else None),
        patch.object(KernelInterface, "__getitem__", lambda *launch: partial(gpu.launched, *launch)),
        patch.object(interpret, "INTERPRETING", False),
        patch.object(targets, "_gpu", lambda _: target),
        patch.object(cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
        patch.object(cuda, "set_rng_state", lambda *_: None),
        patch.object(cuda, "manual_seed", lambda _: None),
        patch.object(_SymmetricMemory, "empty_strided_p2p", _symmetric_bytes),
        patch.object(symmetric_memory, "get_backend", lambda _: "CUDA"),
        patch.object(symmetric_memory, "rendezvous", _rendezvous),
        patch.object(symmetric, "why_no_stream_writes", lambda _: ""),  # it reads a number that it wrote
        patch.object(symmetric, "waiting_for", lambda *_: nullcontext()),
        patch.object(symmetric, "steps", lambda: None),
        patch.multiple(timing, WARM_UPS=1, FEWEST_ROUNDS=2, MOST_ROUNDS=2),
    ]
    with ExitStack() as entered:
        folder = entered.enter_context(TemporaryDirectory())
        entered.enter_context(patch.dict(os.environ, TPKERNELS_CACHE_DIR=folder))
        for change in changes:
            entered.enter_context(change)
        entered.enter_context(device)
        entered.enter_context(_OnGpu())
        _current.append(gpu)
        _forget()
        try:
            yield gpu
        finally:
            _forget()
            _current.pop()
            device.close()


@dataclass(frozen=True)
class RanksOnStandIn:
    """Ranks of a pool, each on a stand-in for a GPU; their messages between hosts are real."""

    pool: RankPool
    gpu: str

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 180.0) -> list[T]:
        return self.pool.run(_on_stand_in, self.gpu, function, *args, timeout=timeout)


def _on_stand_in(gpu: str, function: Callable[..., T], *args: Any) -> T:
    with stand_in(gpu):
        try:
            return function(*args)
        finally:
            for exchanges in [*select._of_group.values()]:  # else with their groups, when the GPU is gone
                exchanges.close()


# As a plugin, `pytest -p tests.stand_in_gpu`, it has a whole run take TPKERNELS_STAND_IN for its GPU. There
# tests of numbers end where they compare; what else they raise is a fault.
_run = ExitStack()


def pytest_configure() -> None:
    _run.enter_context(stand_in(os.environ["TPKERNELS_STAND_IN"]))


def pytest_unconfigure() -> None:
    _run.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a room only tests on a device of their choice."""
    others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def compares_numbers(error: BaseException) -> bool:
    """Whether a test has failed for want of numbers. The text of an error does not depend on them."""
    text, kinds = str(error), (AssertionError, pytest.fail.Exception, NumbersNeeded)
    return isinstance(error, kinds) and not text.startswith("Regex pattern")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and compares_numbers(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: compares numbers")
    return report
