"""FLOPs of a step, as a share of the peak (MFU, as in the PaLM paper), and bytes that a rank keeps.

Counted are the products of linear layers, the head's among them, and of attention, over all tokens as if it
were not causal; forward once, and twice that for backward. Not counted are lookups, norms, activations, the
optimizer, padding of a vocabulary, and what is computed again: recomputation lowers MFU.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.gpus import RATED_GPUS
from tpkernels.models.config import GPTConfig
from tpkernels.ops.activations import GATE_OF
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import StepReport, Trainer


def flops_per_token(model: GPTConfig, tokens: int) -> int:
    """Return the FLOPs of a training step for each token, forward and backward; tokens: in an excerpt"""
    width = model.hidden_size
    key_features = (model.num_kv_heads or model.num_heads) * (width // model.num_heads)
    ups = 2 if model.activation in GATE_OF else 1
    block = 2 * width * width + 2 * width * key_features  # query and output; key and value
    block += (ups + 1) * width * (model.ffn_hidden_size or 4 * width)
    weights = model.num_layers * block + width * model.vocab_size
    attention = 2 * model.num_layers * tokens * width  # scores, and what they weigh
    return 3 * 2 * (weights + attention)  # a multiplication and an addition each


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of the device in this dtype, where a data sheet says it."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.flops for gpu in RATED_GPUS.values() if gpu.name == name), None)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the model's work is done.

    peak: FLOP/s of a rank's device; None: not known
    """

    flops_per_token: int
    ranks: int
    peak: float | None

    @staticmethod
    def of_run(config: TrainConfig, device: torch.device, peak_tflops: float | None) -> Speed:
        """peak_tflops: where the user knows better than data sheets"""
        peak = known_peak(device, config.dtype) if peak_tflops is None else 1e12 * peak_tflops
        return Speed(flops_per_token(config.model, config.tokens), dist.get_world_size(), peak)

    def of(self, report: StepReport) -> dict[str, float]:
        """Return TFLOP/s of each rank in a step, and MFU if the peak is known."""
        flops = self.flops_per_token * report.tokens / report.seconds / self.ranks
        found = {"tflops_per_rank": flops / 1e12}
        return found if self.peak is None else {**found, "mfu": flops / self.peak}

    def line(self, report: StepReport) -> str:
        """The same in words."""
        found = self.of(report)
        tera = found["tflops_per_rank"]
        flops = f"{tera:.3g} TFLOP/s" if tera >= 1 else f"{1e3 * tera:.3g} GFLOP/s"
        flops = f"{flops} on each of {self.ranks} ranks"
        if self.peak is None:
            return f"{flops}; no MFU: the peak is not known, --peak-tflops X tells it"
        return f"{flops}: MFU {100 * found['mfu']:.1f} % of {self.peak / 1e12:g} TFLOP/s"


def median_step(reports: Sequence[StepReport]) -> StepReport:
    """Return the step of median time: the first steps, and other users of the machine, disturb a mean."""
    return sorted(reports, key=lambda report: report.seconds)[len(reports) // 2]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank holds, by what they are for."""

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


def largest_memory(trainer: Trainer) -> RankMemory:
    """Return the memory of the rank with the highest peak; called by all ranks."""
    everybody: list[RankMemory] = [_memory(trainer)] * dist.get_world_size()
    dist.all_gather_object(everybody, _memory(trainer))
    return max(everybody, key=lambda memory: (memory.peak, -memory.rank))


def _memory(trainer: Trainer) -> RankMemory:
    on_gpu = trainer.device.type == "cuda"
    return RankMemory(
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
