"""The catalog is what launches say: who changes a launcher changes its entries."""

import importlib
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.test_target import GPUS
from tpkernels.dispatch import primitives, products
from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.compile_gate import has_parts
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.numerics import Frames, examine
from tpkernels.kernels import launch
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import KERNELS, MatmulTile
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS
from tpkernels.registered import recording
from tpkernels.registered.entries import E4M3, FEW, _tiles, catalog, config, entry_specs
from tpkernels.registered.names import TABLE, stem_of
from tpkernels.registered.numeric_cases import cases
from tpkernels.registered.recording import EntrySpec, MetaOperands, _is_aligned, _type_of


def test_names_are_unique_and_entries_name_every_argument_once():
    assert [name for name, times in Counter(entry.name for entry in catalog()).items() if times > 1] == []
    for entry in catalog():
        kernel = getattr(importlib.import_module(entry.module), entry.function)
        assert sorted([*entry.arguments, *entry.constants]) == sorted(kernel.arg_names), entry.name
        assert entry.aligned <= set(entry.arguments), entry.name


def test_our_kernels_are_registered_as_anybodys_are():
    assert [own.name for own in config().kernels] == [*entry_specs()]
    assert config().budgets == TABLE


def test_every_tile_is_compiled_for_each_gpu_or_for_few():
    compiled = {(gpu, entry.name) for entry in catalog() for gpu in entry.architectures}
    given = [(kernel, kernel, dtype, GPUS) for kernel in KERNELS for dtype in (torch.bfloat16, torch.float32)]
    given.append(("scaled_linear", "linear", E4M3, {gpu: GPUS[gpu] for gpu in FP8_PRODUCTS}))
    for (kernel, tiles, dtype, gpus), ragged in product(given, (False, True)):
        ragged = ragged and dtype != torch.float32
        for gpu, target in gpus.items():
            pointers_alone = not target.has_tma or dtype == torch.float32 or (ragged and dtype == E4M3)
            for form in ("pointer",) if pointers_alone else ("descriptor", "pointer"):
                of_few = form == "pointer" and (dtype == torch.float32 or (ragged and dtype != E4M3))
                if of_few and gpu not in (*FEW, "gfx942"):
                    continue
                for tile in _tiles(tiles, form, dtype, target, ragged):
                    stem = f"/{stem_of(kernel, form, dtype, tile)}/"
                    assert any(a == gpu and stem in f"/{name}" for a, name in compiled), f"{stem} on {gpu}"


TILE = MatmulTile(128, 256, 64, num_warps=8, num_stages=4, parts=2, flatten=True)


def operands(dtype: torch.dtype = torch.bfloat16, ragged: bool = False) -> MetaOperands:
    return MetaOperands(64, 48, 32, dtype, chunks=2, ragged=ragged)


def entry_of(call, of: MetaOperands, **options) -> Entry:
    return EntrySpec("entry", call, of, H100, ("sm_90",), **options).entry()


def linear_entry(of: MetaOperands, *, x: torch.Tensor | None = None, **options) -> Entry:
    x = of.tensor(64, 32) if x is None else x
    return entry_of(lambda of: linear_fwd(x, of.tensor(48, 32), of.tensor(48), tile=TILE, **options), of)


def test_entry_is_what_the_launcher_passes(monkeypatch):
    of = operands()
    entry = linear_entry(of)
    assert (entry.module, entry.function) == ("tpkernels.kernels.linear", "_linear_fwd_kernel")
    assert entry.form == "descriptor"
    assert entry.options == {"num_warps": 8, "num_stages": 4, **LAUNCH_OPTIONS}
    assert entry.arguments["x"] == "tensordesc<bf16[128, 64]>"
    assert entry.constants["stride_xk"] == 1
    assert (entry.constants["ACTIVATION"], entry.constants["GROUP"]) == ("none", 8)
    assert linear_entry(of, activation="silu").constants["ACTIVATION"] == "silu"
    assert linear_entry(of, form="pointer").arguments["x"] == "*bf16"

    def other_constants(tile, form):
        return sound(tile, form) | {"GROUP": 4, "num_stages": 3}

    sound = launch.constants
    monkeypatch.setattr(launch, "constants", other_constants)
    assert linear_entry(of).constants == entry.constants | {"GROUP": 4}
    assert linear_entry(of).options == {"num_warps": 8, "num_stages": 3, **LAUNCH_OPTIONS}


def test_alignment_is_that_of_each_operand():
    of = operands()
    entry = linear_entry(of, form="pointer")
    assert entry.aligned == set(entry.arguments)
    wide, long = of.tensor(64, 40), of.tensor(65 * 32)
    assert linear_entry(of, form="pointer", x=wide[:, :32]).aligned == entry.aligned - {"stride_xt"}
    shifted = long[1 : 64 * 32 + 1].view(64, 32)
    assert linear_entry(of, form="pointer", x=shifted).aligned == entry.aligned - {"x"}
    entry = linear_entry(operands(ragged=True))  # of sizes that are multiples of 16
    assert entry.form == "pointer"
    assert entry.aligned == {"T", "N", "K", "stride_xt", "stride_wn"}


def test_one_of_several_kernels_is_the_entry_and_stages_may_be_tritons():
    of = operands(torch.float32)
    first = entry_of(lambda of: bias_grad(of.tensor(4096, 64)), of)  # in two steps
    assert (first.function, first.num_stages) == ("_sum_rows_kernel", None)
    assert first.options == {"num_warps": 4, **LAUNCH_OPTIONS}
    last = entry_of(partial(recording.norm, kind="rms"), of, function="_sum_rows_kernel")
    assert last.function == "_sum_rows_kernel"
    assert entry_of(partial(recording.norm, kind="rms"), of).function == "_norm_fwd_kernel"


def test_types_and_alignment_are_tritons_own():
    matrix = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    for value in (
        *(matrix, matrix[:, 1:], matrix.float(), matrix.half(), matrix.int(), matrix.long()),
        *(0, 2, 16, 17, -(2**31), 2**31 - 1, 2**31, 0.5, 1.0),
        TensorDescriptor(matrix, [64, 64], [64, 1], [32, 16]),
    ):
        kind, hint = native_specialize_impl(CUDABackend, value, False, True, True)
        assert (_type_of(value), _is_aligned(value)) == (kind, hint == "D")
    assert native_specialize_impl(CUDABackend, 1, False, True, True) == ("constexpr", 1)


def test_tf32_is_recorded_where_it_is_asked_for_and_torch_is_left_as_it_was():
    before, of = torch.backends.cuda.matmul.fp32_precision, operands(torch.float32)
    for precision in ("tf32", "ieee"):
        entry = entry_of(lambda of: recording.primitive(of, "linear"), of, precision=precision)
        assert entry.constants["PRECISION"] == precision
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_meta_tensors_are_refused_outside_a_recording():
    x = torch.empty(16, 16, device="meta")
    with pytest.raises(ValueError, match="got meta"):
        linear_fwd(x, x)


ENTRY = "gfx942/linear/pointer/bf16/128x128x32/gelu_tanh+bias+z"


def test_parts_in_a_row_are_named_and_half_a_part_is_not():
    wanted = ["", "/", "linear", "linear/", "/linear", "linear/pointer", "gfx942", "gfx942/*", "*bias*"]
    assert [one for one in (*wanted, "l*r", "*+z", ENTRY) if not has_parts(ENTRY, one)] == []
    other = ["line", "inear", "linear/bf16", "pointer/linear", "gelu_tanh", "LINEAR"]
    assert [one for one in other if has_parts(ENTRY, one)] == []
    assert not has_parts("scatter_linear/pointer/bf16", "linear/pointer")
    assert has_parts("scatter_linear/pointer/bf16", "*linear/pointer")


def test_a_new_primitive_is_compiled_and_checked_by_its_record_alone(monkeypatch):
    """Its kernel stands in for a new one; a wrong one is seen."""
    toy = replace(products.bias_grad, schema="toy(Tensor dy) -> db")
    monkeypatch.setitem(primitives.RECORDS, "toy", toy)
    catalog.cache_clear()
    entry = next(entry for entry in catalog() if entry.name.startswith("toy/"))
    catalog.cache_clear()
    assert (entry.name, entry.function) == ("toy/pointer/bf16/sample", "_sum_rows_kernel")
    found = {case.name: examine(case, Frames()) for case in cases() if "toy" in case.name}
    assert {name: computed.failure for name, computed in found.items()} == {"toy/fp32": "", "toy/bf16": ""}

    wrong = replace(toy, by_kernel=lambda dy: 2 * bias_grad(dy))
    monkeypatch.setitem(primitives.RECORDS, "toy", wrong)
    case = next(case for case in cases() if case.name == "toy/fp32")
    assert "result 0 is off by" in examine(case, Frames()).failure
