"""FLOPs of a step, as a fraction of the peak (MFU, as in the PaLM paper), and memory of a rank.

FLOPs are those of linear layers, with the head, and of attention, over all tokens as if it were not causal:
forward once, backward twice. Not counted are lookups, norms, activations, the optimizer, vocabulary padding,
and recomputation, which therefore lowers MFU.

The memory that a run needs at least is computed before any allocation: weights, gradients, the optimizer,
ids, inputs of blocks, and on a CPU each process. Most runs take more: no run is refused that would have
worked.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels.files import read_text
from tpkernels.models.config import GPTConfig
from tpkernels.planning.gpus import RATED_GPUS
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import GRADIENT, OPTIMIZER, parameters_of_stage
from tpkernels.planning.step_time import FlopsOfBlock
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import StepReport

PROCESS = 100 * 2**20  # of a process's own memory once torch is imported; measured: 225 MiB


def flops_per_token(model: GPTConfig, tokens: int) -> float:
    """Return the FLOPs of a training step for each token, forward and backward; tokens: in an excerpt"""
    flops = FlopsOfBlock.of(Job(model=model, tokens=tokens, batch=1), 1)
    block = flops.qkv + flops.output + flops.up + flops.down + 2 * flops.attention  # which is causal there
    return 3 * (model.num_layers * block / tokens + 2 * model.hidden_size * model.vocab_size)


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of the device in this dtype by its data sheet; None if unknown."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.flops for gpu in RATED_GPUS.values() if gpu.name == name), None)


@dataclass(frozen=True, slots=True)
class Speed:
    """The rate of a run's FLOPs.

    peak: FLOP/s of a rank's device; None: unknown
    """

    flops_per_token: float
    ranks: int
    peak: float | None

    @staticmethod
    def of_run(config: TrainConfig, device: torch.device, peak_tflops: float | None) -> Speed:
        """Return the speed of a run. peak_tflops: the user's peak, in place of the data sheet's"""
        peak = known_peak(device, config.dtype) if peak_tflops is None else 1e12 * peak_tflops
        return Speed(flops_per_token(config.model, config.tokens), dist.get_world_size(), peak)

    def of(self, report: StepReport) -> dict[str, float]:
        """Return TFLOP/s of each rank in a step, and MFU if the peak is known."""
        flops = self.flops_per_token * report.tokens / report.seconds / self.ranks
        found = {"tflops_per_rank": flops / 1e12}
        return found if self.peak is None else {**found, "mfu": flops / self.peak}

    def line(self, report: StepReport) -> str:
        """Format the speed of a step."""
        found = self.of(report)
        tera = found["tflops_per_rank"]
        flops = f"{tera:.3g} TFLOP/s" if tera >= 1 else f"{1e3 * tera:.3g} GFLOP/s"
        flops = f"{flops} on each of {self.ranks} ranks"
        if self.peak is None:
            return f"{flops}; no MFU: the peak is not known, --peak-tflops X tells it"
        return f"{flops}: MFU {100 * found['mfu']:.1f} % of {self.peak / 1e12:g} TFLOP/s"


def median_step(reports: Sequence[StepReport]) -> StepReport:
    """Return the step of median time: first steps and other users of the machine would distort a mean."""
    return sorted(reports, key=lambda report: report.seconds)[len(reports) // 2]


def peak_memory(device: torch.device) -> int:
    """Return the peak of bytes: of what torch allocated on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts kilobytes


def least_bytes(config: TrainConfig, tensor: int, data: int) -> int:
    """Return a lower bound of the bytes that each rank needs."""
    at_once = max(1, config.batch // data // config.accumulate)
    job = Job(
        model=config.model,
        tokens=config.tokens,
        batch=config.batch,
        micro_batch=at_once,
        element=config.dtype.itemsize,
    )
    parameters = parameters_of_stage(job, RankLayout(tensor, 1, data), 0).total
    held = parameters * (job.element + GRADIENT) + parameters * OPTIMIZER // data
    ids = 16 * config.batch // data * config.tokens  # and targets
    blocks = config.model.num_layers * job.tokens_at_once() * config.model.hidden_size * job.element
    return held + ids + (blocks // tensor if config.sequence_parallel else blocks)


def require_room(config: TrainConfig, tensor: int, data: int, *, local: int, device: torch.device) -> None:
    """Raise if the ranks of this machine cannot fit into its memory.

    local: the number of ranks here, which share the machine's memory; each has its own GPU
    """
    needed = least_bytes(config, tensor, data)
    if device.type == "cuda":
        there, of_what = torch.cuda.get_device_properties(device).total_memory, f"{device} has"
    else:
        needed = (needed + PROCESS) * local
        there, of_what = memory_of_machine(), "this machine has"
    if needed > there:
        ranks = f"{local} ranks need" if device.type == "cpu" and local > 1 else "a rank needs"
        raise ValueError(
            f"{ranks} at least {_gibibytes(needed)} of memory for weights, gradients, optimizer and ids, and "
            f"{of_what} {_gibibytes(there)}: choose smaller sizes, or more machines"
        )


def memory_of_machine() -> int:
    """Return the bytes of memory and swap that processes of this machine, or container, can have."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # another system than Linux
        if swap := re.search(r"^SwapTotal: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE):
            total += 1024 * int(swap[1])
    with suppress(OSError, ValueError):  # no container, or "max"
        total = min(total, int(read_text("/sys/fs/cgroup/memory.max")))
    return total


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count < 2**50 else f"{count // 2**30:,} GiB"
