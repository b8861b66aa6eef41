"""Kernels that wait for chunks which other ranks write: flags, bounded spins, and a status word for timeouts.

Any product waits if it is given `Arrivals`: it starts at the rows that were here first and goes round the
ring, as chunks arrive, and each tile waits for every chunk that it has rows of. Values, bits too, are those
of the product that waits for nothing, with the same tile and form.

The writer of a chunk sets its flag to the number of the call afterwards. A kernel reads the chunk once the
flag holds the number that it awaits. Flags are never reset, and the awaited number lies on the device, so
that a captured graph which counts it up can be replayed. A spin that runs out writes kernel and chunk into
the status word and goes on: the result is not valid, and whoever launched the kernel raises. Later waits
end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tpkernels.kernels.interpret import mend
from tpkernels.kernels.target import Target

mend()

OPS = ("product", "reduce_slots")  # numbered from 1: a status of 0 says that all is well
CHUNK_BITS = 24  # of the status word; the rest is the number of the op
SECONDS_A_LOOK = 1e-6  # at a flag of the own memory, about; not measured yet
INTERPRETED_SECONDS_A_LOOK = 0.2e-3
SECONDS = 30.0  # a wait by default


class Arrivals(NamedTuple):
    """Tells a kernel which chunks have arrived; all on the device of the data."""

    flags: Tensor  # (chunks,) int32: the call that each chunk was last written in
    awaited: Tensor  # (1,) int32: the call that is waited for
    status: Tensor  # (1,) int32: 0, or where a spin ran out
    seconds: float = SECONDS  # until a kernel gives up, about
    spin_limit: int | None = None  # after so many looks at a flag instead

    def limit(self, target: Target) -> int:
        return spins_in(self.seconds, target) if self.spin_limit is None else self.spin_limit


class Wait(NamedTuple):
    """What a product of rows that arrive is told of them, and of those who write them."""

    arrivals: Arrivals | None  # None: all rows are here
    first_row: int  # where the rows begin that are here from the start
    margin: int  # processors that are left to those who write the rows

    def chunk_rows(self, launcher: str, rows: int, device: torch.device) -> int:
        """How many rows have a flag, or an error; 0 for rows that are here."""
        if self.arrivals is None:
            if any(self[1:]):
                raise ValueError(
                    f"{launcher}: expected arrivals with first_row and margin, got {self[1:]} "
                    "without: all rows are here then"
                )
            return 0
        require_arrivals(launcher, self.arrivals, device)
        chunks = self.arrivals.flags.numel()
        if rows % chunks:
            raise ValueError(
                f"{launcher}: expected equal chunks of tokens, got {rows} tokens and {chunks} flags"
            )
        if not 0 <= self.first_row < max(1, rows):
            raise ValueError(f"{launcher}: expected a first_row of 0 to {rows - 1}, got {self.first_row}")
        return rows // chunks


HERE = Wait(None, 0, 0)


class Departures(NamedTuple):
    """Tells a kernel where its rows go, and how to say that they are there; all on the device of the data."""

    slots: Tensor  # (ranks,) int64: for each owner the address of (tokens of a shard, features), contiguous
    flags: Tensor  # (ranks,) int64: for each owner the address of a flag for each of its chunks, int32
    counters: Tensor  # (ranks * splits,) int32: zeros, which a kernel leaves as it found them
    awaited: Tensor  # (1,) int32: the call that the flags then tell of


def spins_in(seconds: float, target: Target) -> int:
    """About as many looks at a flag as take so long, within what a kernel can count."""
    a_look = INTERPRETED_SECONDS_A_LOOK if target.backend == "interpreter" else SECONDS_A_LOOK
    return min(round(seconds / a_look), 2**31 - 1)


@triton.jit
def wait_for(
    chunk,
    flags_ptr,  # (chunks,) int32
    awaited_ptr,  # (1,) int32
    status_ptr,  # (1,) int32
    spin_limit,
    OP: tl.constexpr,  # number of the op in OPS, from 1
    ASYNC_PROXY: tl.constexpr,  # whether the chunk is read by TMA
):
    """Return once the chunk may be read, or the spin has run out here or elsewhere."""
    awaited = tl.load(awaited_ptr)
    # an atomic that adds nothing: a load by one thread for all, which the interpreter knows too. All threads
    # must see the same, or they would part ways before a barrier
    seen = tl.atomic_add(flags_ptr + chunk, 0, sem="acquire", scope="sys")
    if seen != awaited:
        given_up = tl.atomic_add(status_ptr, 0, sem="relaxed", scope="gpu")
        spins = 0
        while (seen != awaited) & (given_up == 0) & (spins < spin_limit):
            seen = tl.atomic_add(flags_ptr + chunk, 0, sem="acquire", scope="sys")
            spins += 1
    if seen != awaited:
        tl.atomic_cas(status_ptr, 0, OP * (1 << 24) + chunk, sem="relaxed", scope="gpu")  # the first stays
    tl.debug_barrier()  # one thread has looked, all of them read
    if ASYNC_PROXY:
        # TMA reads past the caches that the flag has ordered: without a fence it may overtake it
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def arrived(
    row_tile,
    row_tiles,
    T,
    flags_ptr,  # (T / chunk_rows,) int32, or None: all rows are here
    awaited_ptr,  # (1,) int32
    status_ptr,  # (1,) int32
    first_tile,  # the first tile of rows that are here from the start
    chunk_rows,
    spin_limit,
    BLOCK_ROWS: tl.constexpr,
    FLATTEN: tl.constexpr,
    ASYNC_PROXY: tl.constexpr,
):
    """The tile of rows that is computed in this place, once its rows may be read."""
    if flags_ptr is None:
        return row_tile
    else:
        # one loop over tiles and depth would start a tile's loads before its wait: the compiler sees no tie
        tl.static_assert(not FLATTEN, "a flattened loop loads rows before they are there")
        tile = (first_tile + row_tile) % row_tiles
        first_chunk = tile * BLOCK_ROWS // chunk_rows
        last_chunk = (tl.minimum(tile * BLOCK_ROWS + BLOCK_ROWS, T) - 1) // chunk_rows
        # the maximum shows the compiler, and the gate, that no tile goes without a wait
        for later in tl.range(0, tl.maximum(last_chunk - first_chunk + 1, 1), num_stages=1):
            wait_for(
                first_chunk + later,
                flags_ptr,
                awaited_ptr,
                status_ptr,
                spin_limit,
                OP=1,
                ASYNC_PROXY=ASYNC_PROXY,
            )
        return tile


def kernel_and_chunk(word: int) -> tuple[str, int]:
    """Which kernel gave up waiting, and for which chunk, from a status other than 0."""
    return OPS[(word >> CHUNK_BITS) - 1], word & ((1 << CHUNK_BITS) - 1)


def require_arrivals(launcher: str, arrivals: Arrivals, device: torch.device) -> None:
    """Flags, the awaited word and status are contiguous int32 on the device of the data."""
    flags = arrivals.flags.numel()
    require_words(launcher, "flags", arrivals.flags, flags, torch.int32, device)
    require_words(launcher, "awaited", arrivals.awaited, 1, torch.int32, device)
    require_words(launcher, "status", arrivals.status, 1, torch.int32, device)
    if not 0 < flags < 1 << CHUNK_BITS:
        raise ValueError(f"{launcher}: expected 1 to {(1 << CHUNK_BITS) - 1} flags, got {flags}")
    if arrivals.spin_limit is not None and not 0 <= arrivals.spin_limit < 2**31:
        raise ValueError(f"{launcher}: expected a spin_limit of 0 to 2**31 - 1, got {arrivals.spin_limit}")


def require_departures(
    launcher: str, departures: Departures, ranks: int, rank: int, splits: int, device: torch.device
) -> None:
    """An address of slots and of flags for each rank, a counter for each chunk, on the device of the data."""
    if not 0 <= rank < ranks or splits < 1:
        raise ValueError(
            f"{launcher}: expected a rank below the ranks, and one chunk or more, got rank {rank} of {ranks} "
            f"ranks and {splits} chunks"
        )
    require_words(launcher, "slots", departures.slots, ranks, torch.int64, device)
    require_words(launcher, "flags", departures.flags, ranks, torch.int64, device)
    require_words(launcher, "counters", departures.counters, ranks * splits, torch.int32, device)
    require_words(launcher, "awaited", departures.awaited, 1, torch.int32, device)


def require_words(
    launcher: str, name: str, tensor: Tensor, count: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A contiguous vector of so many integers, on the device of the data."""
    if tensor.dtype != dtype or tuple(tensor.shape) != (count,) or not tensor.is_contiguous():
        raise ValueError(
            f"{launcher}: expected {name} of ({count},), contiguous, in {dtype}, got {tuple(tensor.shape)} "
            f"in {tensor.dtype}"
        )
    if tensor.device != device:
        raise ValueError(f"{launcher}: expected {name} on {device} like the data, got {tensor.device}")
