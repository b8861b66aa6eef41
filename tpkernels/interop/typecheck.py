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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import State, tensor_world
from tpkernels.layers.wrappers import is_dtensor


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
        function = getattr(func, "__self__", None)
        if isinstance(function, type) and issubclass(function, torch.autograd.Function):
            func = function.apply  # which the checker sees; the given one is behind it
        try:
            result = func(*args, **kwargs)
        except SpmdTypeError as error:
            self.errors.append(error)
            raise
        if func == _DATA:
            self._give_type(result, like=args[0])
        elif func == _GRAD and result is not None:
            self._give_type(result, gradient_of=args[0])
        return result

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


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


_GIVEN = "_type_by_its_marks"
_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
