"""What a rank keeps while it trains, and the most that it ever had, by the rank that had most."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    peak: int
    peak_is: str  # what was measured

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)

    def line(self) -> str:
        parts = (f"{name} {_shown(getattr(self, name))}" for name in ("weights", "gradients", "optimizer"))
        return (
            f"memory of rank {self.rank}, the largest: {', '.join(parts)}; {self.peak_is} {_shown(self.peak)}"
        )


def largest_memory(trainer: Trainer) -> Memory:
    """Of the rank with the highest peak; called by all ranks."""
    everybody: list[Memory] = [_memory(trainer)] * dist.get_world_size()
    dist.all_gather_object(everybody, _memory(trainer))
    return max(everybody, key=lambda memory: (memory.peak, -memory.rank))


def _memory(trainer: Trainer) -> Memory:
    on_gpu = trainer.device.type == "cuda"
    return Memory(
        rank=dist.get_rank(),
        weights=_bytes([*trainer.model.parameters(), *trainer.model.buffers()]),
        gradients=_bytes(trainer.optimizer.buckets.buckets),
        optimizer=_bytes(trainer.optimizer.tensors()),
        peak=torch.cuda.max_memory_allocated(trainer.device) if on_gpu else _peak_of_process(),
        peak_is="peak of what torch allocated on the GPU" if on_gpu else "peak resident set of the process",
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts kilobytes


def _shown(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
