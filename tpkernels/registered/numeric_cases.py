"""Every launcher against float64: once per form, dtype and activation.

Operands lie in NaN, so that reading outside one shows; sizes straddle the interpreter's tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer
from tpkernels.gate.numerics import Frames, NumericCase
from tpkernels.kernels import launch
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF
from tpkernels.kernels.bias_grad import bias_grad, sum_partials
from tpkernels.kernels.interpret import Widened, accesses, mend
from tpkernels.kernels.operands import Form
from tpkernels.kernels.recipe import Format
from tpkernels.kernels.scaled import Scaled, quantize_ref
from tpkernels.kernels.target import INTERPRETER
from tpkernels.kernels.tiles import ORDERED_SUM, candidates
from tpkernels.registered import recording
from tpkernels.registered.entries import BF16, FP16, FP32, QUANTIZED, SCALES, SCALINGS
from tpkernels.registered.names import SHORT_NAMES
from tpkernels.registered.recording import Operands

# tokens, out_features, in_features: descriptors want rows of whole 16-byte units, pointers take anything
SIZES: Mapping[Form, tuple[int, int, int]] = {"descriptor": (72, 104, 88), "pointer": (71, 83, 45)}
IN_FP8: Mapping[Form, tuple[int, int, int]] = {"descriptor": (72, 144, 272), "pointer": (71, 141, 301)}
NAN_OF_FP8 = 0x7F7F_7F7F  # in either format; a scale, it is near the largest number of fp32
LAUNCHERS = {"linear": "linear_fwd", "glu": "glu_fwd"}  # of other names than their primitives
WAYS: tuple[tuple[Form, torch.dtype], ...] = (("descriptor", BF16), ("pointer", FP16), ("pointer", FP32))


class RandomOperands(Operands):
    """Views into wider matrices; all around them is NaN."""

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if len(shape) == 1:
            return self.tensor(1, *shape, dtype=dtype)[0]
        rows, cols = shape
        pitch = -(-cols // 8) * 8 + 8  # rows stay 16-byte aligned
        wide = torch.full((rows + 2, pitch), float("nan"), dtype=dtype or self.dtype)
        wide[1 : rows + 1, :cols] = torch.randn(rows, cols)
        return wide[1 : rows + 1, :cols]

    def weight(self) -> Tensor:
        return Layer.weight(self).mul_(self.in_features**-0.5)

    def scaled(self, rows: int, features: int, format: Format, square: bool = False) -> Scaled:
        words = quantize_ref(torch.randn(rows, features), format, self.scaling, square=square)
        pitch = -(-words.shape[1] // 4) * 4 + 4  # rows stay 16-byte aligned
        wide = torch.full((rows + 2, pitch), NAN_OF_FP8, dtype=torch.int32)
        wide[1 : rows + 1, : words.shape[1]] = words
        return Scaled(wide[1 : rows + 1, : words.shape[1]], features, format, self.scaling)

    def integers(self, count: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, (count,), dtype=dtype)


def prepare(frames: Frames) -> Callable[[bool], None]:
    """Have a process that interprets multiply bf16 and fp8 as GPUs do, and launchers allocate in frames.

    Returns the function that says whether casts to bf16 keep all bits of fp32.
    """
    mend()
    launch.allocate = frames.empty
    accesses.append(frames.accessed)
    return lambda wide: setattr(Widened, "bf16", wide)


def cases(sizes: Mapping[Form, tuple[int, int, int]] = SIZES) -> Iterator[NumericCase]:
    for form, dtype in WAYS:
        yield from _matmuls(RandomOperands(*sizes[form], dtype, chunks=3, form=form))
    yield from _in_fp8()
    yield from _rows(RandomOperands(*sizes["pointer"], FP32, chunks=3))
    yield from _rows(RandomOperands(*sizes["pointer"], BF16, chunks=3))


def _product(
    of: Operands, name: str, way: str, fields: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[NumericCase]:
    """fields: of the sample, as `recording.primitive` takes them"""
    record = PRODUCTS[name]
    launcher, call = LAUNCHERS.get(name, name), partial(recording.primitive, of, name, **fields)
    options = signature(record.by_torch).parameters
    if "activation" in options:
        for activation in ACTIVATIONS:
            yield NumericCase(f"{launcher}/{way}/{activation}", partial(call, activation=activation))
    elif "kind" in options:
        for kind in GATE_OF:
            yield NumericCase(f"{launcher}/{way}/{kind}", partial(call, glu=kind))
    elif record.changes_first:
        for into in (FP32, BF16):
            yield NumericCase(f"{launcher}/{way}/{SHORT_NAMES[into]}", partial(call, into=into))
    else:
        yield NumericCase(f"{launcher}/{way}", call)


def _matmuls(of: Operands) -> Iterator[NumericCase]:
    way = f"{of.form}/{SHORT_NAMES[of.dtype]}"
    for name in PRODUCTS:
        yield from _product(of, name, way)
    split = replace(candidates("wgrad", "pointer", of.dtype, INTERPRETER)[0], splits=3)
    for name in ("wgrad", "wgrad_accumulate_"):
        for one in _product(replace(of, tile=split), name, way):
            yield replace(one, name=f"{one.name}/split")
    for name in ("linear", "glu", "dgrad", "dgrad_pairs", "dgrad_act", "dglu"):
        call = partial(recording.primitive, of, name, wait=True)
        yield NumericCase(f"{LAUNCHERS.get(name, name)}/{way}/wait", call)
    for name in ("linear", "dgrad", "dgrad_pairs"):
        launcher = LAUNCHERS.get(name, name)
        call = partial(recording.primitive, of, name, into=FP32, **recording.BARE)
        yield NumericCase(f"{launcher}/{way}/=fp32", call)
    for transposed, pairs in ((True, 1), (False, 1), (False, 2)):
        case = f"segment_sum/{way}/{'transposed' if transposed else 'none'}/{('one', 'two')[pairs - 1]}"
        yield NumericCase(case, partial(recording.segments, of, transposed, pairs))
    for pairs, depth_first in ((1, False), (2, False), (2, True)):
        case = f"scatter_linear/{way}/{('one', 'two')[pairs - 1]}{'+depth_first' * depth_first}"
        yield NumericCase(case, partial(recording.scatter_linear, of, pairs, depth_first))


def _in_fp8() -> Iterator[NumericCase]:
    for form, sizes in IN_FP8.items():
        of = RandomOperands(*sizes, BF16, form=form)
        for scales, options in SCALES.items():
            way = f"{form}/fp8/{scales.strip('+') or 'rows'}"
            call = partial(recording.primitive, of, "scaled_linear", **options)
            for activation in ACTIVATIONS:
                yield NumericCase(
                    f"scaled_linear_fwd/{way}/{activation}", partial(call, activation=activation)
                )
            plain = partial(call, **recording.BARE)
            yield NumericCase(f"scaled_linear_fwd/{way}/=fp32", partial(plain, into=FP32))
            yield NumericCase(f"scaled_linear_fwd/{way}/e5m2", partial(plain, format="e5m2"))
            yield NumericCase(f"scaled_linear_fwd/{way}/fast", partial(call, fast=True))
            arriving = partial(
                recording.primitive, replace(of, chunks=3), "scaled_linear", wait=True, **options
            )
            yield NumericCase(f"scaled_linear_fwd/{way}/wait", arriving)
    for dtype in (BF16, FP32):
        of = RandomOperands(*IN_FP8["pointer"], dtype)
        way = SHORT_NAMES[dtype]
        for how, quantized in QUANTIZED.items():
            yield NumericCase(f"quantize/{way}/{how}", partial(quantized, of))
        for scaling in SCALINGS:
            call = partial(recording.primitive, of, "dequantize", into=dtype, scaling=scaling)
            yield NumericCase(f"dequantize/{way}/{scaling}", call)


def _rows(of: Operands) -> Iterator[NumericCase]:
    way = SHORT_NAMES[of.dtype]
    if of.dtype == FP32:  # which partial sums are in
        yield NumericCase(f"sum_partials/{way}", partial(recording.row_sums, of, sum_partials))
        for word, into, accumulate in (
            ("=bf16", BF16, False),
            ("+=bf16", BF16, True),
            ("+=fp32", FP32, True),
        ):
            yield NumericCase(f"add_slots/{way}/{word}", partial(recording.added_slots, of, into, accumulate))
    yield NumericCase(f"bias_grad/{way}", partial(recording.row_sums, of))
    ordered = partial(bias_grad, tile=ORDERED_SUM)
    yield NumericCase(f"bias_grad/{way}/ordered", partial(recording.row_sums, of, ordered))
    yield NumericCase(f"reduce_slots/{way}", partial(recording.slot_sums, of))
    yield NumericCase(f"reduce_slots/{way}/tree", partial(recording.slot_sums, of, slots=4, tree=True))
    for activation in ACTIVATIONS:
        yield NumericCase(f"activate/{way}/{activation}", partial(recording.activate, of, activation))
        yield NumericCase(f"act_grad/{way}/{activation}", partial(recording.act_grad, of, activation))
    yield NumericCase(f"act_grad/{way}/no_db", partial(recording.act_grad, of, "silu", bias_grad=False))
    for unit in GATE_OF:
        yield NumericCase(f"activate/{way}/{unit}", partial(recording.gate, of, unit))
        yield NumericCase(f"glu_grad/{way}/{unit}", partial(recording.glu_grad, of, unit))
    yield NumericCase(f"advance/{way}", partial(recording.advance, of))
    yield NumericCase(f"embedding_fwd/{way}", partial(recording.primitive, of, "lookup"))
    yield NumericCase(f"embedding_bwd/{way}", partial(recording.primitive, of, "lookup_grad"))
    loss = f"softmax_statistics/cross_entropy_grad/{way}"
    yield NumericCase(loss, partial(recording.cross_entropy, of))
    yield NumericCase(f"{loss}/entropy", partial(recording.cross_entropy, of, 0.7))
    for name in recording.other_primitives():
        yield NumericCase(f"{name}/{way}", partial(recording.primitive, of, name))
    for kind in ("rms", "layer"):
        fwd_bwd = f"{kind}_norm_fwd/{kind}_norm_bwd/{way}"
        yield NumericCase(fwd_bwd, partial(recording.norm, of, kind))
        yield NumericCase(f"{fwd_bwd}/plus", partial(recording.norm, of, kind, plus=True))
        yield NumericCase(f"add_norm/{way}/{kind}", partial(recording.slot_sums, of, norm=kind))
