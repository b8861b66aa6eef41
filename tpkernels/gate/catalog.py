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

from tpkernels.gate.ahead_of_time import ARCHITECTURES, Entry
from tpkernels.gate.recording import META, Operands, recorded
from tpkernels.kernels.activations import Activation, Glu
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.footprints import SHORT_NAMES, stem_of
from tpkernels.kernels.gather_linear import gather_linear_fwd
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.reduce import reduce_slots
from tpkernels.kernels.target import A100, B200, H100, MI300, Target
from tpkernels.kernels.tiles import (
    EMBEDDING,
    EMBEDDING_GRAD,
    KERNELS,
    LOGITS,
    MAX_FEATURES,
    SLOT_SUM,
    SUM,
    Kernel,
    MatmulTile,
    candidates,
    waiting_tile,
)
from tpkernels.kernels.waits import Arrivals
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# what each GPU may be given: descriptors from sm_90 on, masked pointers everywhere
NVIDIA = ("sm_80", "sm_89", "sm_90", "sm_100")

# multiples of 16; T / 2 and (T + 1) / 3 are whole too, and hold a whole group of tiles: see `_gather_linear`
T, N, K = 2096, 512, 1024
FEATURES = (1024, 8192, MAX_FEATURES)  # of a norm
FIRST_ID = 5  # a multiple of nothing, as first ids are in general; so are other counts below

Matmul = Callable[[Operands, MatmulTile, Form], object]


@cache
def catalog() -> tuple[Entry, ...]:
    """All entries, in a fixed order; names are unique."""
    return (*_matmul_entries(), *_row_entries())


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
class _Case:
    """A kernel with one tile for one kind of GPU; the epilogues multiply it."""

    kernel: Kernel
    form: Form
    dtype: torch.dtype
    tile: MatmulTile
    target: Target
    architectures: tuple[str, ...]
    ragged: bool = False  # addresses and sizes that are multiples of nothing


def _cases() -> Iterator[_Case]:
    for kernel in KERNELS:
        for target, architecture in ((H100, "sm_90"), (B200, "sm_100")):
            for tile in candidates(kernel, "descriptor", BF16, target):
                yield _Case(kernel, "descriptor", BF16, tile, target, (architecture,))
        largest = candidates(kernel, "descriptor", FP16, H100)[0]
        yield _Case(kernel, "descriptor", FP16, largest, H100, ("sm_90",))
        for target, architectures in ((A100, NVIDIA), (MI300, ("gfx942",))):
            for dtype, ragged in ((BF16, False), (BF16, True), (FP32, False)):
                for tile in candidates(kernel, "pointer", dtype, target, ragged):
                    yield _Case(kernel, "pointer", dtype, tile, target, architectures, ragged)
            largest = candidates(kernel, "pointer", FP16, target)[0]
            yield _Case(kernel, "pointer", FP16, largest, target, architectures)


def _matmul_entries() -> Iterator[Entry]:
    for case in _cases():
        yield from _entries(case)
    largest = candidates("linear", "pointer", FP32, A100)[0]
    yield from _entries(_Case("linear", "pointer", FP32, largest, A100, NVIDIA), tf32=True)


def _entries(case: _Case, tf32: bool = False) -> Iterator[Entry]:
    """What is launched with a tile: the costliest epilogues, and where the speed is the others too."""
    of = Operands(case.dtype, case.ragged)
    stem = stem_of(case.kernel, case.form, case.dtype, case.tile)
    prefix = f"{case.architectures[0]}/" if case.target in (B200, MI300) else ""
    suffix = "/ragged" * case.ragged + "/tf32" * tf32
    thorough = case.target == H100 and case.dtype == BF16
    for names in (COSTLIEST[case.kernel], OTHERS[case.kernel] if thorough else {}):
        for name, start in names.items():
            kernel, epilogue = name.split("/")
            yield recorded(
                f"{prefix}{stem.replace(case.kernel, kernel, 1)}/{epilogue}{suffix}",
                partial(start, of, case.tile, case.form),
                of,
                case.target,
                case.architectures,
                "tf32" if tf32 else "ieee",
            )


def _linear(of: Operands, tile: MatmulTile, form: Form, activation: Activation, bias: bool = True) -> None:
    b = of(N) if bias else None
    linear_fwd(of(T, K), of(N, K), b, activation=activation, keep_z=True, tile=tile, form=form)


def _gather_linear(of: Operands, tile: MatmulTile, form: Form) -> None:
    x, chunks = of(T, K), 2 + of.ragged
    gather_linear_fwd(
        x,
        of(N, K),
        of(N),
        arrivals=_arrivals(of, chunks),
        first_row=3 * tile.block_rows,
        activation="gelu_tanh",
        keep_z=True,
        tile=waiting_tile(tile, len(x) // chunks),
        form=form,
    )


def _arrivals(of: Operands, chunks: int) -> Arrivals:
    flags, awaited, status = (of.empty((size,), torch.int32, META) for size in (chunks, 1, 1))
    return Arrivals(flags, awaited, status, spin_limit=1001)


def _glu(of: Operands, tile: MatmulTile, form: Form, kind: Glu, keep_gu: bool = True) -> None:
    glu_fwd(of(T, K), of(N, K), of(N, K), kind=kind, keep_gu=keep_gu, tile=tile, form=form)


def _dgrad(of: Operands, tile: MatmulTile, form: Form) -> None:
    dgrad(of(T, N), of(N, K), tile=tile, form=form)


def _dgrad_act(
    of: Operands, tile: MatmulTile, form: Form, activation: Activation, bias_grad: bool = True
) -> None:
    dgrad_act(of(T, N), of(N, K), of(T, K), activation, bias_grad=bias_grad, tile=tile, form=form)


def _dglu(of: Operands, tile: MatmulTile, form: Form, kind: Glu) -> None:
    dglu(of(T, N), of(N, K), of(T, K), of(T, K), kind=kind, emit_h=True, tile=tile, form=form)


def _wgrad(of: Operands, tile: MatmulTile, form: Form, dtype: torch.dtype) -> None:
    wgrad(of(T, N), of(T, K), dtype=dtype, tile=tile, form=form)


def _wgrad_accumulate(of: Operands, tile: MatmulTile, form: Form, dtype: torch.dtype) -> None:
    wgrad_accumulate_(of(N, K, dtype=dtype), of(T, N), of(T, K), tile=tile, form=form)


COSTLIEST: Mapping[Kernel, Mapping[str, Matmul]] = {
    "linear": {
        "linear/gelu_tanh+bias+z": partial(_linear, activation="gelu_tanh"),
        "gather_linear/gelu_tanh+bias+z": _gather_linear,
    },
    "glu": {"glu/swiglu+gu": partial(_glu, kind="swiglu")},
    "dgrad": {"dgrad/gelu_tanh+db": partial(_dgrad_act, activation="gelu_tanh")},
    "dglu": {"dglu/swiglu+h": partial(_dglu, kind="swiglu")},
    "wgrad": {"wgrad/+=fp32": partial(_wgrad_accumulate, dtype=FP32)},
}
OTHERS: Mapping[Kernel, Mapping[str, Matmul]] = {
    "linear": {
        "linear/none": partial(_linear, activation="none", bias=False),  # z is y then
        "linear/gelu+bias+z": partial(_linear, activation="gelu"),
        "linear/silu+bias+z": partial(_linear, activation="silu"),
        "linear/relu2+bias+z": partial(_linear, activation="relu2"),
    },
    "glu": {
        "glu/swiglu": partial(_glu, kind="swiglu", keep_gu=False),
        "glu/geglu+gu": partial(_glu, kind="geglu"),
        "glu/geglu_tanh+gu": partial(_glu, kind="geglu_tanh"),
    },
    "dgrad": {
        "dgrad/none": _dgrad,
        "dgrad/gelu_tanh": partial(_dgrad_act, activation="gelu_tanh", bias_grad=False),
        "dgrad/gelu+db": partial(_dgrad_act, activation="gelu"),
        "dgrad/silu+db": partial(_dgrad_act, activation="silu"),
        "dgrad/relu2+db": partial(_dgrad_act, activation="relu2"),
    },
    "dglu": {
        "dglu/geglu+h": partial(_dglu, kind="geglu"),
        "dglu/geglu_tanh+h": partial(_dglu, kind="geglu_tanh"),
    },
    "wgrad": {
        "wgrad/=bf16": partial(_wgrad, dtype=BF16),
        "wgrad/=fp32": partial(_wgrad, dtype=FP32),
        "wgrad/+=bf16": partial(_wgrad_accumulate, dtype=BF16),
    },
}


def _row_entries() -> Iterator[Entry]:
    """Norms with every option on, at three widths; the others in the dtypes that they meet."""
    for kind, fwd, bwd in (
        ("rms", _rms_norm_fwd, _rms_norm_bwd),
        ("layer", _layer_norm_fwd, _layer_norm_bwd),
    ):
        for features in FEATURES:
            yield _row_entry("norm_fwd", f"{features}/{kind}+residual", BF16, fwd, features)
            yield _row_entry("norm_bwd", f"{features}/{kind}+dsummed", BF16, bwd, features)
    for dtype in (BF16, FP32):
        yield _row_entry("sum_rows", f"{SUM.chunk}x{SUM.block_cols}", dtype, _bias_grad)
    block = f"{SLOT_SUM.block_rows}x{SLOT_SUM.block_cols}"
    for epilogue, wait in (("bias", False), ("bias+wait", True)):
        for dtype in (BF16, FP32):
            yield _row_entry("reduce_slots", f"{block}/{epilogue}", dtype, _reduce_slots, wait)
    for kernel, tile, call in (
        ("embedding_fwd", EMBEDDING, _embedding_fwd),
        ("embedding_bwd", EMBEDDING_GRAD, _embedding_bwd),
    ):
        yield _row_entry(kernel, f"{tile.block_rows}x{tile.block_cols}", BF16, call)
    for dtype in (BF16, FP32):
        yield _row_entry("softmax_statistics", f"{LOGITS.block_cols}", dtype, _softmax_statistics)
        yield _row_entry("cross_entropy_grad", f"{LOGITS.block_cols}", dtype, _cross_entropy_grad)


def _row_entry(
    kernel: str, way: str, dtype: torch.dtype, call: Callable[..., object], *options: object
) -> Entry:
    of, name = Operands(dtype), f"{kernel}/pointer/{SHORT_NAMES[dtype]}/{way}"
    return recorded(name, partial(call, of, *options), of, A100, ARCHITECTURES)


def _rms_norm_fwd(of: Operands, features: int) -> None:
    rms_norm_fwd(of(T, features), of(features), residual=of(T, features))


def _rms_norm_bwd(of: Operands, features: int) -> None:
    x, rstd = of(T, features), of(T, dtype=FP32)
    rms_norm_bwd(of(T, features), x, of(features), rstd, dsummed=of(T, features))


def _layer_norm_fwd(of: Operands, features: int) -> None:
    layer_norm_fwd(of(T, features), of(features), of(features), residual=of(T, features))


def _layer_norm_bwd(of: Operands, features: int) -> None:
    x, mean, rstd = of(T, features), of(T, dtype=FP32), of(T, dtype=FP32)
    layer_norm_bwd(of(T, features), x, of(features), mean, rstd, dsummed=of(T, features))


def _bias_grad(of: Operands) -> None:
    bias_grad(of(T, N))


def _reduce_slots(of: Operands, wait: bool) -> None:
    arrivals, chunks = (_arrivals(of, 5 + 3 * 2), range(5, 5 + 3 * 2)) if wait else (None, None)
    reduce_slots(of(3, T, N), of(N), arrivals=arrivals, chunks=chunks)


def _embedding_fwd(of: Operands) -> None:
    embedding_fwd(of(T, dtype=torch.int64), of(N, K), first_id=FIRST_ID)


def _embedding_bwd(of: Operands) -> None:
    embedding_bwd(of(T, K), of(T, dtype=torch.int64), rows=N, first_id=FIRST_ID)


def _softmax_statistics(of: Operands) -> None:
    softmax_statistics(of(T, K), of(T, dtype=torch.int64), columns=K - 3, first_id=FIRST_ID)


def _cross_entropy_grad(of: Operands) -> None:
    maximum, total, dloss = (of(T, dtype=FP32) for _ in range(3))
    target = of(T, dtype=torch.int64)
    cross_entropy_grad(of(T, K), target, maximum, total, dloss, columns=K - 3, first_id=FIRST_ID)
