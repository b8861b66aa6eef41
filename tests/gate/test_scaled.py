"""fp8 in the gate: where it is compiled, and wrong numbers."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.gate.samples import entry_of
from tpkernels.dispatch.primitives import RECORDS
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.numerics import Frames, NumericCase, examine
from tpkernels.kernels.target import A100, H100, MI300
from tpkernels.registered.entries import SCALES, entry_specs
from tpkernels.registered.numeric_cases import RandomOperands
from tpkernels.registered.recording import EntrySpec, MetaOperands, primitive, quantize

CALLS = {
    "scaled_linear": partial(primitive, name="scaled_linear"),
    "quantize": quantize,
    "quantize_gated": partial(quantize, gated=True),
    "dequantize": partial(primitive, name="dequantize"),
}


@pytest.mark.parametrize("name", CALLS)
def test_gpus_without_fp8_are_refused_by_name(name):
    of = MetaOperands(64, 128, 1024)
    assert EntrySpec(name, CALLS[name], of, H100, ("sm_90",)).entry().function
    with pytest.raises(ValueError, match=r"fp8 expected a GPU of capability 8.9 or later .*, got 8.0"):
        EntrySpec(name, CALLS[name], of, A100, ("sm_80",)).entry()
    with pytest.raises(ValueError, match=r"fp8 expected a GPU of capability 8.9 or later .*, got one of AMD"):
        EntrySpec(name, CALLS[name], of, MI300, ("gfx942",)).entry()


def test_no_entry_of_fp8_is_compiled_where_it_is_refused():
    fp8 = {"scaled_linear", "quantize", "dequantize"}
    named = [name for name in entry_specs() if "fp8" in name or fp8 & {*name.split("/")}]
    entries = [entry_of(name) for name in named]
    assert {gpu for entry in entries for gpu in entry.architectures} == set(FP8_PRODUCTS)
    assert {entry.function for entry in entries} == {
        *("_scaled_linear_kernel", "_dequantize_kernel"),
        *("_quantize_rows_kernel", "_quantize_blocks_kernel"),
    }


def test_one_byte_of_what_quantizes_is_seen(monkeypatch):
    sound = RECORDS["quantize"]
    of = RandomOperands(9, 17, 301, torch.bfloat16)
    case = NumericCase("quantize", partial(quantize, of))
    assert examine(case, Frames()).failure == ""

    def off_by_one_bit(*call):
        words = sound.by_kernel(*call)
        words.view(torch.uint8)[5, 7] ^= 1
        return words

    monkeypatch.setitem(RECORDS, "quantize", replace(sound, by_kernel=off_by_one_bit))
    assert examine(case, Frames()).failure.startswith("words is off by")


@pytest.mark.parametrize("scales", SCALES)
def test_a_scale_of_another_block_is_seen(monkeypatch, scales):
    sound = RECORDS["scaled_linear"]
    of = RandomOperands(40, 141, 301, torch.bfloat16)
    case = NumericCase("scaled_linear", partial(primitive, of, "scaled_linear", **SCALES[scales]))
    assert examine(case, Frames()).failure == ""

    def with_the_scales_of_others(x, weight, x_scale, *rest, **ways):
        return sound.by_kernel(x, weight, x_scale.roll(1, 0), *rest, **ways)

    monkeypatch.setitem(RECORDS, "scaled_linear", replace(sound, by_kernel=with_the_scales_of_others))
    assert "y is off by" in examine(case, Frames()).failure
