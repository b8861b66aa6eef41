"""How an op is split over ranks: a `Layout` gathers rows, multiplies them, and sums products over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tpkernels.comm.calls import ranks_of
from tpkernels.comm.transports.rows import Pending
from tpkernels.dispatch import primitives
from tpkernels.dispatch.operators import Packed
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.inputs import any_requires_grad, apply, as_dtype, in_forward_mode, is_observed
from tpkernels.ops.numerics import PLAIN, ComputeRows, KeptRows, Operand, Plain, rows_of
from tpkernels.ops.tensor_parallel.flag_waits import Multiplied, MultipliedRows
from tpkernels.ops.tensor_parallel.parallel import (
    Done,
    Rounded,
    Rows,
    arrivals,
    checked_group,
    compare_in_backward,
    group_named,
    name_of,
    segments_of,
    size_of,
    start_rows,
    start_sum,
)

MaybeGroup = Annotated[
    ProcessGroup | None,
    Packed(
        str,
        lambda group: "" if group is None else name_of(group),
        lambda name: group_named(name) if name else None,
    ),
]


def _segmented(segments: int) -> Plain:
    """Return the numerics of TP-invariance, imported where it is asked for."""
    from tpkernels.ops.tensor_parallel.segments import Segmented

    return Segmented(segments)


def _numerics_named(name: str) -> Plain:
    """Return the numerics of which this is the `str`."""
    number, _, word = name.partition(" ")
    if not name:
        return PLAIN
    if word == "segments":
        return _segmented(int(number))
    from tpkernels.ops.quantized.products import quantized_named

    return quantized_named(name)


Numerics = Annotated[Plain, Packed(str, str, _numerics_named)]


class Layout(NamedTuple):
    """How an op is split over ranks: its group, sequence parallelism, overlap, and numerics."""

    group: MaybeGroup  # None: this rank alone
    sequence_parallel: bool = False
    overlap: bool = False
    numerics: Numerics = PLAIN

    def in_fp8(self, op: str, recipe: Recipe | None, x: Tensor) -> Layout:
        """Return the layout with fp8 by `recipe`, or itself if that is None. x: checked and cast"""
        if recipe is None:
            return self
        from tpkernels.ops.quantize import require_quantizable  # here: only ops in fp8 need it
        from tpkernels.ops.quantized.products import Quantized

        require_quantizable(op, recipe, x)
        return self._replace(numerics=Quantized(recipe, x.dtype))

    @property
    def token_shards(self) -> int:
        """How many ranks tokens are split over; 1 without sequence parallelism."""
        return size_of(self.group) if self.group is not None and self.sequence_parallel else 1

    def kept(self, save_gathered: bool = False) -> KeptRows:
        """Return which rows of x, as they were sent, forward saves in place of x."""
        kept: KeptRows = "all" if save_gathered else self.numerics.kept
        return "none" if kept == "none" or self.token_shards == 1 else kept

    def empty_kept(self, x: Tensor, kept: KeptRows) -> Tensor:
        """Return an empty tensor like the rows that are kept of x."""
        tokens = x.shape[0] * (self.token_shards if kept == "all" else 1)
        width, dtype = self.numerics.sent_as(x)
        return x.new_empty(tokens, width, dtype=dtype)

    def compare_in_backward(self, op: str, needs: Sequence[object]) -> None:
        """With TPKERNELS_DEBUG=1, compare over ranks which gradients are needed."""
        if self.group is not None:
            compare_in_backward(op, self.group, needs)

    def gather(
        self,
        op: str,
        name: str,
        matrix: Tensor,
        prepare: Callable[[Tensor], Operand],
        *,
        features: int = 0,
        keep: bool = True,
        beside: GatheredRows | None = None,
    ) -> GatheredRows:
        """Gather all tokens of a matrix; without sequence parallelism it has them already.

        prepare: makes an operand of the matrix
        features: width of the narrowest product that takes rows as they arrive; 0: all are awaited at once
        keep: `wait` is called later, and rows stay
        beside: what is in flight; two calls of one exchange at once would cost barriers of all ranks
        """
        group = self.group
        if group is None or not self.sequence_parallel or ranks_of(group) == 1:
            return GatheredRows(self, prepare, matrix, None, keep)
        own = prepare(matrix)
        what = f"gather of {name}{self.numerics.described(own)}"
        sent = self.numerics.sent(own)
        purpose = f"gathers of {name}" if beside is not None and beside.moves_like(sent) else "gathers"
        multiplied = Multiplied(self.numerics, own, prepare)
        gathering = start_rows(op, what, sent, group, features, self.overlap, multiplied, purpose=purpose)
        return GatheredRows(self, prepare, own, gathering, keep)

    def gather_kept(
        self,
        op: str,
        name: str,
        rows: Tensor,
        kept: KeptRows,
        features: int,
        *,
        beside: GatheredRows | None = None,
    ) -> GatheredRows:
        """Gather all tokens of a matrix of `features` from the rows that forward kept.

        beside: as of `gather`
        """
        prepare = partial(self.numerics.kept_operand, features=features)
        if kept == "all":
            return GatheredRows(self, prepare, prepare(rows), Done(rows), True)
        return self.gather(op, name, rows, prepare, beside=beside)

    def sum_of_products(
        self,
        op: str,
        pairs: Sequence[tuple[Operand, Tensor]],
        *,
        transposed: bool,
        bias: Tensor | None = None,
        hidden: bool = False,
    ) -> Pending:
        """Start the sum over ranks of these products and of bias, for this rank's tokens if they are split.

        hidden: the caller hides the transfers by other work before it waits, so that nothing is cut for it
        """
        terms = self.numerics.terms(pairs, transposed)
        if self.group is None or ranks_of(self.group) == 1:
            return Done(terms.alone(bias))
        like = terms.like
        total = start_sum(
            op,
            terms,
            terms.rows,
            terms.cols,
            like,
            self.group,
            scatter=self.sequence_parallel,
            overlap=self.overlap,
            bias=bias if bias is None else as_dtype(bias, like.dtype),
            features=0 if hidden else terms.cols,
        )
        return total if like.dtype == terms.dtype else Rounded(total, terms.dtype)


class GatheredRows:
    """Rows of an operand from all ranks; some may be in flight."""

    def __init__(
        self,
        layout: Layout,
        prepare: Callable[[Tensor], Operand],
        own: Operand,
        gathering: Rows | None,
        keep: bool,
    ) -> None:
        """own: the operand of this rank's rows; or without a gathering the matrix that `prepare` takes"""
        self._layout, self._numerics, self._keep = layout, layout.numerics, keep
        self._prepare, self._own, self._gathering = prepare, own, gathering
        self._multiplied = Multiplied(self._numerics, own, prepare)
        # the gather, if one kernel multiplies its rows as they arrive
        self._multiplying = gathering if layout.overlap and isinstance(gathering, MultipliedRows) else None

    @property
    def arrives(self) -> bool:
        """Whether `each` gives rows as they arrive."""
        under_way = self._gathering is not None and not isinstance(self._gathering, Done)
        return under_way and self._layout.overlap and self._multiplying is None

    def moves_like(self, rows: Tensor) -> bool:
        """Whether these rows would go through the same exchange."""
        ours = self.own()
        return ours.shape == rows.shape and ours.dtype == rows.dtype

    def own(self) -> Tensor:
        """Return this rank's rows, as they are sent."""
        return self._numerics.sent(self._own)

    def wait(self) -> Tensor:
        """Wait for all rows, as they are sent."""
        full: Tensor = self._own if self._gathering is None else self._gathering.wait()
        return full

    def numbers(self) -> Tensor:
        """Wait for all rows, and return their numbers."""
        full = self.wait()
        if self._gathering is None:
            return full
        return self._numerics.numbers(self._numerics.received(self._own, full))

    def each(self, widths: Sequence[int], compute: ComputeRows) -> list[Tensor]:
        """Return (tokens, width) of each width; `compute` writes the rows of each chunk as it arrives."""
        layout, numerics, own, gathering = self._layout, self._numerics, self._own, self._gathering
        if gathering is None:
            own = self._prepare(own)
            gathering = Done(numerics.sent(own))
        rows = numerics.sent(own)
        tokens, dtype = rows.shape[0] * layout.token_shards, numerics.dtype(rows)
        full = [torch.empty((tokens, width), dtype=dtype, device=rows.device) for width in widths]
        for here, chunk in numerics.blocks(arrivals(gathering, layout.overlap, self._keep), tokens):
            compute(here, numerics.received(own, chunk), [rows_of(matrix, here) for matrix in full])
        return full

    def products(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        activation: Activation = "none",
        keep_z: bool = False,
    ) -> list[Tensor]:
        """Compute y = act(x wᵀ + b) of each weight; if keep_z, return z of each, too."""
        prepared = [self._numerics.weight(weight, True) for weight in weights]
        if (kernel := self._multiplying) is not None:
            return kernel.products(
                self._multiplied, prepared, biases, True, activation, keep_z, keep_rows=self._keep
            )

        def multiply(_: slice, chunk: Operand, out: list[Tensor]) -> None:
            for i, (weight, bias) in enumerate(zip(prepared, biases, strict=True)):
                self._numerics.product_into(
                    out[i :: len(prepared)], chunk, weight, bias, True, activation, keep_z
                )

        return self.each([weight.shape[0] for weight in weights] * (2 if keep_z else 1), multiply)

    def product(self, weight: Tensor, also: ComputeRows | None = None) -> Tensor:
        """Compute dy w. also: is called with rows as they arrive, too"""
        if self._gathering is None and self._numerics is PLAIN:  # tiny products take half the time at once
            return primitives.dgrad(self._own, weight)
        prepared = self._numerics.weight(weight, False)
        if (kernel := self._multiplying) is not None:
            return kernel.products(self._multiplied, [prepared], [None], False, keep_rows=self._keep)[0]

        def multiply(here: slice, chunk: Operand, out: list[Tensor]) -> None:
            if also is not None:
                also(here, chunk, [])
            self._numerics.product_into(out, chunk, prepared, None, False, "none", False)

        return self.each([weight.shape[1]], multiply)[0]


def checked_layout(
    op: str,
    x: Tensor,
    parameters: Sequence[Tensor | None],
    group: ProcessGroup,
    sequence_parallel: bool,
    overlap: bool,
    options: Sequence[object],
    *,
    width: int | None = None,
    name: str = "x",
) -> Layout:
    """Check that this rank is in the group and that x has tokens to split; return the op's layout.

    options: all else that ranks must have alike; width: features of the rows that are moved; name: of x
    """
    group = checked_group(
        group,
        op,
        x,
        width=width,
        parameters=parameters,
        options=(*options, sequence_parallel, overlap),
    )
    if sequence_parallel and x.ndim < 2:
        raise ValueError(
            f"{op}: expected {name} (tokens, ..., in_features) with sequence_parallel, got {x.ndim}-D"
        )
    segments = segments_of(op, group)  # or an error
    return Layout(group, sequence_parallel, overlap, _segmented(segments) if segments else PLAIN)


def shaped_like(y: Tensor, x: Tensor, tokens: int) -> Tensor:
    """Give (rows, features) the leading dimensions of x; the first becomes `tokens`."""
    return y.view(*(tokens, *x.shape[1:-1])[: x.ndim - 1], y.shape[1])


def recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call on these tensors; other calls do without `apply`, which takes time."""
    return any_requires_grad(*tensors) or in_forward_mode() or (not is_compiling() and is_observed())


def apply_distinct(
    function: type[torch.autograd.Function], *args: object, tensors: Sequence[Tensor | None]
) -> Any:
    """Call `function.apply`; when compiling, with a view of a tensor that is passed twice, to be traced."""
    if torch.compiler.is_compiling():
        given, tensors = tensors, []
        for tensor in given:
            twice = tensor is not None and any(tensor is other for other in tensors)
            tensors = [*tensors, tensor.view_as(tensor) if tensor is not None and twice else tensor]
    return apply(function, *args, *tensors)
