"""How many blocks an SM holds: arithmetic from NVIDIA's tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

WARP = 32  # threads
REGISTERS = 65_536  # of an SM
BLOCK_BYTES = 1024  # of shared memory that CUDA takes for each block
QUARTERS = 4  # of an SM: warps are spread over them, each with its own registers
WARP_REGISTERS = 256  # in which a warp is given registers
H100_SMS = 132
# architecture -> bytes of shared memory a block may have; past it compiling succeeds, and launching fails
SHARED_LIMIT: Mapping[str, int] = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}


@dataclass(frozen=True, slots=True)
class SmLimits:
    """The resources of one SM, which limit how many blocks it runs at once."""

    shared: int  # bytes
    threads: int
    blocks: int
    registers: int = REGISTERS


PROCESSORS: Mapping[str, SmLimits] = {
    "sm_80": SmLimits(164 * 1024, 2048, 32),
    "sm_89": SmLimits(100 * 1024, 1536, 24),
    "sm_90": SmLimits(228 * 1024, 2048, 32),
    "sm_100": SmLimits(228 * 1024, 2048, 32),
    "sm_120": SmLimits(100 * 1024, 1536, 24),
}


def blocks_by_limit(architecture: str, registers: int, threads: int, shared: int) -> Mapping[str, int]:
    """Limit -> how many blocks it leaves room for; nothing of a GPU whose tables are others'."""
    processor = PROCESSORS.get(architecture)
    if processor is None or not threads:
        return {}
    warps = -(-threads // WARP)
    of_a_warp = -(-registers * WARP // WARP_REGISTERS) * WARP_REGISTERS
    resident = QUARTERS * (processor.registers // QUARTERS // max(of_a_warp, WARP_REGISTERS))
    return {
        "registers": resident // warps,
        "bytes of shared memory": processor.shared // (shared + BLOCK_BYTES),
        "threads": processor.threads // (warps * WARP),
        "number of blocks": processor.blocks,
    }


def occupancy(architecture: str, blocks: int | None, threads: int) -> float | None:
    """The part of an SM's warps that these blocks are; None of a GPU whose tables are others'."""
    processor = PROCESSORS.get(architecture)
    return (
        None
        if processor is None or blocks is None
        else blocks * -(-threads // WARP) * WARP / processor.threads
    )


def too_few(promised: int, limits: Mapping[str, int]) -> Iterator[str]:
    """Each limit that leaves room for fewer blocks than a persistent launch starts on an SM."""
    for limit, blocks in limits.items():
        if blocks < promised:
            yield f"{promised} blocks an SM are launched, its {limit} hold {blocks}"
