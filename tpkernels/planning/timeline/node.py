"""GPUs of one machine: what they, the links between them and their hosts take. Each figure has its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tpkernels.gpus import NCCL_BLOCKS, RatedGpu
from tpkernels.planning.timeline.kernel_times import KernelTimes, TiledTimes


@dataclass(frozen=True, slots=True)
class Host:
    """Microseconds of the thread that launches. Ours: docs/launches.md, and about 5 of CUDA a launch.

    A CUDA graph is launched at once, and its kernels follow each other without a host.
    """

    call: float = 75.0  # of an operator, beside what it launches
    collective: float = 50.0
    product: float = 35.0
    kernel: float = 35.0  # any other
    copy: float = 9.0  # with the word that the stream writes behind it
    naive_product: float = 12.0  # F.linear without autograd
    naive_collective: float = 25.0
    decomposed_product: float = 16.0  # 8 chunks with their copies take 277 in all (kraken, PR 2)


GRAPH = Host(5.0, *[0.0] * 7)


@dataclass(frozen=True, slots=True)
class Nccl:
    """Of collectives in a node of NVLink switches, R ranks.

    NCCL takes the faster of its protocols: one with little latency, one with much bandwidth. Fitted to the
    device times of all-gathers of 2 to 128 MiB on 8 H100 (Megatron-LM, pull request 5596): 20.2, 43.4,
    118.9, 385.3 µs.
    """

    protocols: tuple[tuple[float, float], ...] = ((12.5e-6, 0.527), (30e-6, 0.735))  # s, share of the link
    channels: int = NCCL_BLOCKS  # blocks that occupy a processor each
    latency_ranks: int = 8  # of those figures: latency grows with the steps of a ring

    def seconds(self, sent: float, link: float, ranks: int) -> float:
        """sent: bytes that each rank sends; link: bytes a second of the data sheet"""
        steps = (ranks - 1) / (self.latency_ranks - 1)
        return min(latency * (0.5 + 0.5 * steps) + sent / (share * link) for latency, share in self.protocols)


@dataclass(frozen=True, slots=True)
class Node:
    """What a model of a call needs to know."""

    gpu: RatedGpu
    times: KernelTimes
    host: Host = field(default_factory=Host)
    nccl: Nccl = field(default_factory=Nccl)
    copy_share: float = 0.82  # of the link, that a copy engine reaches: 370 GB/s of 450 in public tests
    copy_latency: float = 3e-6  # from one copy of a stream to the next, flag included
    store_share: float = 0.75  # of the link, that stores of a kernel reach
    flag_latency: float = 2e-6  # until a kernel sees that rows are there
    waiting: float = 1.036  # a product that waits is not flattened; by the count of its machine code

    @staticmethod
    def of(gpu: RatedGpu) -> Node:
        return Node(gpu, TiledTimes(gpu))

    def with_host(self, host: Host) -> Node:
        return replace(self, host=host)
