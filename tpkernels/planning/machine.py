"""Speeds of a machine's GPUs and links, as fractions of data-sheet rates, by a group's position.

A group has every `stride`-th rank, a node has neighbouring ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.gpus import RatedGpu


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU, the number in a node, and the expected fractions of data-sheet rates."""

    gpu: RatedGpu
    gpus_per_node: int = 8
    efficiency: float = 0.5  # of products, with the kernels between them
    link_efficiency: float = 0.8  # of bytes a second
    reserve: float = 0.1  # of memory, for CUDA, libraries, temporaries, fragmentation

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node: expected at least 1, got {self.gpus_per_node}")
        for name in ("efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected more than 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve: expected 0 or more and less than 1, got {self.reserve}")

    @property
    def usable_memory(self) -> int:
        return int(self.gpu.memory * (1 - self.reserve))

    def computing(self, flops: float) -> float:
        return flops / (self.gpu.flops * self.efficiency)

    def exchanging(self, sent: float, size: int, stride: int) -> float:
        """Seconds for a rank to send `sent` bytes evenly to all members, point to point, as our transports.

        size, stride: of the group, whose members are every `stride`-th rank
        """
        if size == 1:
            return 0.0
        across = sent * (size - self._members_in_node(size, stride)) / (size - 1)
        return max((sent - across) / self.gpu.nvlink, across / self.gpu.network) / self.link_efficiency

    def circling(self, sent: float, size: int, stride: int) -> float:
        """Seconds of a ring, as of a backend; a node's members of the group share their network adapters."""
        if size == 1:
            return 0.0
        inside = self._members_in_node(size, stride)
        rate = self.gpu.nvlink if inside == size else min(self.gpu.nvlink, inside * self.gpu.network)
        return sent / rate / self.link_efficiency

    def handing_on(self, sent: float, size: int, stride: int) -> float:
        """Seconds from a member to the next, for the farthest pair."""
        inside = self._members_in_node(size, stride) == size
        return sent / (self.gpu.nvlink if inside else self.gpu.network) / self.link_efficiency

    def _members_in_node(self, size: int, stride: int) -> int:
        return min(size, max(1, self.gpus_per_node // stride))
