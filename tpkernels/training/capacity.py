"""Whether a run can fit into this machine at all, reckoned before anything is allocated.

What is counted is needed for certain, so that nothing is refused which would have worked: weights, gradients,
the optimizer, ids, what enters each block, and on a CPU each process. Most runs take more.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from tpkernels.files import read_text
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.memory import GRADIENT, OPTIMIZER
from tpkernels.planning.parameters import parameters_of_stage
from tpkernels.training.config import TrainConfig

PROCESS = 100 * 2**20  # of memory that it shares with no other, once torch is imported; seen: 225 MiB


def least_bytes(config: TrainConfig, tensor: int, data: int) -> int:
    """Return the bytes that each rank needs at least."""
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

    local: how many ranks run here, which share its memory; GPUs they have to themselves
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
