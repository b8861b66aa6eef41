"""Every kernel form that is shipped, registered with the gate: launches, tiles and dtypes, on which GPUs.

A list of launches, each recorded on the meta device. The costliest epilogue is compiled with every tile; the
others once, in bf16 on Hopper with the largest default tile. Pointer kernels in fp32 and fp16, and on ragged
operands, and rows in fp32 are compiled for `FEW`: on the GPUs in between they are the same code. Sums of fp8
are promoted by the compiler on Hopper and in the kernel's own words on Ada and the smaller Blackwell, so that
the pointer form is recorded for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tpkernels.gate.ahead_of_time import ARCHITECTURES, Entry
from tpkernels.gate.disassembly import FP8_PRODUCTS
from tpkernels.gate.numerics import Results
from tpkernels.gate.user_kernels.config import Config
from tpkernels.gate.user_kernels.record import FunctionPath
from tpkernels.gate.user_kernels.table import registered
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.operands import Form
from tpkernels.kernels.scaled import DTYPE_OF
from tpkernels.kernels.target import A100, B200, H100, L40S, MI300, Target
from tpkernels.kernels.tiles import (
    ELEMENTS,
    EMBEDDING,
    EMBEDDING_GRAD,
    KERNELS,
    LOGITS,
    MAX_FEATURES,
    MAX_PLUS_FEATURES,
    MAX_SLOT_ROW,
    ORDERED_SUM,
    SLOT_SUM,
    SLOT_SUM_ALONE,
    SUM,
    Kernel,
    MatmulTile,
    candidates,
    default_tiles,
    serves,
    sum_tile,
)
from tpkernels.registered import recording
from tpkernels.registered.names import SHORT_NAMES, TABLE, stem_of
from tpkernels.registered.recording import EntrySpec, MetaOperands

SCALINGS = ("rows", "blocks")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# what each GPU may be given: descriptors from sm_90 on, masked pointers everywhere
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
FEW = ("sm_80", "sm_90", "sm_120")  # the oldest, the usual, the one with least shared memory

T, N, K = 2096, 512, 1024  # multiples of 16
FEATURES = (1024, 8192, MAX_FEATURES)  # of a norm

LauncherCall = Callable[[MetaOperands], object]


@cache
def config() -> Config:
    """Our kernels, registered by the call that registers anybody's."""
    for spec in entry_specs().values():
        spec.register()
    cases = FunctionPath("tpkernels.registered.numeric_cases:cases")
    return Config(Path(__file__), TABLE, registered(), imported=True, cases=cases)


@cache
def catalog() -> tuple[Entry, ...]:
    """All entries, in a fixed order."""
    return tuple(spec.entry() for spec in entry_specs().values())


def entry_specs() -> Mapping[str, EntrySpec]:
    """Name of an entry -> how its launch is recorded, at these sizes or at others. Names are unique."""
    listed = (*_matmul_specs(), *_fp8_specs(), *_row_specs())
    named = {spec.name: spec for spec in listed}
    assert len(named) == len(listed), "two entries have one name"
    return named


@dataclass(frozen=True, slots=True)
class _TileCase:
    """A kernel with one tile for one kind of GPU; the epilogues multiply it."""

    kernel: Kernel
    form: Form
    dtype: torch.dtype
    tile: MatmulTile
    target: Target
    architectures: tuple[str, ...]
    ragged: bool = False  # addresses and sizes that are multiples of nothing


def _tiles(
    kernel: Kernel, form: Form, dtype: torch.dtype, target: Target, ragged: bool = False
) -> tuple[MatmulTile, ...]:
    """Candidates of one role: all warps load and multiply."""
    found = candidates(kernel, form, dtype, target, ragged)
    return tuple(tile for tile in found if not getattr(tile, "in_roles", False))


def _cases() -> Iterator[_TileCase]:
    for kernel in KERNELS:
        for target, architecture in ((H100, "sm_90"), (B200, "sm_100")):
            for tile in _tiles(kernel, "descriptor", BF16, target):
                yield _TileCase(kernel, "descriptor", BF16, tile, target, (architecture,))
        largest = candidates(kernel, "descriptor", FP16, H100)[0]
        yield _TileCase(kernel, "descriptor", FP16, largest, H100, ("sm_90",))
        for target, architectures in ((A100, NVIDIA), (MI300, ("gfx942",))):
            for dtype, ragged in ((BF16, False), (BF16, True), (FP32, False)):
                plain = dtype == BF16 and not ragged
                for tile in _tiles(kernel, "pointer", dtype, target, ragged):
                    gpus = architectures if plain or target == MI300 else FEW
                    yield _TileCase(kernel, "pointer", dtype, tile, target, gpus, ragged)
            largest = candidates(kernel, "pointer", FP16, target)[0]
            yield _TileCase(kernel, "pointer", FP16, largest, target, gpus)


def _matmul_specs() -> Iterator[EntrySpec]:
    for case in _cases():
        yield from _specs(case)
    largest = candidates("linear", "pointer", FP32, A100)[0]
    yield from _specs(_TileCase("linear", "pointer", FP32, largest, A100, FEW), tf32=True)
    yield from _sum_specs()


def _specs(case: _TileCase, tf32: bool = False) -> Iterator[EntrySpec]:
    """What is launched with a tile: the costliest epilogues, and where the speed is the others too."""
    odd = int(case.ragged)  # T / 2 and (T + 1) / 3 are multiples of nothing, and hold a group of tiles
    sizes = T + odd, N + odd, K + odd
    of = MetaOperands(*sizes, case.dtype, chunks=2 + odd, form=case.form, tile=case.tile, ragged=case.ragged)
    stem = stem_of(case.kernel, case.form, case.dtype, case.tile)
    prefix = f"{case.architectures[0]}/" if case.target in (B200, MI300) else ""
    suffix = "/ragged" * case.ragged + "/tf32" * tf32
    # what a tile that splits writes are sums in fp32, whatever the result
    defaults = default_tiles(case.kernel, case.form, case.dtype, case.target, case.ragged)
    thorough = case.target == H100 and case.dtype == BF16 and case.tile == defaults[0]
    for names in (COSTLIEST[case.kernel], OTHERS[case.kernel] if thorough else {}):
        for name, start in names.items():
            kernel, epilogue = name.split("/")
            timed_by_ranks = kernel == "scatter_linear" or "wait" in epilogue.split("+")
            if timed_by_ranks and case.tile not in defaults:  # which take these alone
                continue
            if not serves(case.kernel, case.tile, epilogue.split("+")):
                continue
            yield EntrySpec(
                f"{prefix}{stem.replace(case.kernel, kernel, 1)}/{epilogue}{suffix}",
                start,
                of,
                case.target,
                case.architectures,
                precision="tf32" if tf32 else "ieee",
            )


def _sum_specs() -> Iterator[EntrySpec]:
    """Products of 16-bit operands that are written in fp32: what each segment of a split depth adds."""
    ways: tuple[tuple[Form, Target, tuple[str, ...]], ...] = (
        ("descriptor", H100, ("sm_90",)),
        ("descriptor", B200, ("sm_100",)),
        ("pointer", A100, NVIDIA),
        ("pointer", MI300, ("gfx942",)),
    )
    for name, kernel, epilogue in (
        ("linear", "linear", "=fp32"),
        ("dgrad", "dgrad", "=fp32"),
        ("dgrad_pairs", "dgrad", "two+=fp32"),
    ):
        for form, target, architectures in ways:
            tile = sum_tile(form, BF16, target)
            prefix = f"{architectures[0]}/" if target in (B200, MI300) else ""
            of = MetaOperands(T, N, K, BF16, chunks=2, form=form, tile=tile)
            call = partial(recording.primitive, name=name, into=FP32, **recording.BARE)
            entry = f"{prefix}{stem_of(kernel, form, BF16, tile)}/{epilogue}"
            yield EntrySpec(entry, call, of, target, architectures)


COSTLIEST: Mapping[Kernel, Mapping[str, LauncherCall]] = {
    "linear": {
        "linear/gelu_tanh+bias+z": partial(recording.primitive, name="linear", activation="gelu_tanh"),
        "linear/gelu_tanh+bias+z+wait": partial(
            recording.primitive, name="linear", activation="gelu_tanh", wait=True
        ),
        "scatter_linear/two+depth_first": partial(recording.scatter_linear, pairs=2, depth_first=True),
    },
    "glu": {
        "glu/swiglu+gu": partial(recording.primitive, name="glu", glu="swiglu"),
        "glu/swiglu+gu+wait": partial(recording.primitive, name="glu", glu="swiglu", wait=True),
    },
    "dgrad": {
        "dgrad/gelu_tanh+db": partial(recording.primitive, name="dgrad_act", activation="gelu_tanh"),
        "dgrad/gelu_tanh+db+wait": partial(
            recording.primitive, name="dgrad_act", activation="gelu_tanh", wait=True
        ),
        "dgrad/two": partial(recording.primitive, name="dgrad_pairs"),
    },
    "dglu": {
        "dglu/swiglu+h": partial(recording.primitive, name="dglu", glu="swiglu"),
        "dglu/swiglu+h+wait": partial(recording.primitive, name="dglu", glu="swiglu", wait=True),
    },
    "wgrad": {"wgrad/+=fp32": partial(recording.primitive, name="wgrad_accumulate_", into=FP32)},
}
OTHERS: Mapping[Kernel, Mapping[str, LauncherCall]] = {
    "linear": {
        "linear/none": partial(recording.primitive, name="linear", **recording.BARE),  # z is y then
        "linear/gelu+bias+z": partial(recording.primitive, name="linear", activation="gelu"),
        "linear/silu+bias+z": partial(recording.primitive, name="linear", activation="silu"),
        "linear/relu2+bias+z": partial(recording.primitive, name="linear", activation="relu2"),
        "scatter_linear/one": recording.scatter_linear,
        "scatter_linear/one+depth_first": partial(recording.scatter_linear, depth_first=True),
        "scatter_linear/two": partial(recording.scatter_linear, pairs=2),
    },
    "glu": {
        "glu/swiglu": partial(recording.primitive, name="glu", **recording.BARE),
        "glu/geglu+gu": partial(recording.primitive, name="glu", glu="geglu"),
        "glu/geglu_tanh+gu": partial(recording.primitive, name="glu", glu="geglu_tanh"),
    },
    "dgrad": {
        "dgrad/none": partial(recording.primitive, name="dgrad"),
        "dgrad/none+wait": partial(recording.primitive, name="dgrad", wait=True),
        "dgrad/gelu_tanh": partial(
            recording.primitive, name="dgrad_act", activation="gelu_tanh", **recording.BARE
        ),
        "dgrad/gelu+db": partial(recording.primitive, name="dgrad_act", activation="gelu"),
        "dgrad/silu+db": partial(recording.primitive, name="dgrad_act", activation="silu"),
        "dgrad/relu2+db": partial(recording.primitive, name="dgrad_act", activation="relu2"),
    },
    "dglu": {
        "dglu/geglu+h": partial(recording.primitive, name="dglu", glu="geglu"),
        "dglu/geglu_tanh+h": partial(recording.primitive, name="dglu", glu="geglu_tanh"),
    },
    "wgrad": {
        "wgrad/=bf16": partial(recording.primitive, name="wgrad", into=BF16),
        "wgrad/=fp32": partial(recording.primitive, name="wgrad", into=FP32),
        "wgrad/+=bf16": partial(recording.primitive, name="wgrad_accumulate_", into=BF16),
    },
}


E4M3, E5M2 = DTYPE_OF["e4m3"], DTYPE_OF["e5m2"]
SCALES: Mapping[str, Mapping[str, Any]] = {  # as a problem's options say -> how that is asked for
    "": {},
    "+blocks": {"scaling": "blocks"},
    "+blocks+square": {"scaling": "blocks", "square": True},
}
WAITING = {scales: SCALES[scales] for scales in ("", "+blocks+square")}
FAST: Mapping[str, Mapping[str, Any]] = {"+fast": {"fast": True}}
WIDE = (8192, MAX_FEATURES, 2 * MAX_FEATURES)  # features of rows; no program holds the last


@dataclass(frozen=True, slots=True)
class _Fp8Form:
    """A form on GPUs for which it is one kernel."""

    form: Form
    target: Target
    architectures: tuple[str, ...]


_SCALED_LINEAR = partial(recording.primitive, name="scaled_linear")

FP8_FORMS = (
    _Fp8Form("descriptor", H100, ("sm_90",)),
    _Fp8Form("descriptor", B200, ("sm_100",)),
    _Fp8Form("pointer", H100, ("sm_90", "sm_100")),
    _Fp8Form("pointer", L40S, ("sm_89", "sm_120")),
)


# kernel -> its epilogues: the costliest, which is compiled in fp32 and for ragged rows, too; the usual ones
ELEMENTWISE: Mapping[str, Mapping[str, partial[Results]]] = {
    "activate": {
        "geglu": partial(recording.gate, kind="geglu"),
        "swiglu": partial(recording.gate, kind="swiglu"),
        "gelu_tanh": partial(recording.activate, activation="gelu_tanh"),
    },
    "act_grad": {
        "gelu+db": partial(recording.act_grad, activation="gelu"),
        "gelu_tanh+db": partial(recording.act_grad, activation="gelu_tanh"),
        "gelu_tanh": partial(recording.act_grad, activation="gelu_tanh", bias_grad=False),
    },
    "glu_grad": {kind: partial(recording.glu_grad, kind=kind) for kind in ("geglu", "swiglu")},
}


_ACT = partial(recording.quantize, activation="silu")
_GLU = partial(_ACT, gated=True)
QUANTIZED: Mapping[str, partial[Results]] = {
    "rows": partial(recording.quantize),
    "rows+e5m2": partial(recording.quantize, format="e5m2"),
    "rows+power_of_two": partial(recording.quantize, power_of_two=True),
    "rows+by_columns": partial(recording.quantize, by_columns=True),
    "blocks": partial(recording.quantize, scaling="blocks"),
    "blocks+by_columns": partial(recording.quantize, scaling="blocks", by_columns=True),
    "blocks+square": partial(recording.quantize, scaling="blocks", square=True),
    "rows+silu": _ACT,
    "rows+swiglu": _GLU,
    "blocks+silu": partial(_ACT, scaling="blocks"),
    "blocks+swiglu": partial(_GLU, scaling="blocks"),
}


def _fp8_specs() -> Iterator[EntrySpec]:
    """Of what multiplies fp8, and of what quantizes."""
    yield from _fp8_products()
    for way, quantize in QUANTIZED.items():
        yield _fp8_row_spec("quantize", f"{K}/{way}", quantize)
    for features in WIDE:
        yield _fp8_row_spec("quantize", f"{features}/rows", recording.quantize, features)
    yield _fp8_row_spec("quantize", f"{K}/rows", recording.quantize, dtype=FP32)
    yield from _waiting_products()
    for scaling in SCALINGS:
        call = partial(recording.primitive, name="dequantize", scaling=scaling)
        yield _fp8_row_spec("dequantize", f"{K}/{scaling}", call)


def _fp8_products() -> Iterator[EntrySpec]:
    """The costliest epilogue of each tile; all scales, the plain epilogue, fp32 results of the largest alone.

    The same with fast accumulation, but for Blackwell's tiles, whose code does not differ. e5m2 is the format
    of gradients, which meet weights in e4m3: the largest tile of each form.
    """
    for way in FP8_FORMS:
        for ragged in (False, True) if way.form == "pointer" else (False,):
            for number, tile in enumerate(_tiles("linear", way.form, E4M3, way.target, ragged)):
                yield from _fp8_specs_of(way, tile, ragged, thorough=number == 0)
        for scales, options in SCALES.items():
            summed = partial(_SCALED_LINEAR, **options, **recording.BARE, into=FP32)
            yield _fp8_spec(way, sum_tile(way.form, E4M3, way.target), f"none+=fp32{scales}", summed)
        gradient = partial(_SCALED_LINEAR, **recording.BARE, format="e5m2")
        largest = _tiles("linear", way.form, E5M2, way.target)[0]
        yield _fp8_spec(way, largest, "none+float8_e4m3fn", gradient, E5M2)


def _waiting_products() -> Iterator[EntrySpec]:
    """Of the tiles that launchers take by themselves, as none is chosen by timing; of weights' own scales."""
    for way in FP8_FORMS:
        for ragged in (False, True) if way.form == "pointer" else (False,):
            for tile in default_tiles("linear", way.form, E4M3, way.target, ragged=ragged):
                for scales, options in WAITING.items():
                    call = partial(_SCALED_LINEAR, **options, activation="gelu_tanh", wait=True)
                    epilogue = f"gelu_tanh+bias+z{scales}+wait"
                    yield _fp8_spec(way, tile, epilogue, call, ragged=ragged, chunks=2)


def _fp8_specs_of(way: _Fp8Form, tile: MatmulTile, ragged: bool, thorough: bool) -> Iterator[EntrySpec]:
    """Of one tile. thorough: all scales, and the plain epilogue; else the costliest that the tile serves"""
    offered = SCALES if way.target == B200 else {**SCALES, **FAST}
    served = [scales for scales in offered if serves("linear", tile, scales.split("+"))]
    costliest = next(scales for scales in (*reversed([*SCALES]), *FAST) if scales in served)
    for scales in served if thorough else [costliest]:
        costly = partial(_SCALED_LINEAR, **offered[scales], activation="gelu_tanh")
        yield _fp8_spec(way, tile, f"gelu_tanh+bias+z{scales}", costly, ragged=ragged)
        if way.form == "descriptor" and thorough:
            plain = partial(_SCALED_LINEAR, **offered[scales], **recording.BARE)
            yield _fp8_spec(way, tile, f"none{scales}", plain)


def _fp8_row_spec(
    kernel: str,
    way: str,
    call: LauncherCall,
    features: int = K,
    dtype: torch.dtype = BF16,
) -> EntrySpec:
    name, of = f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}", MetaOperands(T, N, features, dtype)
    return EntrySpec(name, call, of, H100, tuple(FP8_PRODUCTS))


def _fp8_spec(
    way: _Fp8Form,
    tile: MatmulTile,
    epilogue: str,
    call: LauncherCall,
    dtype: torch.dtype = E4M3,
    ragged: bool = False,
    chunks: int = 1,
) -> EntrySpec:
    odd = int(ragged)
    sizes = T + odd, N + odd, K + odd
    of = MetaOperands(*sizes, dtype, chunks=chunks + odd, form=way.form, tile=tile, ragged=ragged)
    prefix = f"{way.architectures[0]}/" if way.target in (B200, L40S) else ""
    name = f"{prefix}{stem_of('scaled_linear', way.form, dtype, tile)}/{epilogue}{'/ragged' * ragged}"
    return EntrySpec(name, call, of, way.target, way.architectures)


def _row_specs() -> Iterator[EntrySpec]:
    """Norms with every option on, at three widths; the others in the dtypes that they meet."""
    for kind in ("rms", "layer"):
        norm = partial(recording.norm, kind=kind)
        for features in FEATURES:
            yield _row_spec("norm_fwd", f"{features}/{kind}", BF16, norm, features)
            if features <= MAX_PLUS_FEATURES:
                plus = partial(norm, plus=True)
                yield _row_spec("norm_bwd", f"{features}/{kind}+plus", BF16, plus, features)
            waiting = partial(recording.slot_sums, norm=kind)
            yield _row_spec("reduce_slots", f"{features}/bias+{kind}+wait", BF16, waiting, features)
        yield _row_spec("norm_bwd", f"{features}/{kind}", BF16, norm, features)
        plain = partial(recording.slot_sums, wait=False, norm=kind)
        yield _row_spec("reduce_slots", f"{features}/bias+{kind}", BF16, plain, features)
    widest = partial(recording.slot_sums, norm="layer")
    features = MAX_SLOT_ROW // FP32.itemsize
    yield _row_spec("reduce_slots", f"{features}/bias+layer+wait", FP32, widest, features)
    for dtype in (BF16, FP32):
        yield _row_spec("sum_rows", f"{SUM.chunk}x{SUM.block_cols}", dtype, recording.row_sums)
        ordered = partial(recording.row_sums, launcher=partial(bias_grad, tile=ORDERED_SUM))
        way = f"{ORDERED_SUM.chunk}x{ORDERED_SUM.block_cols}/ordered"
        yield _row_spec("sum_rows", way, dtype, ordered)
    block = f"{SLOT_SUM.block_rows}x{SLOT_SUM.block_cols}"
    for epilogue, wait in (("bias", False), ("bias+wait", True)):
        for dtype in (BF16, FP32):
            yield _row_spec(
                "reduce_slots", f"{block}/{epilogue}", dtype, partial(recording.slot_sums, wait=wait)
            )
    for epilogue, wait in (("bias+tree8", False), ("bias+tree8+wait", True)):
        call = partial(recording.slot_sums, wait=wait, slots=8, tree=True)
        yield _row_spec("reduce_slots", f"{block}/{epilogue}", FP32, call)
    alone = f"{SLOT_SUM_ALONE.block_rows}x{SLOT_SUM_ALONE.block_cols}"
    for dtype in (BF16, FP32):
        call = partial(recording.slot_sums, tile=SLOT_SUM_ALONE)
        yield _row_spec("reduce_slots", f"{alone}/bias+wait", dtype, call)
    for epilogue, into in (("=bf16", BF16), ("+=bf16", BF16), ("+=fp32", FP32)):
        call = partial(recording.added_slots, into=into, accumulate=epilogue.startswith("+"))
        yield _row_spec("add_slots", f"{block}/{epilogue}", FP32, call)
    yield _row_spec("advance", "one", BF16, recording.advance)
    for kernel, tile, name in (
        ("embedding_fwd", EMBEDDING, "lookup"),
        ("embedding_splits", EMBEDDING_GRAD, "lookup_grad"),
        ("embedding_bwd", EMBEDDING_GRAD, "lookup_grad"),
    ):
        call = partial(recording.primitive, name=name)
        yield _row_spec(kernel, f"{tile.block_rows}x{tile.block_cols}", BF16, call)
    for dtype in (BF16, FP32):
        for kernel in ("softmax_statistics", "cross_entropy_grad"):
            yield _row_spec(kernel, f"{LOGITS.block_cols}", dtype, recording.cross_entropy)
            with_entropy = partial(recording.cross_entropy, scale=0.7)
            yield _row_spec(kernel, f"{LOGITS.block_cols}/entropy", dtype, with_entropy)
    yield from _elementwise_specs()
    for name in recording.other_primitives():
        of = MetaOperands(T, N, K, BF16, chunks=2)
        call = partial(recording.primitive, name=name)
        yield EntrySpec(f"{name}/pointer/{SHORT_NAMES[BF16]}/sample", call, of, A100, ARCHITECTURES)


def _elementwise_specs() -> Iterator[EntrySpec]:
    """On AMD apart: what is quick on NVIDIA's GPUs is PTX."""
    block = f"{ELEMENTS.block_rows}x{ELEMENTS.block_cols}"
    for kernel, calls in ELEMENTWISE.items():
        way, costliest = next(iter(calls.items()))
        ragged = _row_spec(kernel, f"{block}/{way}/ragged", BF16, costliest)
        for spec in (
            *(_row_spec(kernel, f"{block}/{name}", BF16, call) for name, call in calls.items()),
            _row_spec(kernel, f"{block}/{way}", FP32, costliest),
            replace(ragged, of=MetaOperands(T + 1, N + 1, K + 1, BF16, ragged=True)),
        ):
            nvidia = tuple(gpu for gpu in spec.architectures if gpu in NVIDIA)
            yield replace(spec, architectures=nvidia)
            yield replace(spec, name=f"gfx942/{spec.name}", target=MI300, architectures=("gfx942",))


def _row_spec(kernel: str, way: str, dtype: torch.dtype, call: LauncherCall, features: int = K) -> EntrySpec:
    name, of = f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}", MetaOperands(T, N, features, dtype, chunks=2)
    architectures = ARCHITECTURES if dtype == BF16 else (*FEW, "gfx942")
    return EntrySpec(name, call, of, A100, architectures, function=f"_{kernel}_kernel")
