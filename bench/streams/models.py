"""Models of kernels: the flags, rows and processors that other streams and ranks can observe, in order.

A model takes the device, the number of programs, and a launch's arguments by name; it returns the programs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.streams.device import Awaited, Device, MachineError, Span, Step
from bench.streams.tensors import VirtualTensor, spans_of
from tpkernels.kernels.activations import act_grad_ref, act_ref
from tpkernels.kernels.scaled import dequantize_ref
from tpkernels.kernels.waits import CHUNK_BITS, OPS

Product = tuple[Sequence[Tensor], Callable[[], Tensor]]  # what a tile reads, and how it multiplies it
Model = Callable[[Device, int, Mapping[str, Any]], Sequence[Sequence[Step]]]


def elem_of(operand: Any) -> Tensor:
    """Return the memory of a tensor, or of a descriptor of a tensor."""
    tensor = getattr(operand, "base", operand)
    assert isinstance(tensor, VirtualTensor), "operands are on the device"
    return tensor.elem


def dealt(steps: Sequence[Step], programs: int) -> list[list[Step]]:
    """Assign step i to program i modulo `programs`, as in persistent kernels."""
    return [list(steps[first::programs]) for first in range(min(programs, len(steps)))]


def words_at(addresses: Sequence[int]) -> list[Any]:
    return [ctypes.c_int32.from_address(address) for address in addresses]


Waits = tuple[tuple[Awaited, ...], tuple[Span, ...], Callable[[int], None] | None]


def _waits(arguments: Mapping[str, Any], chunks: Sequence[int], kernel: str = "product") -> Waits:
    """Return flags of chunks, the span of the word that they must equal, and what giving up does."""
    if arguments.get("flags_ptr") is None:  # a product of rows that are there
        return (), (), None
    flags, word = elem_of(arguments["flags_ptr"]), elem_of(arguments["awaited_ptr"])
    first, status = flags.data_ptr(), elem_of(arguments["status_ptr"])

    def gives_up(number: int) -> None:
        if not int(status):  # the first stays
            status.fill_((OPS.index(kernel) + 1 << CHUNK_BITS) + chunks[number])

    return tuple(Awaited(first + 4 * chunk, word.data_ptr()) for chunk in chunks), spans_of(word), gives_up


def linear(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    x, w = _elems(arguments, "x", "w")

    def product(rows: slice, cols: slice) -> Product:
        return [x[rows], w[cols]], lambda: x[rows] @ w[cols].t()

    return _linear(programs, arguments, product)


def scaled_linear(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    x, w, x_scale, w_scale = _elems(arguments, "x", "w", "x_scale_ptr", "w_scale_ptr")
    shared = arguments["SHARED"]  # rows of w that share a scale

    def product(rows: slice, cols: slice) -> Product:
        scales = w_scale[cols.start // shared : (cols.stop - 1) // shared + 1]

        def compute() -> Tensor:
            of_rows = w_scale.repeat_interleave(shared, 0)[cols]
            weight = dequantize_ref(w[cols], of_rows, torch.float32)
            return dequantize_ref(x[rows], x_scale[rows], torch.float32) @ weight.t()

        return [x[rows], x_scale[rows], w[cols], scales], compute

    return _linear(programs, arguments, product)


def _linear(
    programs: int, arguments: Mapping[str, Any], product: Callable[[slice, slice], Product]
) -> list[list[Step]]:
    """Model act(product + bias) and, if it is kept, its argument."""
    y, z = _elems(arguments, "y", "z")
    keeps, bias = arguments["KEEP_Z"], elem_of(arguments["b_ptr"]) if arguments["HAS_BIAS"] else None

    def tile(rows: slice, cols: slice) -> Tile:
        reads, compute = product(rows, cols)

        def run() -> None:
            value = compute() if bias is None else compute() + bias[cols]
            if keeps:
                z[rows, cols] = value
            y[rows, cols] = act_ref(value, arguments["ACTIVATION"])

        reads = reads if bias is None else [*reads, bias[cols]]
        return Tile(run, reads, [each[rows, cols] for each in ([y, z] if keeps else [y])])

    return _as_rows_arrive(programs, arguments, y, tile)


def glu(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    x, w_gate, w_up, g, u, h = _elems(arguments, "x", "w_gate", "w_up", "g", "u", "h")
    keeps = arguments["KEEP"]

    def tile(rows: slice, cols: slice) -> Tile:
        def run() -> None:
            gate, up = x[rows] @ w_gate[cols].t(), x[rows] @ w_up[cols].t()
            if keeps:
                g[rows, cols], u[rows, cols] = gate, up
            h[rows, cols] = act_ref(gate, arguments["GATE"]) * up

        results = [h, g, u] if keeps else [h]
        return Tile(run, [x[rows], w_gate[cols], w_up[cols]], [each[rows, cols] for each in results])

    return _as_rows_arrive(programs, arguments, h, tile)


def dgrad(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    """Model a product of one pair: none of two waits for rows."""
    dy, w, z, dx, partials = _elems(arguments, "dy", "w", "z", "dx", "partials_ptr")
    activation, sums = arguments["ACTIVATION"], arguments["BIAS_GRAD"]

    def tile(rows: slice, cols: slice) -> Tile:
        of_sums = partials[rows.start // arguments["BLOCK_ROWS"], cols]

        def run() -> None:
            value = dy[rows] @ w[:, cols]
            if activation != "none":
                value = act_grad_ref(value, z[rows, cols], activation)
            if sums:
                of_sums.copy_(value.sum(0))
            dx[rows, cols] = value

        reads = [dy[rows], w[:, cols], *([z[rows, cols]] if activation != "none" else [])]
        return Tile(run, reads, [dx[rows, cols], *([of_sums] if sums else [])])

    return _as_rows_arrive(programs, arguments, dx, tile)


def dglu(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    dy, w, g, u, dg, du, h = _elems(arguments, "dy", "w", "g", "u", "dg", "du", "h")

    def tile(rows: slice, cols: slice) -> Tile:
        def run() -> None:
            dh, gate, up = dy[rows] @ w[:, cols], g[rows, cols], u[rows, cols]
            f = act_ref(gate, arguments["GATE"])
            dg[rows, cols], du[rows, cols] = act_grad_ref(dh * up, gate, arguments["GATE"]), dh * f
            if arguments["EMIT_H"]:
                h[rows, cols] = f * up

        results = [dg, du, h] if arguments["EMIT_H"] else [dg, du]
        reads = [dy[rows], w[:, cols], g[rows, cols], u[rows, cols]]
        return Tile(run, reads, [each[rows, cols] for each in results])

    return _as_rows_arrive(programs, arguments, dg, tile)


class Tile(NamedTuple):
    """A tile of a product."""

    run: Callable[[], None]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]


def _as_rows_arrive(
    programs: int, arguments: Mapping[str, Any], result: Tensor, tile: Callable[[slice, slice], Tile]
) -> list[list[Step]]:
    """Model the tiles of a product, each of which waits for its rows.

    tile: of rows and columns of the result
    """
    block_rows, block_cols = arguments["BLOCK_ROWS"], arguments["BLOCK_COLS"]
    (T, N), chunk_rows = result.shape, arguments.get("chunk_rows")
    row_tiles, col_tiles = -(-T // block_rows), -(-N // block_cols)

    def step(index: int) -> Step:
        t = (arguments.get("first_tile", 0) + index // col_tiles) % row_tiles * block_rows
        n = index % col_tiles * block_cols
        rows, cols = slice(t, min(t + block_rows, T)), slice(n, min(n + block_cols, N))
        run, reads, writes = tile(rows, cols)
        chunks = range(t // chunk_rows, (rows.stop - 1) // chunk_rows + 1) if chunk_rows else ()
        awaits, word, gives_up = _waits(arguments, chunks)
        return Step(run, (*_spans(reads), *word), _spans(writes), awaits, gives_up=gives_up)

    return dealt([step(index) for index in range(row_tiles * col_tiles)], programs)


def _elems(arguments: Mapping[str, Any], *names: str) -> list[Tensor]:
    return [elem_of(arguments[name]) for name in names]


def _spans(tensors: Sequence[Tensor]) -> tuple[Span, ...]:
    return tuple(span for tensor in tensors for span in spans_of(tensor))


def scatter_linear(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    """Model a chunk as one step; the order of programs within a chunk is not modelled."""
    pairs = [(elem_of(arguments["a"]), elem_of(arguments["w"]))]
    if arguments["TWO_PAIRS"]:
        pairs.append((elem_of(arguments["a2"]), elem_of(arguments["w2"])))
    if not arguments["DEPTH_FIRST"]:
        pairs = [(a, w.t()) for a, w in pairs]
    ranks, rank, splits = (arguments[name] for name in ("R", "rank", "splits"))
    chunk_rows, N = arguments["chunk_rows"], arguments["N"]
    slots, flags = elem_of(arguments["slots_ptr"]).tolist(), elem_of(arguments["flags_ptr"]).tolist()
    awaited = elem_of(arguments["awaited_ptr"])

    def chunk(index: int) -> Step:
        owner, part = (rank + ranks - 1 - index // splits) % ranks, index % splits
        first = (owner * splits + part) * chunk_rows
        there = device.program.tensor_at(
            slots[owner] + part * chunk_rows * N * pairs[0][0].element_size(),
            (chunk_rows, N),
            pairs[0][0].dtype,
        )
        flag = flags[owner] + 4 * part
        reads = [awaited, *(w for _, w in pairs), *(a[first : first + chunk_rows] for a, _ in pairs)]

        def run() -> None:
            terms = [a[first : first + chunk_rows] @ w for a, w in pairs]
            there.copy_(terms[0] if len(terms) == 1 else terms[0] + terms[1])
            words_at([flag])[0].value = int(awaited)

        return Step(
            run,
            tuple(span for read in reads for span in spans_of(read)),
            spans_of(there),
            raises=lambda: [flag],
        )

    return dealt([chunk(index) for index in range(ranks * splits)], programs)


def reduce_slots(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    if arguments.get("residual_ptr") is not None:
        raise MachineError("kernel _reduce_slots_kernel has no model of a residual and a norm")
    slots, y = elem_of(arguments["slots_ptr"]), elem_of(arguments["y_ptr"])
    bias = elem_of(arguments["b_ptr"]) if arguments["HAS_BIAS"] else None
    (ranks, T, _), splits = slots.shape, arguments["splits"]
    rows = arguments["BLOCK_ROWS"]

    def block(t: int) -> Step:
        part = slice(t, min(t + rows, T))
        waits: Waits = (), (), None
        if arguments["WAIT"]:
            part_rows = T // splits
            chunks = [
                arguments["first_chunk"] + slot * splits + piece
                for slot in range(ranks)
                for piece in range(part.start // part_rows, (part.stop - 1) // part_rows + 1)
            ]
            waits = _waits(arguments, chunks, "reduce_slots")
        awaits, word, gives_up = waits

        def run() -> None:
            total = slots[0, part].clone() if slots.dtype == torch.int32 else slots[0, part].float()
            for slot in slots[1:]:
                total += slot[part]
            if bias is not None:
                total += bias
            y[part] = total.to(y.dtype)

        reads = (*(span for slot in slots for span in spans_of(slot[part])), *word)
        return Step(run, reads, spans_of(y[part]), awaits, gives_up=gives_up)

    return dealt([block(t) for t in range(0, T, rows)], programs)


def sum_rows(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    """Model a chunk as one step; the programs of its columns are not modelled."""
    source, sums, size = elem_of(arguments["source_ptr"]), elem_of(arguments["sums_ptr"]), arguments["CHUNK"]
    rows, chunks = arguments["rows"], -(-arguments["rows"] // size)

    def chunk(index: int) -> Step:
        part, total = source[index * size : min((index + 1) * size, rows)], sums.view(chunks, -1)[index]

        def run() -> None:
            total.copy_(part.float().sum(0))

        return Step(run, spans_of(part), spans_of(total))

    return dealt([chunk(index) for index in range(chunks)], programs)


def advance(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    word, awaited = elem_of(arguments["word_ptr"]), elem_of(arguments["awaited_ptr"])
    step, code = arguments["step"], arguments["code"]

    def run() -> None:
        word.add_(step)
        awaited.copy_(word | code)

    return [[Step(run, (), (*spans_of(word), *spans_of(awaited)))]]


OURS: dict[str, Model] = {
    "_linear_fwd_kernel": linear,
    "_scaled_linear_kernel": scaled_linear,
    "_glu_fwd_kernel": glu,
    "_dgrad_kernel": dgrad,
    "_dglu_kernel": dglu,
    "_sum_rows_kernel": sum_rows,
    "_scatter_linear_kernel": scatter_linear,
    "_reduce_slots_kernel": reduce_slots,
    "_advance_kernel": advance,
}


_PRODUCTS = (
    "_linear_fwd_kernel",
    "_scaled_linear_kernel",
    "_glu_fwd_kernel",
    "_dgrad_kernel",
    "_dglu_kernel",
)


def launched(
    device: Device, models: Mapping[str, Model], kernel: Any, grid: Any, *given: Any, **named: Any
) -> None:
    """Record a launch of a Triton kernel by its model."""
    name = kernel.__name__
    if name not in models:
        raise MachineError(f"kernel {name} has no model: pass Machine(models={{'{name}': ...}})")
    device.load(name)
    arguments = dict(zip(kernel.arg_names, given, strict=False)) | named
    programs = 1
    for extent in grid(arguments) if callable(grid) else grid:
        programs *= extent
    # a persistent kernel has a program for each processor that it takes
    leaves = device.program.processors - programs if name in _PRODUCTS else None
    device.enqueue(
        name.strip("_"),
        models[name](device, programs, arguments),
        leaves=None if leaves is None or leaves < 0 else leaves,
    )
