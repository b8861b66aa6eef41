"""torchtitan's `tp_gemm_backend="dist_gemm"` on our ops, on GPUs and CPUs, without symmetric memory.

torchtitan.install()
spec = model_registry("8B", tp_gemm_backend="dist_gemm")

torchtitan has no registry of such backends. Its layers for "dist_gemm" call three autograd functions of their
module by name, and `install` replaces these. Layers, names of weights and checkpoints remain torchtitan's.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature

from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels import ops

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
        return ops.column_linear(x_shard_m, w_shard_n, bias_shard_n, group, sequence_parallel=True)


class _AllGatherLinearMulti:
    @staticmethod
    def apply(
        x_shard_m: Tensor,
        wa_shard_n: Tensor,
        wb_shard_n: Tensor,
        group: ProcessGroup,
        group_name: str,
    ) -> tuple[Tensor, ...]:
        return ops.column_linear(x_shard_m, [wa_shard_n, wb_shard_n], None, group, sequence_parallel=True)


class _LinearReduceScatter:
    @staticmethod
    def apply(
        x_shard_k: Tensor,
        w_shard_k: Tensor,
        bias: Tensor | None,
        group: ProcessGroup,
        group_name: str,
    ) -> Tensor:
        return ops.row_linear(x_shard_k, w_shard_k, bias, group, sequence_parallel=True)


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
