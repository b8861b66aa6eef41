"""Every kernel form that is shipped: what is launched with which tiles and dtypes, on which GPUs.

A list of launches, each recorded on the meta device. Every epilogue is compiled where the speed is, in bf16
on Hopper; elsewhere the costliest of each tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial

import torch

from tpkernels.gate import recording, scaled
from tpkernels.gate.ahead_of_time import ARCHITECTURES, Entry
from tpkernels.gate.recording import EntrySpec, MetaOperands
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.footprints import SHORT_NAMES, stem_of
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import A100, B200, H100, MI300, Target
from tpkernels.kernels.tiles import (
    EMBEDDING,
    EMBEDDING_GRAD,
    KERNELS,
    LOGITS,
    MAX_FEATURES,
    ORDERED_SUM,
    SLOT_SUM,
    SLOT_SUM_ALONE,
    SUM,
    Kernel,
    MatmulTile,
    candidates,
    default_tiles,
    serves,
    specializes,
    sum_tile,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# what each GPU may be given: descriptors from sm_90 on, masked pointers everywhere
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

T, N, K = 2096, 512, 1024  # multiples of 16
FEATURES = (1024, 8192, MAX_FEATURES)  # of a norm

LauncherCall = Callable[[MetaOperands], object]


@cache
def catalog() -> tuple[Entry, ...]:
    """All entries, in a fixed order; names are unique."""
    return tuple(spec.entry() for spec in entry_specs().values())


def entry_specs() -> Mapping[str, EntrySpec]:
    """Name of an entry -> how its launch is recorded, at these sizes or at others."""
    listed = (*_matmul_specs(), *scaled.entry_specs(), *_row_specs())
    named = {spec.name: spec for spec in listed}
    assert len(named) == len(listed), "two entries have one name"
    return named


def has_parts(name: str, wanted: str) -> bool:
    """What `check --only` takes: whether `wanted` is in `name` between slashes; `*` stands for anything.

    >>> has_parts("gfx942/linear/pointer/bf16", "linear/pointer")
    True
    >>> has_parts("gather_linear/pointer/bf16", "linear"), has_parts("gather_linear/pointer/bf16", "*linear")
    (False, True)
    """
    wanted = wanted.strip("/")
    return not wanted or fnmatchcase(f"/{name}/", f"*/{wanted}/*")


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


def _cases() -> Iterator[_TileCase]:
    for kernel in KERNELS:
        for target, architecture in ((H100, "sm_90"), (B200, "sm_100")):
            for tile in candidates(kernel, "descriptor", BF16, target):
                yield _TileCase(kernel, "descriptor", BF16, tile, target, (architecture,))
        largest = candidates(kernel, "descriptor", FP16, H100)[0]
        yield _TileCase(kernel, "descriptor", FP16, largest, H100, ("sm_90",))
        for target, architectures in ((A100, NVIDIA), (MI300, ("gfx942",))):
            for dtype, ragged in ((BF16, False), (BF16, True), (FP32, False)):
                for tile in candidates(kernel, "pointer", dtype, target, ragged):
                    yield _TileCase(kernel, "pointer", dtype, tile, target, architectures, ragged)
            largest = candidates(kernel, "pointer", FP16, target)[0]
            yield _TileCase(kernel, "pointer", FP16, largest, target, architectures)


def _matmul_specs() -> Iterator[EntrySpec]:
    for case in _cases():
        yield from _specs(case)
    largest = candidates("linear", "pointer", FP32, A100)[0]
    yield from _specs(_TileCase("linear", "pointer", FP32, largest, A100, NVIDIA), tf32=True)
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
    thorough = (case.target == H100 or case.tile.blocks == 2) and case.dtype == BF16 and case.tile.splits == 1
    defaults = default_tiles(case.kernel, case.form, case.dtype, case.target, case.ragged)
    for names in (COSTLIEST[case.kernel], OTHERS[case.kernel] if thorough else {}):
        for name, start in names.items():
            kernel, epilogue = name.split("/")
            if kernel in UNTIMED and case.tile not in defaults:
                continue
            if case.tile.specialize and not specializes(kernel, case.form, case.target):
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
    for name in ("linear", "dgrad", "dgrad_pairs"):
        for form, target, architectures in ways:
            tile = sum_tile(form, BF16, target)
            prefix = f"{architectures[0]}/" if target in (B200, MI300) else ""
            of = MetaOperands(T, N, K, BF16, chunks=2, form=form, tile=tile)
            call = partial(recording.primitive, name=name, into=FP32, **recording.BARE)
            entry = f"{prefix}{stem_of(name, form, BF16, tile)}/=fp32"
            yield EntrySpec(entry, call, of, target, architectures)


UNTIMED = ("gather_linear", "scatter_linear")  # ranks time the tiles of these two: defaults alone
COSTLIEST: Mapping[Kernel, Mapping[str, LauncherCall]] = {
    "linear": {
        "linear/gelu_tanh+bias+z": partial(recording.primitive, name="linear", activation="gelu_tanh"),
        "gather_linear/gelu_tanh+bias+z": partial(recording.gather_linear, activation="gelu_tanh"),
        "gather_linear/depth_first": recording.gather_dgrad,
        "scatter_linear/two+depth_first": partial(recording.scatter_linear, pairs=2, depth_first=True),
    },
    "glu": {"glu/swiglu+gu": partial(recording.primitive, name="glu", glu="swiglu")},
    "dgrad": {
        "dgrad/gelu_tanh+db": partial(recording.primitive, name="dgrad_act", activation="gelu_tanh"),
        "dgrad_pairs/none": partial(recording.primitive, name="dgrad_pairs"),
    },
    "dglu": {"dglu/swiglu+h": partial(recording.primitive, name="dglu", glu="swiglu")},
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


def _row_specs() -> Iterator[EntrySpec]:
    """Norms with every option on, at three widths; the others in the dtypes that they meet."""
    for kind in ("rms", "layer"):
        norm = partial(recording.norm, kind=kind)
        for features in FEATURES:
            yield _row_spec("norm_fwd", f"{features}/{kind}", BF16, norm, features)
            yield _row_spec("norm_bwd", f"{features}/{kind}", BF16, norm, features)
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
    for name in recording.other_primitives():
        of = MetaOperands(T, N, K, BF16, chunks=2)
        call = partial(recording.primitive, name=name)
        yield EntrySpec(f"{name}/pointer/{SHORT_NAMES[BF16]}/sample", call, of, A100, ARCHITECTURES)


def _row_spec(kernel: str, way: str, dtype: torch.dtype, call: LauncherCall, features: int = K) -> EntrySpec:
    name, of = f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}", MetaOperands(T, N, features, dtype, chunks=2)
    return EntrySpec(name, call, of, A100, ARCHITECTURES, function=f"_{kernel}_kernel")
