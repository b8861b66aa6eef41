"""What every op over a group does with its operands: checked, cast, as rows of tokens, put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.comm.transports.rows import Pending
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Packed
from tpkernels.ops.inputs import any_requires_grad, apply, as_dtype, in_forward_mode
from tpkernels.ops.main_grad import MainGrads, empty_weight_gradient
from tpkernels.ops.tensor_parallel.parallel import (
    Done,
    Rounded,
    Rows,
    arrivals,
    checked_group,
    group_named,
    name_of,
    start_rows,
    start_sum,
)
from tpkernels.ops.tensor_parallel.product_sum import Pair, ProductSum, rows_of
from tpkernels.ops.tensor_parallel.segments import (
    SegmentSum,
    calls_of,
    canonical,
    in_blocks,
    map_segments,
    segments_of,
)
from tpkernels.tp_invariance import mode

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dx, dw, db
Group = Annotated[ProcessGroup, Packed(str, name_of, group_named)]


class Sharded(Protocol):
    """How an op is split over ranks."""

    @property
    def token_shards(self) -> int: ...


class Layout(NamedTuple):
    """How an op is split over ranks."""

    group: Group
    sequence_parallel: bool
    overlap: bool

    @property
    def segments(self) -> int:
        """How many this rank has of what ranks share; 0 without TP-invariance."""
        return mode.segments // self.group.size()

    def calls(self, device: torch.device) -> int:
        """How many calls of one segment each compute what a rank shares; 0: one call for all."""
        return calls_of(self.segments, device)

    def operand(self, tensor: Tensor) -> Tensor:
        """As callers give it, or with TP-invariance as it is given at every size."""
        return canonical(tensor) if self.segments else tensor

    @property
    def token_shards(self) -> int:
        """How many ranks share the tokens, where these are split."""
        return self.group.size() if self.sequence_parallel else 1

    def gather(self, op: str, name: str, shard: Tensor, *, features: int = 0, wanted: bool = True) -> Rows:
        """All tokens of `shard`, which has all of them already without sequence parallelism.

        features: width of the narrowest product that takes rows as they arrive; 0: they are awaited at once
        """
        gathers = wanted and self.sequence_parallel
        return start_rows(op, name, shard, self.group, features, self.overlap) if gathers else Done(shard)

    def sum_of_products(
        self,
        op: str,
        pairs: Sequence[Pair],
        *,
        transposed: bool,
        bias: Tensor | None = None,
        hidden: bool = False,
    ) -> Pending:
        """Sums over ranks of `product_sum(pairs)`, plus bias: of our tokens if these are split, or of all.

        hidden: what is computed before they are awaited hides the transfers, so that nothing is cut for it
        """
        (activations, weight), group = pairs[0], self.group
        rows, cols = activations.shape[0], weight.shape[0 if transposed else 1]
        sharing: Any = {"scatter": self.sequence_parallel, "overlap": self.overlap, "bias": bias}
        sharing["features"] = 0 if hidden else cols
        if segments := self.segments:
            terms = SegmentSum(pairs, transposed, segments)
            sharing["bias"] = None if bias is None else as_dtype(bias, terms.like.dtype)
            total = start_sum(op, terms, rows, cols, terms.like, group, **sharing)
            return Rounded(total, activations.dtype)
        if group.size() == 1 and transposed:  # the product adds the bias
            return Done(primitives.linear(activations, weight, bias, "none", False)[0])

        return start_sum(op, ProductSum(pairs, transposed), rows, cols, activations, group, **sharing)

    def rowwise(
        self,
        gathering: Rows,
        tokens: int,
        widths: Sequence[int],
        compute: Callable[[slice, Tensor, list[Tensor]], object],
    ) -> list[Tensor]:
        """(tokens, width) of each width, of which `compute` writes the rows of each chunk as it arrives.

        compute: of which rows, these rows, and where its results belong
        """
        full: list[Tensor] = []
        arriving = arrivals(gathering, self.overlap)
        for rows, chunk in in_blocks(arriving, tokens) if self.segments else arriving:
            full = full or [chunk.new_empty(tokens, width) for width in widths]
            compute(rows, chunk, [rows_of(matrix, rows) for matrix in full])
        return full


def checked_layout(
    op: str,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    group: ProcessGroup,
    sequence_parallel: bool,
    overlap: bool,
    options: Sequence[object],
    *,
    width: int,
    name: str = "x",
) -> Layout:
    """If this rank is a member of the group, and x has the tokens that sequence parallelism splits.

    options: all else that ranks must have alike; width: features of what is moved; name: of x
    """
    group = checked_group(
        group,
        op,
        dtype=x.dtype,
        rows=x.shape[:-1],
        width=width,
        tensors=[x, *parameters],
        options=(*options, sequence_parallel, overlap),
    )
    if sequence_parallel and x.ndim < 2:
        raise ValueError(
            f"{op}: expected {name} (tokens, ..., in_features) with sequence_parallel, got {x.ndim}-D"
        )
    segments_of(op, group)  # or an error
    return Layout(group, sequence_parallel, overlap)


def shaped_like(y: Tensor, x: Tensor, tokens: int) -> Tensor:
    """(rows, features) -> the leading dimensions of x, of which the first is now `tokens`, and features."""
    return y.view(*(tokens, *x.shape[1:-1])[: x.ndim - 1], y.shape[1])


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call; one that it does not record is quicker without `apply`."""
    return any_requires_grad(*tensors) or in_forward_mode()


def apply_distinct(
    function: type[torch.autograd.Function], *args: object, tensors: Sequence[Tensor | None]
) -> Any:
    """`function.apply`, which torch.compile traces only where it is given no tensor twice."""
    if torch.compiler.is_compiling():
        given, tensors = tensors, []
        for tensor in given:
            twice = tensor is not None and any(tensor is other for other in tensors)
            tensors = [*tensors, tensor.view_as(tensor) if tensor is not None and twice else tensor]
    return apply(function, *args, *tensors)


def bias_gradient(dz: Tensor, segments: int = 0) -> Tensor:
    """The sum over tokens, in the dtype of the bias, which is that of dz.

    segments: of this rank's features, see `Layout.calls`; 0: dz has all features, or all are summed at once
    """
    sums = map_segments(segments, primitives.bias_grad, canonical(dz) if mode.segments else dz, dim=0)
    return as_dtype(sums, dz.dtype)


def row_shape(x: Tensor, weight: Tensor, bias: Tensor | None, split: Sharded) -> Tensor:
    """Of `row_linear`, as the compiler is told."""
    return x.new_empty(x.shape[0] // split.token_shards, weight.shape[0])


def row_gradient_shapes(
    needs: Sequence[bool],
    dy_shard: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    main_grads: MainGrads,
    split: Sharded,
) -> Gradients:
    """Of its backward."""
    tokens, features = dy_shard.shape[0] * split.token_shards, dy_shard.shape[1]
    return (
        None if weight is None else dy_shard.new_empty(tokens, weight.shape[1]),
        None if x is None else empty_weight_gradient(dy_shard, x, main_grads[0]),
        dy_shard.new_empty(features) if needs[2] else None,
    )
