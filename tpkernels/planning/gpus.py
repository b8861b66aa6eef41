"""What data sheets say of GPUs, and of the machines that they are sold in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the data sheet allows. Bytes a second are of one direction."""

    name: str  # as torch spells it; variants with other clocks or memory have other names
    flops: float  # dense bf16 products
    bytes: float  # memory traffic
    memory: int  # bytes: GB as data sheets write them; what a GPU reports is a little more
    nvlink: float  # bytes a second to GPUs of the same node
    network: float  # to other nodes: one adapter for each GPU, as in NVIDIA's own machines

    def floor(self, flops: float, traffic: float) -> float:
        """Seconds that no kernel can go below."""
        return max(flops / self.flops, traffic / self.bytes)


GPUS: Mapping[str, Gpu] = {
    # 900 GB/s of NVLink are both directions together; ConnectX-7 moves 400 Gb/s
    "h200": Gpu("NVIDIA H200", 989e12, 4.8e12, 141 * 10**9, 450e9, 50e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, 80 * 10**9, 450e9, 50e9),
    # 600 GB/s and 200 Gb/s
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12, 80 * 10**9, 300e9, 25e9),
}


def gpu_named(name: str) -> Gpu:
    if name not in GPUS:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name]
