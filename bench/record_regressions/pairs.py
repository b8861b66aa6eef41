"""The pairs: what was reported, what of it is compiled here on both sides, and what is to be told of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tpkernels.gate.ahead_of_time import Constant, Entry

TRITON = "3.7.1"  # whose budgets the package has
KERNELS = "bench.record_regressions.kernels"

# Triton's names of arguments' types, as `_types` reads them
NORM = "*fp16 x_ptr weight_ptr bias_ptr y_ptr; i32 stride columns"
SOFTMAX = "*bf16 x_ptr y_ptr; i32 stride columns"
SUMS = "*bf16 x_ptr; *fp32 y_ptr; i32 rows stride columns"
LINEAR = "*bf16 x_ptr w_ptr y_ptr; *fp32 scale_ptr; i32 M N K stride_x stride_w stride_y"
ATTENTION = "*bf16 q_ptr k_ptr v_ptr y_ptr; i32 stride tokens; fp32 scale"


@dataclass(frozen=True, slots=True)
class Side:
    """What is compiled, and by which Triton."""

    entry: Entry  # for one architecture
    triton: str = TRITON

    @property
    def architecture(self) -> str:
        return self.entry.architectures[0]

    def by(self, triton: str) -> Side:
        return replace(self, triton=triton)

    def launched(self, **options: int) -> Side:
        """With other num_warps or num_stages."""
        return replace(self, entry=replace(self.entry, **options))  # type: ignore[arg-type]

    def edited(self, **constants: Constant) -> Side:
        return replace(self, entry=replace(self.entry, constants={**self.entry.constants, **constants}))

    def unaligned(self, *arguments: str) -> Side:
        return replace(self, entry=replace(self.entry, aligned=self.entry.aligned - {*arguments}))


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    before: Side
    after: Side
    says: str  # what was reported and what caused it; of a pair without a cause, why its speed is the same
    causes: tuple[str, ...] = ()  # one of these `Change.what` is to be told first; (): nothing became worse


def side(
    kernel: str,
    types: str,
    constants: Mapping[str, Constant],
    num_warps: int = 4,
    num_stages: int | None = None,
    gpu: str = "sm_90",
) -> Side:
    arguments = dict(_types(types))
    aligned = frozenset(name for name, kind in arguments.items() if kind.startswith(("*", "i")))
    return Side(
        Entry(
            kernel, KERNELS, kernel, "pointer", arguments, aligned, constants, num_warps, num_stages, (gpu,)
        )
    )


def _types(text: str) -> Iterable[tuple[str, str]]:
    """>>> dict(_types("*bf16 x_ptr; i32 M N"))
    {'x_ptr': '*bf16', 'M': 'i32', 'N': 'i32'}
    """
    for group in text.split("; "):
        kind, *names = group.split(" ")
        yield from ((name, kind) for name in names)


def linear(m: int, n: int, k: int, num_warps: int, num_stages: int, types: str = LINEAR) -> Side:
    constants: dict[str, Constant] = {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": 8,
        "EDIT": "none",
        "PRECISION": "ieee",
    }
    return side("linear", types, constants, num_warps, num_stages)


def persistent(y: str = "bf16", num_stages: int = 3) -> Side:
    boxes = (
        f"tensordesc<bf16[128,64]> x_desc; tensordesc<bf16[256,64]> w_desc; tensordesc<{y}[128,128]> y_desc"
    )
    constants: dict[str, Constant] = {
        "BLOCK_M": 128,
        "BLOCK_N": 256,
        "BLOCK_K": 64,
        "FLATTEN": True,
        "EPILOGUE": "store",
    }
    return side("persistent_linear", f"{boxes}; i32 M N K", constants, 8, num_stages)


norm = side(
    "layer_norm", NORM, {"BLOCK": 16384, "EPS": 1e-5, "WIDE": False, "HINT": "evict_first"}, 16, 2, "sm_100"
)
norm_90 = replace(norm, entry=replace(norm.entry, architectures=("sm_90",)))
softmax = side("softmax", SOFTMAX, {"BLOCK": 4096})
sums = side("row_sums", SUMS, {"BLOCK_M": 16, "BLOCK_N": 256, "ACCURATE": False})
small = linear(64, 128, 64, 4, 4)
large, ring = linear(128, 256, 64, 8, 3), linear(128, 256, 64, 8, 4)
fp8 = linear(
    128, 128, 128, 8, 3, LINEAR.replace("*bf16 x_ptr w_ptr y_ptr", "*bf16 y_ptr; *fp8e4nv x_ptr w_ptr")
)
mixed = linear(
    128, 128, 128, 8, 3, LINEAR.replace("*bf16 x_ptr w_ptr y_ptr", "*bf16 x_ptr y_ptr; *fp8e4nv w_ptr")
)
tf32 = linear(64, 128, 64, 4, 2, LINEAR.replace("*bf16", "*fp32")).edited(PRECISION="tf32x3")
attention = side("attention", ATTENTION, {"BLOCK_M": 128, "BLOCK_N": 64, "D": 128, "NORMALISE": "once"}, 8, 3)
attention_bwd = side(
    "attention_bwd",
    "*bf16 q_ptr k_ptr v_ptr dy_ptr dk_ptr dv_ptr; *fp32 dq_ptr; i32 stride tokens; fp32 scale",
    {"BLOCK_M": 64, "BLOCK_N": 128, "D": 128},
    *(8, 2),
)
decode = side(
    "sparse_decode",
    "*bf16 q_ptr kv_ptr y_ptr; *i32 at_ptr; i32 stride count; fp32 scale",
    {"HEADS": 32, "BLOCK_N": 64, "D": 512},
    *(8, 1, "sm_80"),
)
states = side(
    "chunk_state",
    "*bf16 k_ptr w_ptr u_ptr h_ptr; *fp32 g_ptr; i32 tokens stride_k stride_v",
    {"K": 128, "BT": 64, "BV": 32},
    *(4, 2),
).unaligned("tokens")
wgrad = side(
    "grouped_wgrad",
    "*bf16 dy_ptr x_ptr dw_ptr; *i32 starts_ptr; i32 N K stride_dy stride_x",
    {"BLOCK_N": 256, "BLOCK_K": 256, "BLOCK_T": 64},
    *(8, 2, "gfx942"),
)
maxima = side(
    "max_of_rows",
    "tensordesc<bf16[32,128]> x_desc; *fp32 y_ptr; i32 columns",
    {"BLOCK_M": 32, "BLOCK_N": 128},
)

REGRESSIONS = (
    Pair(
        "layer-norm-upgrade",
        *(norm.by("3.6.0"), norm),
        "triton 11127, B200, 57-64 to 90 us: fp16 added to fp32 takes 72 registers, not 64: one block an SM",
        ("occupancy",),
    ),
    Pair(
        "product-upgrade",
        *(large.by("3.5.1"), large.by("3.6.0")),
        "triton 9757, H20, +35 % by 3.6, cause unknown (its kernel compiles alike here): wgmma is serialised",
        ("products",),
    ),
    Pair(
        "maxima-upgrade",
        *(maxima.by("3.5.1"), maxima.by("3.6.0")),
        "triton 9703, H100, B300: TMA spreads rows over warps, so a maximum takes 17 shuffles, not 1",
        ("exchanges",),
    ),
    Pair(
        "tf32x3-upgrade",
        *(tf32, tf32.by("3.8.0")),
        "triton 11526, H100: two more buffers in shared memory, so an SM holds one block",
        ("occupancy",),
    ),
    Pair(
        "grouped-wgrad-upgrade",
        *(wgrad, wgrad.by("3.8.0")),
        "Primus-Turbo 471, MI300X, 5.4x (the same as aiter 4137, sglang 34741): 65 spilled registers",
        ("spills",),
    ),
    Pair(
        "attention-backward-upgrade",
        *(attention_bwd.by("3.8.0"), attention_bwd.by("3.9.0")),
        "fb-triton 1129, H100, -18 %, of which only commits are public; here 3.9 spills twice as much",
        ("spills",),
    ),
    Pair(
        "decode-warps",
        *(decode, decode.launched(num_warps=4)),
        "triton 11373, A100, 2.0x with 4 warps, not with 8: a warp's part of the sums no longer fits",
        ("spills",),
    ),
    Pair(
        "scale-in-loop",
        *(ring, ring.edited(EDIT="scale")),
        "triton 8997 and 6206, fb-triton 1297, and ours: sums that are used in the loop make products wait",
        ("products",),
    ),
    Pair(
        "one-stage",
        *(ring, ring.launched(num_stages=1)),
        "ours: num_stages=1 left over from debugging",
        ("pipeline",),
    ),
    Pair("two-stages", ring, ring.launched(num_stages=2), "ours: a ring of 4 is one of 2", ("pipeline",)),
    Pair(
        "three-stages",
        *(states, states.launched(num_stages=3)),
        "flash-linear-attention 946, triton 7268: a stage more takes the room of the second block",
        ("occupancy",),
    ),
    Pair(
        "padded-rows",
        *(ring, ring.unaligned("stride_x")),
        "ours: rows of x at multiples of nothing are not copied 16 bytes at a time, hence not ahead",
        ("pipeline", "load width"),
    ),
    Pair(
        "padded-sums",
        *(sums, sums.unaligned("stride")),
        "pytorch 120667, triton 3317: loads of 2 bytes in place of 16",
        ("load width",),
    ),
    Pair(
        "fp8-converted",
        *(fp8, mixed.edited(EDIT="convert")),
        "triton 3828, H100, 6x, and 7188: fp8 is multiplied as 16 bits",
        ("products",),
    ),
    Pair(
        "exact-gelu",
        *(ring, ring.edited(EDIT="gelu")),
        "ours: an epilogue that holds too much at once",
        ("spills",),
    ),
    Pair("four-warps", ring, ring.launched(num_warps=4), "ours: a tile too large for its warps", ("spills",)),
    Pair(
        "nested-loops",
        *(persistent(), persistent().edited(FLATTEN=False)),
        "ours: copies of the next tile start after the epilogue",
        ("tiles",),
    ),
    Pair(
        "sums-upgrade",
        *(sums, sums.by("3.8.0")),
        "seen here: 3.8 gives four loads of a turn the same registers, so each is awaited before the next",
        ("loads in flight", "load waits"),
    ),
    Pair(
        "reordered-loads",
        *(norm_90, replace(norm_90, entry=replace(norm_90.entry, function="layer_norm_early"))),
        "ours: weight and bias loaded early are held in registers while a row is summed",
        ("occupancy",),
    ),
    Pair(
        "slower-epilogue",
        *(small, small.edited(EDIT="gelu")),
        "ours: an exact function in place of a fast one, after the loop",
        ("epilogue",),
    ),
    Pair(
        "added-through-registers",
        *(persistent("fp32").edited(EPILOGUE="reduce"), persistent("fp32", 2).edited(EPILOGUE="add")),
        "ours: sums are read, added to and stored; their buffer leaves room for two stages of three",
        ("pipeline",),
    ),
    Pair(
        "normalised-always",
        *(attention, attention.edited(NORMALISE="always")),
        "flash-attention 1 against 2: a division of all values at each step",
        ("loop",),
    ),
    Pair(
        "accurate-sums",
        *(sums, sums.edited(ACCURATE=True)),
        "ours: what rounding loses is carried along, in registers",
        ("occupancy", "loop"),
    ),
)

FP16 = ("*bf16", "*fp16")
few_heads = decode.edited(HEADS=16).launched(num_warps=4)
UNCHANGED = (
    Pair(
        "renamed",
        softmax,
        side("softmax_renamed", "*bf16 input_ptr output_ptr; i32 input_stride n_cols", {"BLOCK": 4096}),
        "names, comments",
    ),
    Pair(
        "functions", softmax, side("softmax_in_functions", SOFTMAX, {"BLOCK": 4096}), "a function is inlined"
    ),
    Pair(
        "reordered",
        norm_90,
        replace(norm_90, entry=replace(norm_90.entry, function="layer_norm_reordered")),
        "loads of two vectors change places",
    ),
    Pair("constant", norm_90, norm_90.edited(EPS=1e-6), "another constant"),
    Pair("hint", norm_90, norm_90.edited(HINT=""), "rows are read once"),
    Pair("wide", norm_90, norm_90.edited(WIDE=True), "a 64-bit multiplication a program"),
    Pair("group", ring, ring.edited(GROUP=4), "another order of tiles"),
    Pair("fp16-rows", softmax, side("softmax", SOFTMAX.replace(*FP16), {"BLOCK": 4096}), "as wide as bf16"),
    Pair("fp16-products", ring, linear(128, 256, 64, 8, 4, LINEAR.replace(*FP16)), "as fast as bf16"),
    Pair("stages-of-no-loop", softmax, softmax.launched(num_stages=4), "nothing to copy ahead"),
    Pair("unused", ring, ring.unaligned("scale_ptr"), "an argument that nothing reads"),
    Pair("softmax-3.7", softmax.by("3.6.0"), softmax, "the same instructions"),
    Pair("softmax-3.9", softmax, softmax.by("3.9.0"), "one exchange fewer"),
    Pair("product-3.8", large, large.by("3.8.0"), "the same loop"),
    Pair("persistent-3.9", persistent(), persistent().by("3.9.0"), "the same loop"),
    Pair("attention-3.8", attention, attention.by("3.8.0"), "the same loop"),
    Pair("small-product-3.7", small.by("3.6.0"), small, "the same loop"),
    Pair("grouped-wgrad-3.7", wgrad.by("3.6.0"), wgrad, "the same loop"),
    Pair("states-3.9", states.by("3.8.0"), states.by("3.9.0"), "the same loop"),
    Pair("decode-3.8", few_heads, few_heads.by("3.8.0"), "the same loop"),
)
PAIRS = (*REGRESSIONS, *UNCHANGED)
