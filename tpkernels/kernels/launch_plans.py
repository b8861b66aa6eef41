"""What a launcher does with operands of one kind: observed once, then repeated.

    @planned
    def linear_fwd(x, weight, ...): ...     checks, chooses a tile, allocates, describes operands, launches

A plan is what the second call on such operands has allocated, viewed and launched. Later calls, whose
operands differ in values and addresses alone, repeat it without checks and choices. The key of a plan has
all that a launcher may read: shapes, strides, dtypes, devices and alignment of tensors, which of them are
the same, the other arguments, and the settings that choices depend on. A launcher reads no values of
tensors on the host, and hands no address to a kernel but a tensor's own.

A launcher that calls another operator of torch, such as a sum, has no plan and runs each time. So does a call
whose `out` shares memory with another operand.

TPKERNELS_DEBUG=1: each call runs anew, and what it does is compared with its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.compiler import CompiledKernel

from tpkernels.env import env_flag
from tpkernels.kernels import invariance, launch
from tpkernels.kernels.operands import share_memory
from tpkernels.kernels.target import FP32_PRECISION, Target, carveout, emulated_target
from tpkernels.kernels.tiles import BlockTile, MatmulTile
from tpkernels.tp_invariance import segments_of_op

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

MOST_PLANS = 1024  # of a launcher: batches of any length bring new ones

# Types of values that hold no tensor and never change
_PLAIN = {type(None), bool, int, float, str, range, type, torch.dtype, torch.device, tl.dtype}
_PLAIN |= {MatmulTile, BlockTile, Target}

# Read once: looking into the environment takes as long as a tenth of a tiny product.
debug = env_flag("TPKERNELS_DEBUG", default=False)


class Step(NamedTuple):
    """A call of `function`. Tensors are numbered: operands of the launcher, then what steps have made."""

    function: Callable[..., Any]
    arguments: list[Any]  # None where a tensor belongs
    tensors: tuple[tuple[int, int, Any], ...]  # position, number of the tensor, its descriptor or None


LaunchPlan = tuple[Step, ...]  # the last step returns what the launcher does


def repeat(plan: LaunchPlan, tensors: list[Tensor]) -> Any:
    """tensors: the operands; what steps make is appended"""
    for function, arguments, places in plan:
        filled: list[Any] = arguments.copy()
        for position, number, descriptor in places:
            if descriptor is None:
                filled[position] = tensors[number]
            else:
                filled[position] = described = object.__new__(type(descriptor))  # whose checks have passed
                described.__dict__.update(descriptor.__dict__, base=tensors[number])
        made = function(*filled)
        if made is not None:
            tensors.append(made)
    return made


class _Start(NamedTuple):
    """Launches a kernel with arguments."""

    device: torch.device
    kernel: Any  # compiled, where Triton has compiled it: then all its parameters are arguments
    grid: tuple[int, ...]
    constants: dict[str, Any]

    def __call__(self, *arguments: Any) -> None:
        launch.unobserved(self.device, self.kernel, self.grid)(*arguments, **self.constants)


def _returned(kind: type[Any] | None, *results: Any) -> Any:
    """kind: of the tuple; None: a launcher has one result"""
    return results[0] if kind is None else tuple.__new__(kind, results)


class _Observer(TorchDispatchMode, launch.LaunchObserver):
    """Makes a plan of what is done meanwhile."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[Step] = []
        self._tensors = list(operands)  # held, so that no other one gets the id of one of them
        self._numbers = {id(tensor): number for number, tensor in enumerate(operands)}
        self._within_step = False  # what torch does then is part of a step
        self._repeatable = True

    def plan(self, result: Any) -> LaunchPlan | None:
        """The plan, if what was done can be repeated."""
        self._did(_returned, (type(result), *result) if isinstance(result, tuple) else (None, result))
        return tuple(self._steps) if self._repeatable else None

    def allocated(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._within_step = True
        made = launch.allocate(shape, dtype, device)
        self._within_step = False
        self._did(launch.empty, (shape, dtype, device), made)
        return made

    def started(
        self,
        start: Callable[..., object],
        device: torch.device,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        **constants: Any,
    ) -> None:
        self._within_step = True  # Triton may allocate, and its interpreter copies
        compiled = start(*arguments, **constants)
        self._within_step = False
        if isinstance(compiled, CompiledKernel):  # from now on without Triton's own look at the arguments
            taken = constants.keys() & kernel.signature.parameters
            bound = kernel.signature.bind(*arguments, **{name: constants[name] for name in taken})
            bound.apply_defaults()
            arguments, constants = tuple(bound.arguments.values()), {}
            kernel, grid = compiled, (*grid, 1, 1)[:3]
        self._repeatable &= _is_plain([*constants.values()])
        self._did(_Start(device, kernel, grid, constants), arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._within_step:
            is_view = func.is_view and isinstance(result, Tensor) and not kwargs
            self._repeatable &= is_view
            self._did(func, args, result if is_view else None)
        return result

    def _did(self, function: Any, given: Sequence[Any], made: Tensor | None = None) -> None:
        arguments, tensors = list(given), []
        for position, each in enumerate(given):
            tensor, descriptor = each, None
            if isinstance(getattr(each, "base", None), Tensor):
                tensor, descriptor = each.base, copy(each)
                descriptor.base = None
            if isinstance(tensor, Tensor):
                self._repeatable &= id(tensor) in self._numbers
                tensors.append((position, self._numbers.get(id(tensor), 0), descriptor))
                arguments[position] = None
        self._repeatable &= _is_plain(arguments)
        self._steps.append(Step(function, arguments, tuple(tensors)))
        if made is not None:
            self._numbers[id(made)] = len(self._tensors)
            self._tensors.append(made)


def _is_plain(value: Any) -> bool:
    """Whether it holds no tensor, and stays as it is."""
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else type(value) in _PLAIN


_ONCE, _NEVER = "seen once", "cannot be repeated"  # kinds of operands without a plan
_plans: list[dict[Any, LaunchPlan | str]] = []  # of each launcher, by key


def planned(launcher: Launcher) -> Launcher:
    """Decorate a launcher, so that it repeats its plans."""
    plans: dict[Any, LaunchPlan | str] = {}
    _plans.append(plans)

    @wraps(launcher)
    def run(*args: Any, **options: Any) -> Any:
        if launch.observing():  # by the plan of another launcher
            return launcher(*args, **options)
        operands: list[Tensor] = []
        try:
            key = key_of(args, options, operands)
        except (TypeError, RuntimeError):  # the launcher reports best what it does not take
            # kernels read memory, of which lazy negation says nothing; what they change may not be a copy
            changed = int(launcher.__name__.endswith("_") or bool(options.get("in_place")))
            kept = {"out": options.pop("out")} if "out" in options else {}
            read, named = tree_map_only(Tensor, lambda x: x.resolve_neg(), (args[changed:], options))
            return launcher(*args[:changed], *read, **named, **kept)
        found = plans.get(key)
        if type(found) is tuple and not debug:
            return repeat(found, operands)
        if len(plans) >= MOST_PLANS:
            plans.clear()
        if found != _ONCE and not debug:  # operands of lengths that vary: most kinds come once
            plans.setdefault(key, _ONCE)
            return launcher(*args, **options)
        observer = _Observer(operands)
        with launch.observed_by(observer), observer:
            result = launcher(*args, **options)
        plan = observer.plan(result)
        if type(found) is tuple and plan != found:
            raise AssertionError(
                f"{launcher.__name__}: the key of its plan lacks something: {found} is now {plan}"
            )
        plans[key] = plan or _NEVER
        return result

    return cast("Launcher", run)


def key_of(args: Sequence[Any], options: dict[str, Any], operands: list[Tensor]) -> tuple[Any, ...]:
    """All that a launcher may read. Appends the tensors among the arguments to `operands`."""
    segments, batch = segments_of_op(), invariance.batch_invariant
    key = [carveout(), FP32_PRECISION(), segments, batch, emulated_target.get(), (*options,)]
    _describe((*args, *options.values()), key, operands)
    if len({*map(id, operands)}) < len(operands):
        key.append(tuple(map([*map(id, operands)].index, map(id, operands))))
    if (out := options.get("out")) is not None:
        written: list[Tensor] = []
        _describe((out,), [], written)
        if any(share_memory(one, other) for one in written for other in operands if one is not other):
            raise TypeError("the launcher may refuse it")
    return tuple(key)


def _describe(values: Iterable[Any], key: list[Any], operands: list[Tensor]) -> None:
    for value in values:
        if type(value) in _PLAIN:
            key.append(value)
        elif isinstance(value, Tensor):
            if value.is_neg():
                raise TypeError("its memory does not hold its values")
            key += value.shape, value.stride(), value.dtype, value.device, value.data_ptr() & 15
            operands.append(value)
        elif isinstance(value, (tuple, list)):
            key += type(value), len(value)
            _describe(value, key, operands)
        else:
            raise TypeError("it may hold a tensor, or change")


def forget() -> None:
    """Drop all plans: something has changed that no key has, such as Triton's own settings."""
    for plans in _plans:
        plans.clear()
