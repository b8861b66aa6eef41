"""torchtitan's `tp_gemm_backend="dist_gemm"` on our ops, on GPUs and CPUs, without symmetric memory.

torchtitan.install()
spec = model_registry("8B", tp_gemm_backend="dist_gemm")

torchtitan has no registry of such backends. Its layers for "dist_gemm" call three autograd functions of their
module by name, and `install` replaces these. Layers, names of weights and checkpoints remain torchtitan's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels import ops

Y = TypeVar("Y", Tensor, tuple[Tensor, ...])
SplitTensor = tuple[Tensor | None, int | None]

_CALLER = "torchtitan.models.common.dist_gemm"


class _AllGatherLinear:
    @staticmethod
    def apply(
        x_shard_m: Tensor,
        w_shard_n: Tensor,
        bias_shard_n: Tensor | None,
        group: ProcessGroup,
        group_name: str,
    ) -> Tensor:
        taken = [(x_shard_m, 0), (w_shard_n, 0), (bias_shard_n, 0)]
        return _typed(ops.column_linear, (x_shard_m, w_shard_n, bias_shard_n), group, taken, 1)


class _AllGatherLinearMulti:
    @staticmethod
    def apply(
        x_shard_m: Tensor,
        wa_shard_n: Tensor,
        wb_shard_n: Tensor,
        group: ProcessGroup,
        group_name: str,
    ) -> tuple[Tensor, ...]:
        taken = [(x_shard_m, 0), (wa_shard_n, 0), (wb_shard_n, 0)]
        return _typed(ops.column_linear, (x_shard_m, [wa_shard_n, wb_shard_n], None), group, taken, 1)


class _LinearReduceScatter:
    @staticmethod
    def apply(
        x_shard_k: Tensor,
        w_shard_k: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        group_name: str,
    ) -> Tensor:
        taken = [(x_shard_k, 1), (w_shard_k, 1), (bias, None)]
        return _typed(ops.row_linear, (x_shard_k, w_shard_k, bias), group, taken, 0)


def _typed(
    op: Callable[..., Y],
    tensors: tuple[Any, ...],
    group: ProcessGroup,
    taken: Sequence[SplitTensor],
    given: int,
) -> Y:
    """Call an op on shards of tokens; if spmd_types is checking, with the types of torchtitan's functions.

    taken: tensors, and the dimension by which each is split over the group; None: replicated
    given: the dimension by which results are split
    """
    spmd = sys.modules.get("spmd_types")
    if spmd is None or not spmd.is_type_checking():
        return op(*tensors, group, sequence_parallel=True)
    for tensor, dim in taken:
        if tensor is not None:
            spmd.assert_type(tensor, {group: spmd.R if dim is None else spmd.S(dim)})
    with spmd.no_typecheck():  # the version that torchtitan requires has no rules for our functions
        results = op(*tensors, group, sequence_parallel=True)
    over_other_groups = spmd.get_local_type(taken[0][0])
    for y in (results,) if isinstance(results, Tensor) else results:
        spmd.assert_type(y, {**over_other_groups, spmd.normalize_axis(group): spmd.S(given)})
    return results


_OURS = (_AllGatherLinear, _AllGatherLinearMulti, _LinearReduceScatter)


def install() -> None:
    """Make torchtitan's "dist_gemm" layers call our ops in this process, also layers built already.

    All ranks call it, before the first forward. Raises if torchtitan's functions take other arguments.
    """
    try:
        caller = import_module(_CALLER)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"torchtitan.install: expected a torchtitan that has {_CALLER}, such as 0.3.0; "
            f"found {_version()}: {error}"
        ) from error
    places = {ours.__name__.removeprefix("_"): ours for ours in _OURS}
    for name, ours in places.items():
        theirs = getattr(caller, name, None)
        if theirs is ours:
            continue
        wanted = list(signature(ours.apply).parameters)
        forward = getattr(theirs, "forward", None)
        found = None if forward is None else list(signature(forward).parameters)[1:]  # without ctx
        if found != wanted:
            raise ImportError(
                f"torchtitan.install: expected {_CALLER}.{name} to take {', '.join(wanted)}, as in 0.3.0; "
                f"{_version()} has {'no such function' if found is None else ', '.join(found)}"
            )
    for name, ours in places.items():
        setattr(caller, name, ours)


def _version() -> str:
    try:
        return f"torchtitan {version('torchtitan')}"
    except PackageNotFoundError:
        return "no torchtitan"
