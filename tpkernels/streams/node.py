"""Times of kernels, links and hosts of one machine's GPUs; each figure has its source.

A processor (SM) computes the tiles of a product one after the other. A tile takes `edge` cycles, plus `step`
cycles for each step of depth; a launch takes `start` cycles more. Any other kernel takes the time of its
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tpkernels.gpus import NCCL_BLOCKS, RatedGpu
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import Target
from tpkernels.kernels.tiles import default_tile

_FLOPS_A_CYCLE = 4096  # tensor cores of one processor of an H100, dense bf16: data sheet
_H100_RATE = 989e12 / 132  # of one processor; other GPUs are scaled by their data sheets


@dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles of a product on one processor."""

    step: float  # a step of depth
    edge: float  # a tile beyond its steps
    start: float  # a launch beyond its tiles


def usual_cycles(tile: MatmulTile, asking: float) -> Cycles:
    """Return cycles of our kernels, within some percent of the count of their machine code.

    The tensor cores are busy at most 95 % of a step, or wait for operands: the L2 gives 40 bytes a cycle if
    all processors ask, 64 if few do. An edge is the time of `linear` to fill its stages and to store.

    asking: the fraction of processors with a tile
    """
    rows, cols, depth = tile.block_rows, tile.block_cols, tile.block_depth
    ideal = 2 * rows * cols * depth / _FLOPS_A_CYCLE
    operands = 2 * (rows + cols) * depth
    step = max(ideal / 0.95, operands * max(asking / 40, 1 / 64))
    return Cycles(step, edge=3700 * rows * cols / (128 * 256), start=1500)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of kernels without waits: products in waves, at the clock that power allows.

    power_clock: Hz with all tensor cores busy. Power grows as f V², and V as f, so a kernel that keeps them
        busy for a fraction of the time runs at power_clock * fraction^(-1/3), up to `boost`. Boards differ:
        published times of one product vary by 20 %.
    """

    gpu: RatedGpu
    power_clock: float = 1.45e9
    boost: float = 1.98e9  # H100 SXM: nvidia-smi -q -d CLOCK
    memory_share: float = 0.9  # of the data sheet's bytes a second
    launch: float = 2e-6  # from one kernel to the next in a stream

    def product(self, rows: int, cols: int, depth: int, left_free: int = 0) -> float:
        """Return seconds of a product. left_free: processors that it does not use"""
        if not (rows and cols and depth):
            return 0.0
        processors = self.gpu.processors
        like_h100 = Target("cuda", 90, processors)
        tile = default_tile("linear", "descriptor", torch.bfloat16, like_h100, rows, cols)
        steps, tiles = -(-depth // tile.block_depth), tile.tiles(rows, cols)
        cycles = usual_cycles(tile, min(1.0, tiles / processors))
        on_busiest = -(-tiles // (processors - left_free))
        total = cycles.start + on_busiest * (cycles.edge + steps * cycles.step)
        ideal = 2 * tile.block_rows * tile.block_cols * tile.block_depth / _FLOPS_A_CYCLE
        busy = ideal * steps * tiles / processors / total
        computing = total / self.clock(busy) * _H100_RATE / (self.gpu.flops / processors)
        traffic = 2.0 * (rows * depth + cols * depth + rows * cols)
        return self.launch + max(computing, traffic / self._bytes_a_second)

    def streamed(self, traffic: float) -> float:
        """Return seconds of a kernel that reads and writes `traffic` bytes and computes almost nothing."""
        return self.launch + traffic / self._bytes_a_second

    def clock(self, busy: float) -> float:
        """Return Hz if tensor cores are busy for this fraction of the time."""
        return min(self.boost, self.power_clock * float(max(busy, 0.05) ** (-1 / 3)))

    @property
    def _bytes_a_second(self) -> float:
        return self.gpu.bytes * self.memory_share


@dataclass(frozen=True, slots=True)
class Host:
    """Microseconds of the host's launching thread: docs/launches.md, and about 5 of CUDA for each launch.

    A CUDA graph is one launch; its kernels follow each other without the host.
    """

    call: float = 22.0  # of an operator, without its launches
    collective: float = 20.0
    product: float = 21.0
    kernel: float = 21.0  # any other
    copy: float = 8.0  # with the word that the stream writes after it
    naive_product: float = 12.0  # F.linear without autograd
    naive_collective: float = 25.0
    decomposed_product: float = 16.0  # 8 chunks with their copies take 277 in all (kraken, PR 2)


GRAPH = Host(5.0, *[0.0] * 7)


@dataclass(frozen=True, slots=True)
class Nccl:
    """Times of NCCL collectives of R ranks in a node with NVLink switches.

    NCCL uses the faster of two protocols: of low latency, or of high bandwidth. Fitted to the device times of
    all-gathers of 2 to 128 MiB on 8 H100 (Megatron-LM, pull request 5596): 20.2, 43.4, 118.9, 385.3 µs.
    """

    protocols: tuple[tuple[float, float], ...] = ((12.5e-6, 0.527), (30e-6, 0.735))  # s, fraction of the link
    channels: int = NCCL_BLOCKS  # blocks, each on one processor
    latency_ranks: int = 8  # of these figures; latency grows with the steps of a ring

    def seconds(self, sent: float, link: float, ranks: int) -> float:
        """Return seconds. sent: bytes that each rank sends; link: bytes a second of the data sheet"""
        steps = (ranks - 1) / (self.latency_ranks - 1)
        return min(latency * (0.5 + 0.5 * steps) + sent / (share * link) for latency, share in self.protocols)


@dataclass(frozen=True, slots=True)
class Node:
    """Figures of a node for the model of a call."""

    gpu: RatedGpu
    times: KernelTimes
    host: Host = field(default_factory=Host)
    nccl: Nccl = field(default_factory=Nccl)
    copy_share: float = 0.82  # of the link, reached by a copy engine: 370 GB/s of 450 in public tests
    copy_latency: float = 3e-6  # from one copy of a stream to the next, flag included
    store_share: float = 0.75  # of the link, reached by a kernel's stores
    flag_latency: float = 2e-6  # until a kernel sees the flag of rows
    waiting: float = 1.036  # a waiting product is not flattened; by the count of its machine code

    @staticmethod
    def of(gpu: RatedGpu) -> Node:
        return Node(gpu, KernelTimes(gpu))

    def with_host(self, host: Host) -> Node:
        return replace(self, host=host)
