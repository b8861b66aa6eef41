"""Names of GPUs, and the rates of their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A model of GPU."""

    name: str  # as torch spells it; variants with other clocks or memory have other names


@dataclass(frozen=True, slots=True)
class RatedGpu(Gpu):
    """A GPU with the rates of its data sheet; bytes a second are of one direction."""

    processors: int  # streaming multiprocessors
    flops: float  # dense bf16 products
    bytes: float  # memory traffic
    memory: int  # bytes: GB as data sheets write them; what a GPU reports is a little more
    nvlink: float  # bytes a second to GPUs of the same node
    network: float  # to other nodes: one adapter for each GPU, as in NVIDIA's own machines

    def floor(self, flops: float, traffic: float) -> float:
        """Return a lower bound of a kernel's seconds."""
        return max(flops / self.flops, traffic / self.bytes)


_GB = 10**9
GPUS: Mapping[str, Gpu] = {
    # 900 GB/s of NVLink are both directions together; ConnectX-7 moves 400 Gb/s
    "h200": RatedGpu("NVIDIA H200", 132, 989e12, 4.8e12, 141 * _GB, 450e9, 50e9),
    "h100": RatedGpu("NVIDIA H100 80GB HBM3", 132, 989e12, 3.35e12, 80 * _GB, 450e9, 50e9),
    # 600 GB/s and 200 Gb/s
    "a100": RatedGpu("NVIDIA A100-SXM4-80GB", 108, 312e12, 2.039e12, 80 * _GB, 300e9, 25e9),
    "l40s": Gpu("NVIDIA L40S"),
    "b200": Gpu("NVIDIA B200"),
    "mi300x": Gpu("AMD Instinct MI300X"),
}
RATED_GPUS: Mapping[str, RatedGpu] = {name: gpu for name, gpu in GPUS.items() if isinstance(gpu, RatedGpu)}


def gpu_named(name: str) -> RatedGpu:
    if name not in RATED_GPUS:
        raise ValueError(f"gpu: expected one of {', '.join(RATED_GPUS)}, got {name!r}")
    return RATED_GPUS[name]
