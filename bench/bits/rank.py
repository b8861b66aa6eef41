"""What a rank of `bench bits` computes: one program, undisturbed and under schedules, with the same group."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.bits.programs import Place, run_program
from bench.bits.schedule import drawn, imposed
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.groups.initialize import create_parallel_state
from tpkernels.groups.plan import plan_groups

WAYS = {  # the transport that is asked for, and who computes
    "c10d": ("c10d", "torch"),
    "shared": ("shared", "torch"),
    "kernels": ("shared", "triton"),  # which wait themselves, in the interpreter
}

Digests = dict[str, str]  # of each tensor of a rank, by name


class Task(NamedTuple):
    """One program over one transport."""

    transport: str
    program: str
    seeds: tuple[int, ...]  # of schedules; the program first runs without one
    planted: str = ""  # `module:function` that plants a fault in this rank
    progress: str = ""  # a file for the seed of the schedule that rank 0 has come to


def results_of(task: Task) -> list[Digests]:
    """Return digests of the undisturbed run, and of the run under each schedule."""
    transport, backend = WAYS[task.transport]
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None, "ranks have one"
    found = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(select, "requested_transport", transport))
        stack.enter_context(patch.object(backends, "backend", backend))
        if task.planted:
            module, _, name = task.planted.partition(":")
            stack.enter_context(getattr(import_module(module), name)())
        grid = create_parallel_state(plan_groups(world_size=ranks, tensor=ranks if ranks % 2 else 2))
        for seed in (None, *task.seeds):
            if task.progress and dist.get_rank() == 0 and seed is not None:
                Path(task.progress).write_text(str(seed))
            adversary = nullcontext(_no_pause)
            if seed is not None:
                adversary = imposed(drawn(seed, task.program, ranks), dist.get_rank())  # type: ignore[assignment]
            with adversary as pause:
                results = run_program(task.program, Place(group, grid, pause))
            found.append({name: _digest(tensor) for name, tensor in results.items()})
    return found


def _no_pause() -> None:
    pass


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
