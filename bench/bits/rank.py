"""One rank of `bench bits`: a process that computes what it is told by a pipe, and answers with hashes.

python -m bench.bits.rank DESCRIPTOR [MODULE:FAULT ...]      in the environment of a rank
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.bits.programs import Place, run_program
from bench.bits.ranks import Digests, Task
from bench.bits.schedule import drawn, imposed
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.gate.child import end_with_parent
from tpkernels.groups.initialize import create_parallel_state
from tpkernels.groups.plan import plan_groups
from tpkernels.training.launch import join_world

JOIN_SECONDS, CALL_SECONDS = 600.0, 30.0  # for all ranks to start; of one call
WAYS = {  # the transport that is asked for, and who computes
    "c10d": ("c10d", "torch"),
    "shared": ("shared", "torch"),
    "kernels": ("shared", "triton"),  # which wait themselves, in the interpreter
}


def main(argv: Sequence[str]) -> None:
    """Serve until the pipe ends."""
    connection = Connection(int(argv[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; who started us ends us
    end_with_parent()  # a rank that is stopped would not see the pipe end
    for fault in argv[1:]:
        module, _, name = fault.partition(":")
        getattr(import_module(module), name)()
    rank = _Rank()
    connection.send({})  # ready
    while True:
        try:
            task = Task(*connection.recv())
        except EOFError:
            os._exit(0)  # whoever started us is gone, and nobody waits for threads
        try:
            connection.send(rank.run(task))
        except Exception as error:  # whatever it is, it is told
            connection.send(f"{type(error).__name__}: {error}")


class _Rank:
    """This process in its world."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        join_world("gloo", timedelta(seconds=JOIN_SECONDS))
        ranks = dist.get_world_size()
        self._grid = create_parallel_state(plan_groups(world_size=ranks, tensor=ranks if ranks % 2 else 2))
        self._places: dict[tuple[str, str], Place] = {}  # each with a group of its own

    def run(self, task: Task) -> Digests:
        transport, backend = WAYS[task.transport]
        rank, program = dist.get_rank(), task.program
        with (
            patch.object(select, "requested_transport", transport),
            patch.object(backends, "backend", backend),
        ):
            place = self._places.get((task.transport, program)) or self._place(task)
            adversary = (
                nullcontext(_no_pause)
                if task.seed is None
                else imposed(drawn(task.seed, program, place.ranks), rank)
            )
            with adversary as pause:
                results = run_program(program, replace(place, pause=pause))
        return {name: _digest(tensor) for name, tensor in results.items()}

    def _place(self, task: Task) -> Place:
        group = dist.new_group(timeout=timedelta(seconds=CALL_SECONDS))
        place = self._places[task.transport, task.program] = Place(group, self._grid, _no_pause)
        return place


def _no_pause() -> None:
    pass


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    main(sys.argv[1:])
