"""Counts what the aten calls of an op read and write, and has ranks count it of ops over a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.parallel_cases import Setting, leaf, prepare
from tpkernels.dispatch import primitives
from tpkernels.dispatch.record import copied_into
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # what they change in place they do not read


class BytesMoved(TorchDispatchMode):
    """`by_call`: name of an aten call -> bytes that it reads and writes of the tensors that count."""

    def __init__(self, counts: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._counts = counts
        self.by_call: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in ALLOCATES or func.is_view:
            return result
        moved, changed = 0, []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written:
                changed.append(value)
            if not (written and (argument.kwarg_only or name in OVERWRITES)):
                moved += self._bytes(value)
        # what was changed is a result, too
        results = result if isinstance(result, tuple | list) else [result]
        fresh = [r for r in results if not any(r is tensor for tensor in changed)]
        self.by_call[name] += moved + self._bytes([*changed, *fresh])
        return result

    def _bytes(self, value: Any) -> int:
        if isinstance(value, tuple | list):
            return sum(self._bytes(each) for each in value)
        counted = isinstance(value, Tensor) and self._counts(value)
        return value.numel() * value.element_size() if counted else 0


def between(features: int, *sides: int) -> Callable[[Tensor], bool]:
    """Matrices of so many features, or transposes, but no weights: their other side is one of `sides`."""

    def counts(tensor: Tensor) -> bool:
        if tensor.ndim != 2 or features not in tensor.shape:
            return False
        other = tensor.shape[0] if tensor.shape[1] == features else tensor.shape[1]
        return other not in sides

    return counts


TOKENS, IN, BETWEEN, OUT = 64, 100, 24, 104  # no chunk has as many rows as weights have
Passes = dict[str, float]  # by call: how often all rows are read or written


def _passes(counted: BytesMoved, features: int) -> Passes:
    """Of matrices (TOKENS, features) in fp32."""
    return {name: moved / (TOKENS * features * 4) for name, moved in counted.by_call.items() if moved}


def mlp(setting: Setting) -> tuple[Passes, Passes]:
    """Forward and backward of parallel_mlp: passes over h, z, g, u and their gradients."""
    prepare(setting)
    ranks = dist.get_world_size()
    gated, features = setting.activation == "swiglu", BETWEEN // ranks
    x = leaf(torch.randn(TOKENS // ranks if setting.sequence_parallel else TOKENS, IN))
    up, gate, down = (leaf(torch.randn(*shape)) for shape in ((features, IN),) * 2 + ((OUT, features),))
    bias = None if gated else leaf(torch.randn(features))
    forward, backward = (BytesMoved(between(features, IN, OUT)) for _ in range(2))
    with forward:
        y = parallel_mlp(
            *(x, up, bias, down, None, dist.group.WORLD),
            activation=setting.activation,
            w_gate_shard=gate if gated else None,
            sequence_parallel=setting.sequence_parallel,
            overlap=setting.overlap,
        )
    leaves = [x, up, down, gate if gated else bias]
    with backward:
        torch.autograd.grad(y, leaves, torch.randn_like(y))
    return _passes(forward, features), _passes(backward, features)


def column(setting: Setting) -> Passes:
    """Forward of column_linear: passes over y and z."""
    prepare(setting)
    ranks = dist.get_world_size()
    features = BETWEEN // ranks
    x, weight = leaf(torch.randn(TOKENS // ranks, IN)), leaf(torch.randn(features, IN))
    with BytesMoved(between(features, IN)) as counted:
        column_linear(
            *(x, weight, None, dist.group.WORLD),
            activation=setting.activation,
            sequence_parallel=True,
            overlap=setting.overlap,
        )
    return _passes(counted, features)


def mlp_that_copies(setting: Setting) -> tuple[Passes, Passes]:
    """A planted fault: results are computed beside, and copied to where they belong."""
    into = primitives.into
    primitives.into = copied_into  # type: ignore[assignment]
    try:
        return mlp(setting)
    finally:
        primitives.into = into
