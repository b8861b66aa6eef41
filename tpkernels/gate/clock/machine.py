"""One Hopper SM in numbers: what it moves and computes a cycle, and the pipe that each opcode takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Machine:
    """Cycles of the SM's clock, bytes a cycle. "Fitted": to the published timings that docs/clock.md has."""

    fetch: float = 40.0  # from L2, when all SMs ask: fitted; A100's published 5120 / 132 would be 38.8
    store: float = 96.0  # to L2: fitted, weakly determined
    shared: float = 128.0  # through shared memory: data sheet
    copy_latency: float = 550.0  # of the copy engine, hits and misses of L2 mixed: fitted
    load_latency: float = 550.0  # of LDG and LDGSTS, mixed alike: fitted
    atomic_latency: float = 700.0  # assumed: a load that the L2 must also compute
    store_latency: float = 300.0  # until the copy engine has read what it stores: fitted, weakly determined
    barrier: float = 22.0  # from the last arrival at a BAR.SYNC to those who wait: micro-benchmarks
    poll: float = 20.0  # from the end of an mbarrier's phase to those who wait: assumed
    drain: float = 60.0  # from a product's end to a warp that waits for it: assumed
    fill: float = 8.0  # from a product's issue to its start: assumed
    products_queued: int = 4  # that a warp may have waiting: fitted, fewer fit worse
    shared_queued: float = 64.0  # cycles of accesses waiting for shared memory before a warp stalls: assumed
    memory_queued: float = 2000.0  # cycles of accesses waiting for L2 before a warp stalls: assumed
    hmma: float = 6.5  # of a 16x8x16 product of the older kind: 62 % of the peak, published
    first_block: float = 40.0  # between the starts of blocks that become resident together: assumed
    next_block: float = 300.0  # from the end of a block to the start of its successor: assumed


class Timing(NamedTuple):
    pipe: str  # "": takes only an issue slot
    busy: float  # cycles that the pipe of a scheduler takes no other instruction
    latency: float  # from issue to the release of the instruction's scoreboard


class UnknownTiming(ValueError):
    """An opcode whose pipe and latency are not known."""


def timing(opcode: str) -> Timing:
    if opcode not in _TIMINGS:
        raise UnknownTiming(
            f"{opcode}: its pipe and latency are not known; add them to gate/clock/machine.py"
        )
    return _TIMINGS[opcode]


# Lanes a scheduler has in each pipe (white papers: 32 FP32, 16 integer, 4 special), and what shares one.
_PIPES = {
    ("fma", 1.0): (
        "FFMA FFMA32I FMUL FMUL32I FADD FADD32I FSWZADD HFMA2 HFMA2_32I HADD2 HADD2_32I HMUL2 HMUL2_32I"
    ),
    ("alu", 2.0): (
        "IADD IADD3 IADD32I LOP LOP3 LOP32I ISETP SEL PRMT SHF SHL SHR FMNMX FSETP FSET FSEL LEA IABS MOV "
        "MOV32I PLOP3 PSETP VIADD IMNMX VIMNMX VIMNMX3 VIADDMNMX VHMNMX F2FP F2IP I2IP I2FP I2I BMSK SGXT "
        "ICMP FCHK CS2R P2R R2P HMNMX2 HSET2 HSETP2 VABSDIFF VABSDIFF4 ISCADD ISCADD32I"
    ),
    ("imad", 2.0): "IMAD IMUL IMUL32I IDP IDP4A",
    ("xu", 8.0): "MUFU I2F F2I F2F FLO POPC FRND BREV",
    ("mio", 2.0): (
        "LDS LDSM STS STSM SHFL R2UR S2R VOTE LDG STG LDGSTS LDL STL LD ST RED REDG ATOM ATOMG ATOMS MOVM "
        "MATCH REDUX"
    ),
    ("uniform", 2.0): (
        "UMOV UIADD3 UIMAD ULEA ULOP ULOP3 ULOP32I USHF USHL USHR USEL UISETP UPLOP3 UPSETP UP2UR UR2UP "
        "USGXT ULDC VOTEU UBMSK UBREV UFLO UPOPC UPRMT ULEPC USETMAXREG UCGABAR_ARV UCGABAR_WAIT"
    ),
    ("fp64", 16.0): "DADD DFMA DMUL DSETP",
    ("", 0.0): (
        "BRA BRX BRXU JMP JMX CALL RET EXIT KILL BSSY BSYNC BREAK BMOV WARPSYNC NANOSLEEP YIELD NOP ELECT "
        "LEPC RPCMOV PREEXIT ACQBULK ENDCOLLECTIVE S2UR LDC B2R SYNCS BAR DEPBAR LDGDEPBAR MEMBAR FENCE "
        "ERRBAR CGAERRBAR CCTL CCTLL CCTLT QSPC PMTRIG WARPGROUP WARPGROUPSET HGMMA QGMMA IGMMA HMMA IMMA "
        "UTMALDG UTMASTG UTMAREDG UTMACMDFLUSH UTMAPF UTMACCTL UBLKCP UBLKPF UBLKRED"
    ),
}
# From published micro-benchmarks of Volta to Hopper, rounded; 12 where nobody waits long.
_LATENCIES = {
    12.0: "VOTE R2UR STG VOTEU",
    18.0: "STS STSM",
    20.0: "SYNCS STL LEPC RED REDG ERRBAR",
    22.0: "MUFU I2F F2I F2F FLO POPC FRND BREV",
    24.0: "SHFL MATCH REDUX MOVM",
    25.0: "S2R",
    29.0: "LDS",
    30.0: "S2UR MEMBAR FENCE CGAERRBAR",
    33.0: "LDSM HMMA IMMA",
    40.0: "LDC",
    48.0: "DADD DFMA DMUL DSETP",
    60.0: "LDL ATOMS",
}


def _table() -> dict[str, Timing]:
    latency = {opcode: cycles for cycles, opcodes in _LATENCIES.items() for opcode in opcodes.split()}
    return {
        opcode: Timing(pipe, busy, latency.get(opcode, 12.0))
        for (pipe, busy), opcodes in _PIPES.items()
        for opcode in opcodes.split()
    }


_TIMINGS = _table()
