"""What a launcher does with operands of one kind: observed once, then repeated.

    @planned
    def linear_fwd(x, weight, ...): ...     checks, chooses a tile, allocates, describes operands, launches

A plan is what the second call on such operands has allocated, viewed and launched. A later call, whose
operands differ in numbers and addresses alone, repeats it and looks at nothing again. The key of a plan has
all that a launcher may look at: shapes, strides, dtypes, devices and alignment of tensors, which of them are
one, the other arguments, and the settings that choices depend on. A launcher reads no numbers on the host,
and hands no address to a kernel but a tensor's own.

A launcher that calls another operator of torch, such as a sum, has no plan and runs each time. So does a call
with memory twice where results must have their own.

TPKERNELS_DEBUG=1: each call runs anew, and what it does is compared with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel

from tpkernels import tp_invariance
from tpkernels.env import env_flag
from tpkernels.extension import steps
from tpkernels.kernels import invariance, launch
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.operands import share_memory
from tpkernels.kernels.target import FP32_PRECISION, Target, emulated_target

P = ParamSpec("P")
R = TypeVar("R")

MOST_PLANS = 1024  # of a launcher: batches of any length bring new ones

# Read once: looking into the environment takes as long as a tenth of a tiny product.
debug = env_flag("TPKERNELS_DEBUG", default=False)


class _Seen(Enum):
    """A kind of operands without a plan."""

    ONCE = "once"
    WITHOUT_PLAN = "what it does cannot be repeated"


Plans = dict[Any, Any]  # by key: a LaunchPlan, or the extension's form of it; else what was _Seen

_plans: list[Plans] = []  # of each launcher


class Arguments(NamedTuple):
    """Of a kernel or an operator, without the tensors. Tensors are numbered: operands, then what was made."""

    others: list[Any]  # None where a tensor belongs
    tensors: tuple[tuple[int, int], ...]  # position, and number of the tensor
    descriptors: tuple[tuple[int, int, Any], ...]  # position, number of the tensor, and its descriptor

    @staticmethod
    def of(given: Sequence[Any], number_of: Callable[[Tensor], int]) -> Arguments:
        others: list[Any] = []
        tensors, descriptors = [], []
        for position, each in enumerate(given):
            if isinstance(each, Tensor):
                tensors.append((position, number_of(each)))
                each = None
            elif isinstance(base := getattr(each, "base", None), Tensor):
                descriptor = copy(each)
                descriptor.base = None
                descriptors.append((position, number_of(base), descriptor))
                each = None
            others.append(each)
        return Arguments(others, tuple(tensors), tuple(descriptors))

    def of_tensors(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The arguments, with these tensors."""
        filled = self.others.copy()
        for position, number in self.tensors:
            filled[position] = tensors[number]
        for position, number, descriptor in self.descriptors:
            described = object.__new__(type(descriptor))  # whose checks have passed
            described.__dict__ = {**descriptor.__dict__, "base": tensors[number]}
            filled[position] = described
        return filled


class Allocate(NamedTuple):
    """Allocates a result, or scratch memory of a kernel."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def run(self, tensors: list[Tensor]) -> None:
        tensors.append(launch.allocate(self.shape, self.dtype, self.device))


class TakeView(NamedTuple):
    """Makes a tensor of the memory of another."""

    operator: Callable[..., Tensor]  # of torch's dispatcher
    arguments: Arguments

    def run(self, tensors: list[Tensor]) -> None:
        tensors.append(self.operator(*self.arguments.of_tensors(tensors)))


_QUICKER = {torch.ops.aten.t.default: Tensor.t}  # than through Python's form of an operator


class Start(NamedTuple):
    """Launches a kernel."""

    device: torch.device
    kernel: Any  # compiled, where Triton has compiled it: then all its parameters are arguments
    grid: tuple[int, ...]
    arguments: Arguments
    constants: Mapping[str, Any]

    def run(self, tensors: list[Tensor]) -> None:
        start = launch.unobserved(self.device, self.kernel, self.grid)
        start(*self.arguments.of_tensors(tensors), **self.constants)


Step = Allocate | TakeView | Start


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a call does, in steps, and what it returns."""

    steps: tuple[Step, ...]
    results: Arguments
    returns: type | None  # the kind of tuple; None: the only result itself
    apart: tuple[tuple[int, int], ...]  # operands that may not share memory

    def fits(self, operands: Sequence[Tensor]) -> bool:
        """Whether they lie in memory as the key does not say."""
        return not any(share_memory(operands[one], operands[other]) for one, other in self.apart)

    def run(self, operands: list[Tensor]) -> Any:
        for step in self.steps:
            step.run(operands)
        results = self.results.of_tensors(operands)
        return results[0] if self.returns is None else tuple.__new__(self.returns, results)


class _Observer(TorchDispatchMode, launch.LaunchObserver):
    """Makes a plan of what is done meanwhile."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Step] = []
        self._apart: list[tuple[int, int]] = []
        self._tensors = list(operands)  # held, so that no other one gets the id of one of them
        self._numbers = {id(tensor): number for number, tensor in enumerate(operands)}
        self._operands = len(operands)
        self._own: set[int] = set()  # those with memory of their own
        self._looks = True
        self._repeatable = True

    def plan(self, result: Any) -> LaunchPlan | None:
        """The plan, if what was done can be repeated."""
        several = isinstance(result, tuple)
        results = self._arguments(result if several else (result,))
        made = LaunchPlan(tuple(self._steps), results, type(result) if several else None, tuple(self._apart))
        return made if self._repeatable else None

    def allocated(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._looking_away():
            made = launch.allocate(shape, dtype, device)
        self._own.add(len(self._tensors))
        return self._made(made, Allocate(shape, dtype, device))

    def started(
        self,
        start: Callable[..., object],
        device: torch.device,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        **constants: Any,
    ) -> None:
        with self._looking_away():  # Triton may allocate, and its interpreter copies
            compiled = start(*arguments, **constants)
        if isinstance(compiled, CompiledKernel):  # from now on without Triton's own look at the arguments
            taken = constants.keys() & kernel.signature.parameters
            bound = kernel.signature.bind(*arguments, **{name: constants[name] for name in taken})
            bound.apply_defaults()
            arguments, constants = tuple(bound.arguments.values()), {}
            kernel, grid = compiled, (*grid, 1, 1)[:3]
        self._require_plain(constants.values())
        self._steps.append(Start(device, kernel, grid, self._arguments(arguments), constants))

    @contextmanager
    def _looking_away(self) -> Iterator[None]:
        """What torch does now is part of a step."""
        self._looks = False
        try:
            yield
        finally:
            self._looks = True

    def kept_apart(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        numbers = [self._number_of(tensor) for tensor in (*written, *read)]
        for i, one in enumerate(numbers[: len(written)]):
            self._apart += [(one, other) for other in numbers[i + 1 :] if not {one, other} & self._own]
        self._repeatable &= all(number < self._operands for pair in self._apart for number in pair)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._looks:
            if func.is_view and isinstance(result, Tensor) and not kwargs:
                return self._made(result, TakeView(_QUICKER.get(func, func), self._arguments(args)))
            self._repeatable = False
        return result

    def _made(self, tensor: Tensor, step: Step) -> Tensor:
        self._steps.append(step)
        self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        return tensor

    def _number_of(self, tensor: Tensor) -> int:
        self._repeatable &= id(tensor) in self._numbers
        return self._numbers.get(id(tensor), 0)

    def _arguments(self, given: Sequence[Any]) -> Arguments:
        arguments = Arguments.of(given, self._number_of)
        self._require_plain(arguments.others)
        return arguments

    def _require_plain(self, values: Iterable[Any]) -> None:
        self._repeatable &= all(map(_is_plain, values))


_PLAIN = frozenset(
    (type(None), bool, int, float, str, range, torch.dtype, torch.device, tl.dtype, MatmulTile, Target)
)


def _is_plain(value: Any) -> bool:
    """Whether it is no tensor, holds none, and stays as it is."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, type) or not is_dataclass(value):
        return isinstance(value, type)
    return all(_is_plain(getattr(value, each.name)) for each in fields(value))


def planned(launcher: Callable[P, R]) -> Callable[P, R]:
    """Decorate a launcher, so that it repeats its plans."""
    plans: Plans = {}
    _plans.append(plans)

    @wraps(launcher)
    def run(*args: P.args, **options: P.kwargs) -> R:
        if launch.observing():  # by the plan of another launcher
            return launcher(*args, **options)
        if (native := _native()) is not None and not debug:
            repeated = native.repeat(plans, args, options)
            if repeated is not NotImplemented:
                return repeated  # type: ignore[no-any-return]
        operands: list[Tensor] = []
        try:
            key = key_of(args, options, operands)
        except (TypeError, RuntimeError):  # arguments that it does not take, which it says best
            # but not what it changes, by torch's rule of names or by an option: a copy would be changed
            written = int(launcher.__name__.endswith("_") or bool(options.get("in_place")))
            args = (*args[:written], *map(_resolved, args[written:]))  # type: ignore[assignment]
            kept = {name: value if name == "out" else _resolved(value) for name, value in options.items()}
            return launcher(*args, **kept)  # type: ignore[arg-type]
        found = plans.get(key)
        if not debug:
            if isinstance(found, LaunchPlan) and found.fits(operands):
                return found.run(operands)  # type: ignore[no-any-return]
            if found is not _Seen.ONCE:
                if found is None:  # operands of lengths that vary: most kinds come once
                    _keep(plans, key, _Seen.ONCE)
                return launcher(*args, **options)
        observer = _Observer(operands)
        with launch.observed_by(observer), observer:
            result = launcher(*args, **options)
        plan = observer.plan(result)
        if isinstance(found, LaunchPlan) and found.fits(operands) and plan != found:
            raise AssertionError(
                f"{launcher.__name__}: the key of its plan lacks something: {found} is now {plan}"
            )
        if plan is not None and native is not None and not debug:
            plan = native.Plan(plan.steps, plan.results, plan.returns, plan.apart)
        _keep(plans, key, plan or _Seen.WITHOUT_PLAN)
        return result

    return run


def _resolved(value: Any) -> Any:
    """Without torch's lazy negation, of which kernels, which read memory, know nothing."""
    if isinstance(value, Tensor):
        return value.resolve_neg()
    if not isinstance(value, (tuple, list)):
        return value
    return getattr(type(value), "_make", type(value))(map(_resolved, value))


def _keep(plans: dict[Any, Any], key: object, found: object) -> None:
    """In place of the oldest, if there are too many."""
    if len(plans) >= MOST_PLANS and key not in plans:
        with suppress(KeyError, StopIteration, RuntimeError):  # another thread may do the same
            del plans[next(iter(plans))]
    plans[key] = found


# What launchers look at besides their arguments: attributes, context variables, functions.
_SETTINGS: tuple[Any, ...] = (
    torch._C._get_sm_carveout_experimental,
    FP32_PRECISION,
    (tp_invariance.mode, "segments"),
    (invariance, "batch_invariant"),
    emulated_target,
)


def _value_of(setting: Any) -> Any:
    if isinstance(setting, tuple):
        return getattr(*setting)
    return setting.get() if isinstance(setting, ContextVar) else setting()


@cache
def _native() -> Any:
    """Keys and plans in C++; None without the extension."""
    if (native := steps()) is not None:
        native.bind_launch_plans(launch, _SETTINGS, _PLAIN, _is_plain, share_memory)
    return native


def key_of(args: Sequence[Any], options: Mapping[str, Any], operands: list[Tensor]) -> tuple[Any, ...]:
    """All that a launcher may look at. operands: the tensors among the arguments are appended, each once"""
    if (native := _native()) is not None:
        return native.key_of(args, options, operands)  # type: ignore[no-any-return]
    key = [*map(_value_of, _SETTINGS), *options]
    numbers: dict[int, int] = {}
    _describe(args, key, operands, numbers)
    _describe(options.values(), key, operands, numbers)
    return tuple(key)


def _describe(values: Iterable[Any], key: list[Any], operands: list[Tensor], numbers: dict[int, int]) -> None:
    """numbers: of operands, by id"""
    for value in values:
        if isinstance(value, Tensor):
            if (number := numbers.setdefault(id(value), len(operands))) < len(operands):
                key.append(number)
                continue
            if value.is_neg():
                raise TypeError("its memory does not hold its numbers")
            key += value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15
            operands.append(value)
        elif isinstance(value, (tuple, list)):
            key += type(value), len(value)
            _describe(value, key, operands, numbers)
        elif type(value) in _PLAIN or _is_plain(value):
            key.append(value)
        else:
            raise TypeError("it may hold a tensor, or change")


def forget() -> None:
    """Drop all plans: something has changed that no key has, such as Triton's own settings."""
    for plans in _plans:
        plans.clear()
