"""Models of kernels: the flags, rows and processors that other streams and ranks can observe, in order.

A model takes the device, the number of programs, and a launch's arguments by name; it returns the programs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.streams.device import Awaited, Device, MachineError, Span, Step
from bench.streams.tensors import VirtualTensor, spans_of

Model = Callable[[Device, int, Mapping[str, Any]], Sequence[Sequence[Step]]]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


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


def _waits(arguments: Mapping[str, Any], chunks: range) -> tuple[tuple[Awaited, ...], tuple[Span, ...]]:
    """Return the flags of chunks, and the span of the word whose value they must have."""
    flags, word = elem_of(arguments["flags_ptr"]), elem_of(arguments["awaited_ptr"])
    first = flags.data_ptr()
    return tuple(Awaited(first + 4 * chunk, word.data_ptr()) for chunk in chunks), spans_of(word)


def linear(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    x, w, y, z = (elem_of(arguments[name]) for name in ("x", "w", "y", "z"))
    bias = elem_of(arguments["b_ptr"]) if arguments["HAS_BIAS"] else None
    act = _ACTIVATIONS[arguments["ACTIVATION"]]

    def written(rows: slice, cols: slice) -> None:
        value = x[rows] @ w[cols].t()
        if bias is not None:
            value = value + bias[cols]
        if arguments["KEEP_Z"]:
            z[rows, cols] = value
        y[rows, cols] = act(value)

    return _as_rows_arrive(programs, arguments, x, w, [y, z] if arguments["KEEP_Z"] else [y], written)


def dgrad(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    dy, w, dx = (elem_of(arguments[name]) for name in ("dy", "w", "dx"))

    def written(rows: slice, cols: slice) -> None:
        dx[rows, cols] = dy[rows] @ w[:, cols]

    return _as_rows_arrive(programs, arguments, dy, w.t(), [dx], written)


def _as_rows_arrive(
    programs: int,
    arguments: Mapping[str, Any],
    x: Tensor,
    w: Tensor,
    results: Sequence[Tensor],
    written: Callable[[slice, slice], None],
) -> list[list[Step]]:
    """Model the tiles of a product that waits for rows of x. written: what computes a tile of the results"""
    rows, cols = arguments["BLOCK_ROWS"], arguments["BLOCK_COLS"]
    T, N, chunk_rows = x.shape[0], w.shape[0], arguments["chunk_rows"]
    row_tiles, col_tiles = -(-T // rows), -(-N // cols)

    def tile(index: int) -> Step:
        t = (arguments["first_tile"] + index // col_tiles) % row_tiles * rows
        part, features = (
            slice(t, min(t + rows, T)),
            slice(index % col_tiles * cols, (index % col_tiles + 1) * cols),
        )
        chunks = range(part.start // chunk_rows, (part.stop - 1) // chunk_rows + 1)
        awaits, word = _waits(arguments, chunks)
        outs = tuple(span for result in results for span in spans_of(result[part, features]))
        reads = (*spans_of(x[part]), *spans_of(w[features]), *word)
        return Step(partial(written, part, features), reads, outs, awaits)

    return dealt([tile(index) for index in range(row_tiles * col_tiles)], programs)


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
    slots, y = elem_of(arguments["slots_ptr"]), elem_of(arguments["y_ptr"])
    bias = elem_of(arguments["b_ptr"]) if arguments["HAS_BIAS"] else None
    (ranks, T, _), splits = slots.shape, arguments["splits"]
    rows = arguments["BLOCK_ROWS"]

    def block(t: int) -> Step:
        part = slice(t, min(t + rows, T))
        awaits: tuple[Awaited, ...] = ()
        word: tuple[Span, ...] = ()
        if arguments["WAIT"]:
            part_rows = T // splits
            chunks = [
                arguments["first_chunk"] + slot * splits + piece
                for slot in range(ranks)
                for piece in range(part.start // part_rows, (part.stop - 1) // part_rows + 1)
            ]
            found = [_waits(arguments, range(chunk, chunk + 1)) for chunk in chunks]
            awaits, word = tuple(flag for flags, _ in found for flag in flags), found[0][1]

        def run() -> None:
            total = slots[0, part].clone() if slots.dtype == torch.int32 else slots[0, part].float()
            for slot in slots[1:]:
                total += slot[part]
            if bias is not None:
                total += bias
            y[part] = total.to(y.dtype)

        reads = (*(span for slot in slots for span in spans_of(slot[part])), *word)
        return Step(run, reads, spans_of(y[part]), awaits)

    return dealt([block(t) for t in range(0, T, rows)], programs)


def advance(device: Device, programs: int, arguments: Mapping[str, Any]) -> list[list[Step]]:
    word, awaited = elem_of(arguments["word_ptr"]), elem_of(arguments["awaited_ptr"])
    step, code = arguments["step"], arguments["code"]

    def run() -> None:
        word.add_(step)
        awaited.copy_(word | code)

    return [[Step(run, (), (*spans_of(word), *spans_of(awaited)))]]


OURS: dict[str, Model] = {
    "_linear_fwd_kernel": linear,
    "_dgrad_kernel": dgrad,
    "_scatter_linear_kernel": scatter_linear,
    "_reduce_slots_kernel": reduce_slots,
    "_advance_kernel": advance,
}


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
    device.enqueue(name.strip("_"), models[name](device, programs, arguments))
