"""Each launcher's call with its oracle, and what Triton derives from the launch.

A call makes its operands, and returns by name what the launcher computed and what the oracle says of the same
operands in float64. The numeric gate calls it on numbers. On the meta device the launch is recorded instead,
and registered: Triton compiles a kernel anew for other types of its run-time arguments, for integers that are
1, and for addresses and integers that are multiples of 16; without the latter it silently drops pipelining.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from math import prod
from typing import Any, Literal

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.dispatch import gates as gates  # these have records, too
from tpkernels.dispatch import norms as norms
from tpkernels.dispatch import vocabulary as vocabulary
from tpkernels.dispatch.primitives import RECORDS
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Primitive
from tpkernels.gate import register
from tpkernels.gate.ahead_of_time import ARCHITECTURES, Entry
from tpkernels.gate.numerics import Results
from tpkernels.gate.user_kernels.entries import Inspected, entry_of
from tpkernels.gate.user_kernels.table import own_kernel
from tpkernels.kernels import launch, launch_plans, reference
from tpkernels.kernels.activations import GATE_OF, Activation, Glu, act_grad_ref, act_ref
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.elementwise import act_grad as run_act_grad
from tpkernels.kernels.elementwise import activate as run_activate
from tpkernels.kernels.elementwise import glu_grad as run_glu_grad
from tpkernels.kernels.flags import advance as count_call
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.operands import Form
from tpkernels.kernels.reduce import add_slots, reduce_slots
from tpkernels.kernels.scaled import Scaled
from tpkernels.kernels.scatter_linear import scatter_linear as store_product
from tpkernels.kernels.segments import segment_sum
from tpkernels.kernels.target import Target
from tpkernels.kernels.tiles import BlockTile, MatmulTile, waiting_tile
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS
from tpkernels.kernels.waits import Arrivals, Departures
from tpkernels.registered.names import SHORT_NAMES

MATMULS = ("linear", "scatter_linear", "glu", "dgrad", "dglu", "wgrad", "scaled_linear")
ELEMENTWISE = ("activate", "act_grad", "glu_grad")
LOGITS = ("softmax_statistics", "cross_entropy_grad")
# integers that are multiples of nothing, and no part of a matrix's address
COUNTS = {
    *("first_tile", "first_chunk", "chunk_rows", "chunk_tiles", "spin_limit", "R", "rank", "splits"),
    *("columns", "first_id", "count", "code"),
    *("stride_xst", "stride_wsn", "stride_st"),  # of scales, one of which is loaded at a time
}


@dataclass(frozen=True, slots=True)
class Operands(Layer):
    """Makes the operands of a call, which are those of samples of records and others of their sizes."""

    chunks: int = 1  # that the tokens arrive in
    form: Form | None = None  # of a matmul, like the tile
    tile: MatmulTile | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tokens, self.in_features, self.out_features

    def word(self, value: int) -> Tensor:
        return self.integers(1, value, value + 1, torch.int32)

    def addresses(self, *tensors: Tensor) -> Tensor:
        """A table for kernels that write to other ranks."""
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)

    def arrivals(self, chunks: int) -> Arrivals:
        """All chunks are here."""
        return Arrivals(self.integers(chunks, 7, 8, torch.int32), self.word(7), self.word(0), spin_limit=1001)


def in_float64(value: Any) -> Any:
    """What an oracle is given: numbers, and what they are rounded to, in float64; ids as they are."""
    if isinstance(value, torch.dtype):
        return torch.float64
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


BARE: Mapping[str, Any] = {"bias": False, "training": False}  # of a layer: nothing is added or kept

# whose cases and entries are listed by name: there are calls for them here, or other tiles
LISTED = (
    *ELEMENTWISE,
    *("bias_grad", "lookup", "lookup_grad", "softmax_statistics", "cross_entropy_grad"),
    *("rms_norm", "rms_norm_grad", "layer_norm", "layer_norm_grad"),
    *("quantize", "dequantize", "scaled_linear"),
)


def other_primitives() -> list[str]:
    """Names of those that are neither products nor listed: a sample says all of them."""
    return [name for name in RECORDS if name not in (*PRODUCTS, *LISTED)]


def primitive(
    of: Operands, name: str, into: torch.dtype | None = None, wait: bool = False, **options: Any
) -> Results:
    """A primitive by its record: its sample, its kernel, and as oracle its torch form.

    into: the dtype of the result, if it is another
    wait: for rows that arrive in chunks, from the second on
    options: fields of `Layer`, or else arguments of the primitive, in place of its sample's
    """
    record = RECORDS[name]
    chunk_rows = of.tokens // of.chunks
    of = replace(of, tokens=chunk_rows * of.chunks) if wait else of
    call = arguments(of, record, options)
    how: dict[str, Any] = {"tile": of.tile, "form": of.form} if record.kernel else {}
    if wait:
        assert record.kernel
        how |= {"arrivals": of.arrivals(of.chunks), "first_row": chunk_rows % of.tokens}
        how["tile"] = of.tile and waiting_tile(record.kernel, of.tile, chunk_rows)
    if into and record.changes_first:
        first, old = next(iter(call.items()))
        call[first] = of.tensor(*old.shape, dtype=into)
    elif into and "dtype" in call:
        call["dtype"] = str(into).removeprefix("torch.")
    elif record.kernel == "wgrad" and not record.changes_first:
        how["dtype"] = into
    elif into:  # to be added to others before it is rounded
        cols = of.out_features if record.kernel == "linear" else of.in_features
        how["out"] = launch.empty((of.tokens, cols), into, next(iter(call.values())).device)
    operands = list(call.values())
    exact = list(map(in_float64, operands))
    ours = record.by_kernel(*operands, **how)
    truth = record.by_torch(*exact)
    if record.changes_first:
        ours, truth = operands[0], exact[0]
    if isinstance(ours, Tensor):
        ours, truth = (ours,), (truth,)
    names = getattr(ours, "_fields", [f"result {number}" for number in range(len(ours))])
    found = zip(names, ours, truth, strict=True)
    return {word: (computed, one) for word, computed, one in found if one is not None}


def arguments(of: Operands, record: Primitive[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of a primitive's arguments by name, with these options."""
    fields = {name: value for name, value in options.items() if name in Layer.__slots__}
    call = signature(record.by_torch).bind(*record.sample(replace(of, **fields))).arguments
    given = options.keys() - fields.keys()
    assert given <= call.keys(), f"{record.name} has no options {given - call.keys()}"
    return {name: options[name] if name in given else value for name, value in call.items()}


def segments(of: Operands, transposed: bool, pairs: int) -> Results:
    """A product of a rank whose depth is two segments."""
    T, K, N = of.sizes
    depth, cols = K // 16 * 16, N  # half of it lies in whole 16-byte units
    given = [
        (of.tensor(T, depth), of.tensor(*(cols, depth) if transposed else (depth, cols)))
        for _ in range(pairs)
    ]
    ours = segment_sum(given, transposed=transposed, segments=2)
    exact = [a.double() @ (w.double().t() if transposed else w.double()) for a, w in given]
    return {"sum": (ours, torch.stack(exact).sum(0))}


def scatter_linear(of: Operands, pairs: int = 1, depth_first: bool = False) -> Results:
    """The second of two ranks; each gets its rows in as many chunks as there are.

    depth_first: the product is a dgrad, whose weight lies as (depth, cols)
    """
    T, K, N = of.sizes
    rows, cols, depth = T // (2 * of.chunks) * of.chunks, *((K, N) if depth_first else (N, K))
    given = [(of.tensor(2 * rows, depth), of.weight()) for _ in range(pairs)]
    given = [(a, w.t() if depth_first else w) for a, w in given]
    slots = [launch.empty((rows, cols), of.dtype, given[0][0].device) for _ in range(2)]
    flags = [of.integers(of.chunks, 0, 7, torch.int32) for _ in range(2)]
    counters = of.integers(2 * of.chunks, 0, 1, torch.int32)
    store_product(
        tuple(given),
        departures=Departures(of.addresses(*slots), of.addresses(*flags), counters, of.word(7)),
        ranks=2,
        rank=1,
        splits=of.chunks,
        tile=of.tile and replace(of.tile, flatten=False),
        form=of.form,
    )
    exact = torch.stack([a.double() @ w.double().t() for a, w in given]).sum(0)
    return {
        "product": (torch.cat(slots), exact),
        "flags": _words(*flags, *[7] * (2 * of.chunks)),
        "counters": _words(counters, *[0] * (2 * of.chunks)),
    }


def advance(of: Operands) -> Results:
    word, awaited = of.word(32), of.word(7)
    count_call(word, awaited, 16, 3)
    return {"word": _words(word, 48), "awaited": _words(awaited, 51)}


def _words(*found: Tensor | int) -> tuple[Tensor, Tensor]:
    """Integers that were found, then those that are expected."""
    tensors = [one for one in found if isinstance(one, Tensor)]
    return torch.cat(tensors).float(), torch.tensor([one for one in found if isinstance(one, int)]).double()


def row_sums(of: Operands, launcher: Callable[[Tensor], Tensor] = bias_grad) -> Results:
    dy = of.tensor(of.tokens, of.in_features)
    return {"db": (launcher(dy), reference.bias_grad_ref(dy.double()))}


def slot_sums(
    of: Operands, wait: bool = True, slots: int = 3, tree: bool = False, tile: BlockTile | None = None
) -> Results:
    """So many slots, each in two parts; the flags before theirs are of others."""
    rows = of.tokens // 2 * 2
    given = of.tensor(slots * rows, of.in_features).unflatten(0, (slots, rows))
    bias = of.tensor(of.in_features)
    arrivals, chunks = (of.arrivals(5 + 2 * slots), range(5, 5 + 2 * slots)) if wait else (None, None)
    y = reduce_slots(given, bias, arrivals=arrivals, chunks=chunks, tree=tree, tile=tile)
    return {"y": (y, reference.reduce_slots_ref(given.double(), bias.double(), tree=tree))}


def added_slots(of: Operands, into: torch.dtype, accumulate: bool) -> Results:
    """The sums of three parts of a product."""
    rows, cols = of.tokens, of.in_features
    slots = of.tensor(3 * rows, cols, dtype=torch.float32).unflatten(0, (3, rows))
    y = of.tensor(rows, cols, dtype=into)
    before = y.double()
    add_slots(y, slots, accumulate=accumulate)
    return {"y": (y, reference.reduce_slots_ref(slots.double()) + (before if accumulate else 0))}


def activate(of: Operands, activation: Activation) -> Results:
    z = of.x()
    return {"h": (run_activate(z, activation=activation), act_ref(z.double(), activation))}


def gate(of: Operands, kind: Glu) -> Results:
    g, u, activation = of.x(), of.x(), GATE_OF[kind]
    exact = act_ref(g.double(), activation) * u.double()
    return {"h": (run_activate(g, u, activation=activation), exact)}


def act_grad(of: Operands, activation: Activation, bias_grad: bool = True) -> Results:
    dy, z = of.x(), of.x()
    dz, db = run_act_grad(dy, z, activation, bias_grad=bias_grad)
    exact = act_grad_ref(dy.double(), z.double(), activation)
    return {"dz": (dz, exact)} | ({} if db is None else {"db": (db, exact.sum(0))})


def glu_grad(of: Operands, kind: Glu) -> Results:
    dh, g, u = of.x(), of.x(), of.x()
    ours = run_glu_grad(dh, g, u, kind=kind)
    exact = reference.glu_grad_ref(dh.double(), g.double(), u.double(), kind)
    return dict(zip(ours._fields, zip(ours, exact, strict=True), strict=True))


def norm(of: Operands, kind: Literal["rms", "layer"]) -> Results:
    """Forward and backward."""
    x, dy = of.x() + 0.5, of.x()
    weight, bias = of.tensor(of.in_features), of.tensor(of.in_features)
    if kind == "rms":
        ours = rms_norm_fwd(x, weight)
        grads = rms_norm_bwd(dy, x, weight, ours.rstd)
    else:
        ours = layer_norm_fwd(x, weight, bias)
        assert ours.mean is not None
        grads = layer_norm_bwd(dy, x, weight, ours.mean, ours.rstd)
    dy, x, w = dy.double(), x.double(), weight.double()
    exact = {}
    if kind == "rms":
        exact["y"], exact["rstd"] = reference.rms_norm_ref(x, w)
        exact["dx"], exact["dweight"] = reference.rms_norm_bwd_ref(dy, x, w, exact["rstd"])
    else:
        exact["y"], exact["mean"], exact["rstd"] = reference.layer_norm_ref(x, w, bias.double())
        statistics = exact["mean"], exact["rstd"]
        exact["dx"], exact["dweight"], exact["dbias"] = reference.layer_norm_bwd_ref(dy, x, w, *statistics)
    found = {**ours._asdict(), **grads._asdict()}
    return {word: (found[word], one) for word, one in exact.items()}


def cross_entropy(of: Operands, scale: float | None = None) -> Results:
    """One of three ranks, with some padding and ignored rows. scale: of logits, for entropies"""
    T, _, N = of.sizes
    columns, first_id = N - 7, N - 3
    logits, dloss, target = of.tensor(T, N), of.tensor(T, dtype=torch.float32), of.integers(T, -20, 3 * N)
    logits[:, columns:] = float("nan")
    mean, dentropy = (None if scale is None else of.tensor(T, dtype=torch.float32) for _ in range(2))
    ours = softmax_statistics(logits, target, columns=columns, first_id=first_id, scale=scale)
    grad = cross_entropy_grad(
        *(logits, target, ours[0], ours[1].clone().add_(1), dloss),  # + 1 on the meta device imports dynamo
        columns=columns,
        first_id=first_id,
        on_target=0.9,
        off_target=0.001,
        scale=scale,
        mean=mean,
        dentropy=dentropy,
    )
    exact = reference.softmax_statistics_ref(logits.double(), target, columns, first_id, scale)
    exact[0].clamp_(min=torch.finfo(torch.float32).min)
    exact_grad = reference.cross_entropy_grad_ref(
        *(logits.double(), target, exact[0], exact[1] + 1, dloss.double()),
        *(columns, first_id, 0.9, 0.001, False),
        *(scale, in_float64(mean), in_float64(dentropy)),
    )
    names = ("maximum", "total", "picked", "summed" if scale is None else "weighted")
    statistics = {name: (ours[row], exact[row]) for row, name in enumerate(names)}
    return {**statistics, "dlogits": (grad, exact_grad)}


def quantize(of: Operands, by_columns: bool = False, gated: bool = False, **options: Any) -> Results:
    """The words of `quantize`, byte for byte; of activations scales and data, which differ where fp32 does.

    by_columns: of a matrix whose columns are contiguous, as those of a weight for dgrad
    """
    record = RECORDS["quantize"]
    x, u, *others = arguments(of, record, options).values()
    between = gated or others[0] != "none"
    if gated:
        u = of.tensor(*x.shape)
    if not between:
        x = of.tensor(*reversed(x.shape)).t() if by_columns else x
        x[0], x[1, -1], x[2, 0] = 0, float("inf"), float("nan")
        x[3] *= 1e-36
        x[4] *= 1e36
    ours, exact = record.by_kernel(x, u, *others), record.by_torch(*map(in_float64, (x, u, *others)))
    if not between:
        return {"words": (ours.view(torch.uint8).float(), exact.view(torch.uint8).double())}
    scaling = options.get("scaling", of.scaling)
    one, truth = (Scaled(words, of.in_features, "e4m3", scaling) for words in (ours, exact))
    # bf16 holds all numbers of e4m3
    return {"scale": (one.scale, truth.scale.double()), "data": (one.data.bfloat16(), truth.data.double())}


TYPE_NAMES = {**SHORT_NAMES, torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}


@dataclass(frozen=True, slots=True)
class MetaOperands(Operands):
    """Without memory; `ragged` addresses are multiples of nothing, others of 16."""

    ragged: bool = False

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.empty(shape, dtype or self.dtype, torch.device("meta"))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Takes the place of `launch.allocate`."""
        flat = torch.empty(prod(shape) + 1, dtype=dtype, device=device)
        return flat[self.ragged :][: prod(shape)].view(shape)


class _Found(Exception):
    """Ends a recording: what is computed after the launch, such as what is exact, is not asked for."""

    def __init__(self, launch: launch.Launch) -> None:
        super().__init__()
        self.launch = launch


class _Wanted(list[launch.Launch]):
    """Launches up to the one that is looked for, of a kernel of this name; "": the first."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def append(self, one: launch.Launch) -> None:
        if self.function in ("", one.kernel.__name__):
            raise _Found(one)


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """How an entry's launch is recorded."""

    name: str  # of the entry
    call: Callable[[MetaOperands], object]
    of: MetaOperands
    target: Target
    architectures: tuple[str, ...]
    function: str = ""  # of what `call` launches, the first that is this kernel; "": the first
    precision: Literal["ieee", "tf32"] = "ieee"

    def launch(self) -> launch.Launch:
        """What the kernel is launched with."""
        wanted = _Wanted(self.function)
        try:
            with _launching_with(self.of, self.precision), launch.recording(self.target, wanted):
                self.call(self.of)
        except _Found as found:
            return found.launch
        raise LookupError(f"{self.name}: {self.function} was not launched")

    def table(self) -> tuple[Any, dict[str, Any]]:
        """The kernel, and what `gate.register` takes of its launch."""
        first = self.launch()
        arguments, constants, aligned = dict[str, str](), first.named, []
        kernel, compiled_in = Inspected.of(first.kernel), launch.compiled_in(first.kernel)
        for argument in first.kernel.arg_names:
            value = constants.pop(argument, None)
            is_one = type(value) is int and value == 1 and argument not in kernel.plain
            if value is None or is_one or argument in compiled_in:
                constants[argument] = value
                continue
            arguments[argument] = _type_of(value)
            if _is_aligned(value) and argument not in kernel.untold:
                aligned.append(argument)
        launched: dict[str, Any] = {
            name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
        }
        # every pointer and every size: not `aligned`, which may be what has gone wrong
        matrices = [name for name, kind in arguments.items() if kind == "i32" or kind.startswith("*")]
        promised = [name for name in matrices if name not in COUNTS.union(kernel.untold)]
        return first.kernel, {
            "signature": arguments,
            "name": self.name,
            "constants": {name: _constant(value) for name, value in constants.items()},
            "aligned": aligned,
            **launched,
            "options": LAUNCH_OPTIONS,
            "architectures": self.architectures,
            "rules": tuple(rules_of(self, arguments, constants, promised)),
        }

    def register(self) -> None:
        kernel, table = self.table()
        register(kernel, **table)

    def entry(self) -> Entry:
        """What is compiled of it."""
        kernel, table = self.table()
        function = kernel.fn
        table |= {"kernel": f"{function.__module__}:{function.__name__}"}
        return entry_of(own_kernel(table.pop("name"), table), Inspected.of(kernel), None)


def kernel_of(name: str) -> str:
    """The first part of an entry's name but for an architecture."""
    return next(part for part in name.split("/") if part not in ARCHITECTURES)


def rules_of(
    spec: EntrySpec, arguments: Mapping[str, str], constants: Mapping[str, Any], promised: Sequence[str]
) -> Iterator[str]:
    """What compiled code of ours must keep, as `gate.rules` call it.

    promised: arguments that are multiples of 16, unless addresses and sizes are ragged
    """
    kernel, ragged = kernel_of(spec.name), spec.of.ragged
    first, *_ = arguments.values()
    yield from ("no_spills", "wide_offsets")
    if not ragged:
        yield f"aligned:{','.join(promised)}"
        if constants.get("WAIT") or constants.get("ASYNC_PROXY") is not None:
            yield "reads_after_flags"
    if kernel == "scatter_linear":
        yield "flags_after_rows"
    if resident := re.search(r"-x(\d+)", spec.name):  # of a tile
        yield f"blocks:{resident[1]}"
    if kernel in ELEMENTWISE and not ragged:
        yield from ("uses:LDG.128", "uses:STG.128")
    if kernel in LOGITS:
        yield "uses:LDG.128"  # whatever the number of columns: padding is loaded too
    if kernel not in MATMULS:
        return
    if "fp8" in first:
        yield f"fp8:{'promoted' if constants.get('PROMOTE') else 'fast'}"
    elif "fp32" in first and constants.get("PRECISION") != "tf32":
        yield "true_fp32"
    else:
        yield "tensor_cores"
    if "tensordesc" in first:
        yield from ("descriptors", f"uses:{_store_of(kernel, constants)}")
        yield from ("products_overlap",) if "fp8" in first else ("wgmma", "tensor_memory")
    elif not ragged:  # copies of 16 bytes: what pipelining consists of, and what a lost alignment takes away
        yield from ("uses:LDGSTS.128", "products_overlap")


def _store_of(kernel: str, constants: Mapping[str, Any]) -> str:
    """The instruction by which results leave a descriptor kernel."""
    if kernel == "scatter_linear":
        return "STG.128"  # into memory of other ranks, which no descriptor of ours describes
    return "UTMAREDG" if constants.get("REDUCE") else "UTMASTG"


def _constant(value: Any) -> Any:
    """As a table says it."""
    return f"tl.{value!r}".replace("triton.language.", "") if isinstance(value, tl.dtype) else value


def _type_of(value: Tensor | TensorDescriptor | int | float) -> str:
    """Triton's name of an argument's type; a test holds it to Triton's own answer."""
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPE_NAMES[value.base.dtype]}{value.block_shape}>"
    if isinstance(value, Tensor):
        return f"*{TYPE_NAMES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: Tensor | TensorDescriptor | int | float) -> bool:
    """Whether Triton is told of a multiple of 16; a descriptor is aligned by itself."""
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


@contextmanager
def _launching_with(of: MetaOperands, precision: str) -> Iterator[None]:
    """Outputs are made as operands are, and fp32 is multiplied in `precision`, whatever torch is set to."""
    matmul: Any = torch.backends.cuda.matmul
    before = launch.allocate, matmul.fp32_precision
    launch.allocate, matmul.fp32_precision = of.empty, precision
    launch_plans.forget()  # no key has how results lie
    try:
        yield
    finally:
        launch.allocate, matmul.fp32_precision = before
        launch_plans.forget()
