"""Check a model's use of tensor parallelism by types, with PyTorch's `spmd_types`, in one process.

    with typecheck(group):
        loss = model(ids, targets)
        loss.backward()

A sum over ranks that is missing, made twice, or over another group changes no shape and raises no error: the
model trains on wrong gradients. Types show it. Over the ranks a tensor is

    I   replicated, with the full gradient          R   replicated, its gradient a term of a sum
    V   a shard                                     P   a term of a sum

`ops.spmd_rules` has the types that our ops take and return, spmd_types those of torch's operators. A leaf
gets its type when an operator first takes it: parameters by their marks (`layers.attributes`), split ones V,
those marked `sequence_parallel` R, others I; other leaves, such as ids, are replicated: R.

Two things local types do not tell follow from marks. A product with a weight that is split along the summed
dimension is a term: P, and not V. After a column layer features are a shard, until the shape changes: their
norm or softmax would be that of each rank's features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import State, tensor_world
from tpkernels.layers.wrappers import is_dtensor
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.local import norm
from tpkernels.ops.tensor_parallel import column_linear


@contextmanager
def typecheck(group: ProcessGroup | None = None, *, state: State = None) -> Iterator[list[Exception]]:
    """Check types of tensors over ranks inside the block; raise `spmd_types.SpmdTypeError` for a wrong one.

    Works with any backend, also with torch's "fake": one process is then a rank of a larger world.

    group: the tensor-parallel group; by default that of `state`
    yields: a list to which each such error is added, also if it is caught
    """
    try:
        import spmd_types
        from spmd_types import checker
    except ImportError as error:
        raise ImportError("typecheck: expected the package spmd_types; pip install spmd_types") from error
    group = tensor_world(state).group if group is None else group
    leaves = _TypedLeaves(group)
    with (
        torch.compiler.set_stance("force_eager"),  # compiled code calls no mode
        spmd_types.set_current_mesh([group]),
        checker.typecheck(local=True),
        leaves,
    ):
        yield leaves.errors


class _TypedLeaves(TorchFunctionMode):
    """Gives each leaf its type before an operator takes it."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self._group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from spmd_types import SpmdTypeError

        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_leaf:
                self._give_type(leaf)
        if args and isinstance(args[0], Tensor) and _writes(func):
            self._let_be_written(args[0], tree_leaves((args[1:], kwargs)))
        function, called = getattr(func, "__self__", None), func
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            func = function.apply  # which the checker sees; the given one is behind it
            called = function
        try:
            if _has_our_features(x := _normalized(called, args, kwargs)):
                raise SpmdTypeError(
                    f"{called.__name__}: features of {tuple(x.shape)} are a shard, whose statistics are not "
                    "those of all features; gather them first, or compute this before the column layer"
                )
            result = func(*args, **kwargs)
        except SpmdTypeError as error:
            self.errors.append(error)
            raise
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._follow_marks(called, args, each)
        if func == _DATA:
            self._give_type(result, like=args[0])
        elif func == _GRAD and result is not None:
            self._give_type(result, gradient_of=args[0])
        return result

    def _follow_marks(self, func: Callable[..., Any], args: Sequence[Any], result: Tensor) -> None:
        """Note by the marks of a product's weight that it is a term, or that its features are a shard."""
        from spmd_types import P, V, maybe_get_axis_local_type, mutate_type, normalize_axis

        axis = normalize_axis(self._group)
        if maybe_get_axis_local_type(result, axis) is not V:
            return
        summed = _split_of_product(func, args)
        if summed is True:
            mutate_type(result, axis, src=V, dst=P)
        elif summed is False or any(_has_our_features(x) and x.shape == result.shape for x in args):
            vars(result)[_OUR_FEATURES] = True

    def _give_type(self, leaf: Tensor, like: Tensor | None = None, gradient_of: Tensor | None = None) -> None:
        """Give a leaf its type. like, gradient_of: the tensor whose data, or whose gradient, it is"""
        from spmd_types import I, P, R, V, assert_type, maybe_get_axis_local_type, mutate_type, normalize_axis

        if is_dtensor(leaf):
            raise TypeError(
                "typecheck: expected parameters that are tensors, got a DTensor: check the model before "
                "fully_shard"
            )
        axis = normalize_axis(self._group)
        if axis.size() == 1:
            return
        known = maybe_get_axis_local_type(leaf, axis)
        if known is not None and not (leaf.requires_grad and vars(leaf).get(_GIVEN) is known):
            return
        found = None if like is None else maybe_get_axis_local_type(like, axis)
        if gradient_of is not None:
            of = maybe_get_axis_local_type(gradient_of, axis)
            found = P if of is R else of
        if found is None:
            marks = Attributes.of(leaf)
            trained = I if leaf.requires_grad and not marks.sequence_parallel else R
            found = V if marks.tensor_model_parallel else trained
        if known is None:
            assert_type(leaf, {axis: found})
        elif known is not found:  # its marks have changed since an earlier check
            mutate_type(leaf, axis, src=known, dst=found)
        if leaf.requires_grad:
            vars(leaf)[_GIVEN] = found

    def _let_be_written(self, target: Tensor, given: Sequence[Any]) -> None:
        """Give a replicated tensor without gradient, such as zeros, the type of the values written to it."""
        from spmd_types import I, R, V, maybe_get_axis_local_type, mutate_type, normalize_axis

        axis = normalize_axis(self._group)
        if target.requires_grad or target._is_view() or maybe_get_axis_local_type(target, axis) is not R:
            return  # a view's base would keep its type
        written = {maybe_get_axis_local_type(each, axis) for each in given if isinstance(each, Tensor)}
        if I in written and written <= {I, None}:
            mutate_type(target, axis, src=R, dst=I)
        elif written <= {V, R, None} and V in written:
            mutate_type(target, axis, src=R, dst=V)


def _split_of_product(func: Callable[..., Any], args: Sequence[Any]) -> bool | None:
    """Whether the weight of a product is split along the summed dimension; None: it is none, or not split."""
    if func is column_linear._ColumnLinear:
        return False
    if func not in _PRODUCTS or len(args) < 2 or not isinstance(args[1], Tensor):
        return None
    weight, transposed = args[1], func is functional.linear
    with unobserved():
        base = weight._base
        if base is not None and base.ndim == 2 and weight.stride() == base.stride()[::-1]:
            weight, transposed = base, not transposed
    marks = Attributes.of(weight)
    if not marks.tensor_model_parallel or weight.ndim != 2:
        return None
    return marks.partition_dim == (1 if transposed else 0)


def _normalized(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a norm or softmax over the last dimension is taken of; None of another function."""
    x = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if x is not None and func in _SOFTMAXES:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return x if dim in (-1, x.ndim - 1) else None
    return x if func in _NORMS or getattr(func, "__module__", "") == norm.__name__ else None


def _has_our_features(x: object) -> bool:
    return isinstance(x, Tensor) and _OUR_FEATURES in vars(x)


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_GIVEN = "_type_by_its_marks"
_OUR_FEATURES = "_has_a_shard_of_features"
_PRODUCTS = (functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_NORMS = (functional.layer_norm, functional.rms_norm, torch.layer_norm, torch.rms_norm)
_SOFTMAXES = (
    *(functional.softmax, torch.softmax, Tensor.softmax),
    *(functional.log_softmax, torch.log_softmax, Tensor.log_softmax),
)
_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
