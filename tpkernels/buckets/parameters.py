"""Checks of `GradientBuckets` on parameters and the training loop, and attributes that it sets.

Three mistakes would give wrong numbers without an error, and are refused here. The gradient of a parameter
that joined the module later is not reduced. An optimizer that steps before `finish` uses this rank's
gradients only. Ranks that begin with different weights stay different, because averaged gradients keep the
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, ValuesView
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tpkernels import tp_invariance
from tpkernels.buckets.step import BucketStep, part_of_a_step
from tpkernels.comm.agreement import Claim, Problem, agree
from tpkernels.groups.checksums import sums_of_bits

NamedParameters = list[tuple[str, nn.Parameter]]
_END = (object(),)


def given_parameters(module_or_named_parameters: object) -> tuple[NamedParameters, Problem | None]:
    """Return names and parameters, tied ones once, with frozen ones; or none, and why they are refused."""
    if isinstance(module_or_named_parameters, nn.Module):
        pairs: Iterable[object] = module_or_named_parameters.named_parameters()
    elif isinstance(module_or_named_parameters, Iterable):
        pairs = module_or_named_parameters
    else:
        kind = type(module_or_named_parameters).__name__
        return [], ("TypeError", f"expected a module or pairs of name and parameter, got {kind}")
    named: NamedParameters = []
    known: set[int] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            return [], ("TypeError", f"expected pairs of name and parameter, got {type(pair).__name__}")
        name, parameter = pair
        if not isinstance(name, str):
            return [], ("TypeError", f"expected a name for each parameter, got {name!r}")
        if not parameter.is_leaf:
            return [], (
                "ValueError",
                f"'{name}' is computed from other tensors; expected a parameter (a leaf)",
            )
        if is_under_buckets(parameter):
            return [], (
                "ValueError",
                f"'{name}' is under other GradientBuckets already; call detach() on these first",
            )
        if id(parameter) not in known:
            known.add(id(parameter))
            named.append((name, parameter))
    name, count = Counter(["", *(name for name, p in named if p.requires_grad)]).most_common(1)[0]
    if count > 1:
        return [], ("ValueError", f"{count} parameters are called '{name}'; names must differ")
    return named, None


def problem_of_order(named: Sequence[tuple[str, Tensor]], marked: Sequence[bool]) -> Problem | None:
    """Return why these parameters are refused with TP-invariance; None if they are not.

    marked: for each parameter, whether its gradient is summed over the tensor-parallel group as well
    """
    if not tp_invariance.default.segments:
        return None
    for (name, _), is_marked in zip(named, marked, strict=True):
        if is_marked:
            return "ValueError", (
                f"'{name}' is marked sequence_parallel: its gradient would be added over tensor-parallel "
                "ranks in an order that TP-invariance does not fix; give ops the group, as norms do"
            )
    return None


def is_under_buckets(parameter: Tensor) -> bool:
    return isinstance(vars(parameter).get("__deepcopy__"), _RefuseCopy)


class _RefuseCopy:
    """A `__deepcopy__` of parameters that raises: a copy's gradients would not be reduced."""

    def __call__(self, memo: object) -> NoReturn:
        raise RuntimeError(
            "a module under GradientBuckets cannot be copied, because copies would not be reduced; copy it "
            "before, or call detach() on its GradientBuckets"
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled parameters are free


def refuse_copies(parameters: Sequence[nn.Parameter]) -> None:
    """Make `copy.deepcopy` of the parameters raise."""
    for parameter in parameters:
        parameter.__deepcopy__ = _RefuseCopy()  # type: ignore[method-assign]


def release(parameters: Sequence[nn.Parameter], handles: Sequence[RemovableHandle]) -> None:
    """Remove the attributes and hooks of `GradientBuckets` from the parameters; gradients stay."""
    for parameter in parameters:
        vars(parameter).pop("__deepcopy__", None)
        vars(parameter).pop("main_grad", None)
        vars(parameter).pop("grad_added_to_main_grad", None)
    for handle in handles:
        handle.remove()


def publish_main_grads(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Set `main_grad` and `grad_added_to_main_grad`, in which Megatron's fused kernels accumulate."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.main_grad = view  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def drop_dummies(parameters: Sequence[nn.Parameter], step: BucketStep) -> list[RemovableHandle]:
    """Register hooks that drop the dummy gradients of fused kernels before the engine's hooks run."""
    drop = _Dummies(step).drop
    return [parameter.register_post_accumulate_grad_hook(drop) for parameter in parameters]


class _Dummies:
    """Gradients of fused kernels, which added the true ones elsewhere. step: that backward is a part of"""

    def __init__(self, step: BucketStep) -> None:
        self._step = step

    @part_of_a_step
    def drop(self, parameter: Tensor) -> None:
        if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            if not getattr(parameter, "zero_out_wgrad", False):  # else zeros plus gradients of other uses
                parameter.grad = None
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def set_grad_dtype(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Make autograd accumulate gradients in `dtype`."""
    for parameter in parameters:
        parameter.grad = None
        parameter.grad_dtype = dtype


class _Walk:
    """Finds parameters of a module that are not under the buckets; walks again only if a module changed.

    own: ids of the parameters under the buckets
    """

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._dicts: list[ValuesView[Any]] = []  # parameters and submodules of each module
        self._held: list[Any] = []  # their values at the last walk
        self._others: list[Tensor] = []

    def others_in(self, module: nn.Module) -> list[Tensor]:
        # at the speed of C; the end marker is compared, too, because one may be longer
        held = chain(chain.from_iterable(self._dicts), _END)
        if not self._dicts or not all(map(is_, held, chain(self._held, _END))):
            self._dicts = [d.values() for each in module.modules() for d in (each._parameters, each._modules)]
            self._held = [*chain.from_iterable(self._dicts)]
            self._others = [p for p in module.parameters() if id(p) not in self._own]
        return self._others

    def forget(self, _: object) -> None:
        """Drop all references when the module is freed."""
        self._dicts, self._held, self._others = [], [], []


class Members:
    """The parameters of a module that are under one `GradientBuckets`, and those that are not."""

    def __init__(self, module_or_named_parameters: object, given: NamedParameters) -> None:
        """given: names and parameters of the module, or the pairs; frozen ones are outside the buckets"""
        source = module_or_named_parameters
        self._named = [(name, parameter) for name, parameter in given if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in given if not parameter.requires_grad]
        self._own = {id(parameter) for _, parameter in self._named}
        self._walk = _Walk(self._own)
        self._module = ref(source, self._walk.forget) if isinstance(source, nn.Module) else None

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return names and weights to compare over ranks: those under buckets, and readable frozen ones."""
        frozen = [(name, p) for name, p in self._of_module() if not (p.requires_grad or p.is_meta)]
        return [*self._named, *(pair for pair in frozen if type(pair[1].data) is torch.Tensor)]

    def refuse_others(self) -> None:
        """Raise if a parameter outside the buckets has a gradient."""
        module = None if self._module is None else self._module()
        others = [p for _, p in self._frozen] if module is None else self._walk.others_in(module)
        if any(map(_is_unreduced, others)):
            name = next(name for name, p in [*self._of_module(), *self._frozen] if self._is_other(p))
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{name}' is not reduced; detach() these buckets and make "
                "new ones: it was added to the module, unfrozen, or replaced (as by "
                "load_state_dict(assign=True)) after they were made"
            )

    def _is_other(self, parameter: Tensor) -> bool:
        return id(parameter) not in self._own and _is_unreduced(parameter)

    def _of_module(self) -> NamedParameters:
        module = None if self._module is None else self._module()
        return [] if module is None else [*module.named_parameters()]


def _is_unreduced(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None and not is_under_buckets(parameter)


class Watched(Protocol):
    """Buckets whose parameters an optimizer must not step before `finish`."""

    def unfinished(self) -> Sequence[Tensor]:
        """Return all parameters if there are gradients that are not reduced yet; else none."""


def refuse_early_steps(buckets: Watched) -> RemovableHandle:
    """Make optimizers raise if they step parameters of `buckets` between a backward and `finish`."""
    return register_optimizer_step_pre_hook(partial(_before_step, ref(buckets)))


def _before_step(
    held: Callable[[], Watched | None], optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]
) -> None:
    """torch's hook before each optimizer step: raise if its gradients are not reduced."""
    if torch.compiler.is_compiling() or (buckets := held()) is None:
        return
    unfinished = {id(parameter) for parameter in buckets.unfinished()}
    if unfinished and any(id(p) in unfinished for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            "GradientBuckets: an optimizer steps between a backward and finish(), by gradients that are not "
            "reduced; call finish() after the last backward of a step, then clip, then step"
        )


def require_equal_weights(named: Iterable[tuple[str, Tensor]], groups: Sequence[ProcessGroup]) -> None:
    """Raise on all ranks of all groups if weights differ in a bit between ranks of the first group."""
    names, tensors = zip(*named, strict=True) if groups[0].size() > 1 else ((), ())
    sums = zip(names, sums_of_bits(tensors), strict=True)
    claims = tuple(f"'{name}' with checksum {checksum}" for name, checksum in sums)
    problem: Problem | None = None
    try:
        agree(Claim("GradientBuckets begin with other weights on other ranks", claims), groups[0])
    except ValueError as error:
        problem = (
            "ValueError",
            (
                f"{error}. Averaged gradients would keep the difference, and weights are not broadcast, as "
                "by DistributedDataParallel: draw them by one seed, load one checkpoint, or call "
                "bucketed_broadcast_(list(model.parameters()), src, group) before the first step"
            ),
        )
    for group in groups[1:]:
        agree(Claim("GradientBuckets", (), problem), group)
    if problem:
        raise ValueError(problem[1])
