"""The ranks that `qualify` runs on: they do each step all together, and know what became of it everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.cli.qualified import Check
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.runtime.c10d import new_group
from tpkernels.training.launch import join_world

T = TypeVar("T")

# of one call: a rank that is later has failed. On GPUs the first call compiles kernels.
CALL_SECONDS, GPU_CALL_SECONDS = 30.0, 300.0
STEP_SECONDS = 600.0  # in which all ranks end a step, failed or not


@dataclass
class QualifyWorld:
    """This rank of a world that does each step together, whatever fails in it."""

    rank: int
    ranks: int
    device: torch.device
    seed: int
    seconds: float  # for all of it
    quick: bool
    began: float = field(default_factory=time.monotonic)
    groups: int = 0  # made so far

    @staticmethod
    def join(device: torch.device, seed: int, seconds: float, quick: bool) -> QualifyWorld:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        join_world(backend, timedelta(seconds=STEP_SECONDS))
        world = QualifyWorld(dist.get_rank(), dist.get_world_size(), device, seed, seconds, quick)
        world.seed = world.all_do(lambda: seed)[1][0]
        return world

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def all_do(self, step: Callable[[], Any]) -> tuple[list[str], list[Any]]:
        """Do a step on all ranks, whatever fails; return what went wrong where, and each rank's result."""
        fault, value = "", None
        try:
            value = step()
            self.synchronize()
        except Exception as error:  # whatever it is, the table has a line for it
            fault = f"rank {self.rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, (fault, value))  # on the default group nothing is tried
        return [fault for fault, _ in answers if fault], [value for _, value in answers]

    def check(self, part: str, name: str, step: Callable[[], str]) -> Check:
        """Return a line of the table from a step that returns what is to be said of it, or raises."""
        return self._check(part, name, step, lambda texts: (texts[0], {}))

    def timed(self, part: str, name: str, step: Callable[[], Mapping[str, list[float]]], said: str) -> Check:
        """Return a line of the table from a step that returns each way's milliseconds by round, or raises.

        A round takes as long as its slowest rank, and a way the median of its rounds.
        """

        def told(times: list[Mapping[str, list[float]]]) -> tuple[str, dict[str, float]]:
            slowest = {
                way: median(map(max, zip(*(rank[way] for rank in times), strict=True))) for way in times[0]
            }
            return f"{said}: {', '.join(f'{way} {ms:.3g} ms' for way, ms in slowest.items())}", slowest

        return self._check(part, name, step, told)

    def _check(
        self,
        part: str,
        name: str,
        step: Callable[[], T],
        told: Callable[[list[T]], tuple[str, dict[str, float]]],
    ) -> Check:
        """told: what to say of what all ranks bring, and the numbers in it"""
        began = time.monotonic()
        faults, found = self.all_do(step)
        seconds = round(time.monotonic() - began, 2)
        if faults:
            return Check(part, name, "wrong", "; ".join(faults), seconds)
        text, numbers = told(found)
        return Check(part, name, "right", text, seconds, numbers)

    def late(self, share: float) -> bool:
        """Return whether that share of all the time is over, by the clock of this rank."""
        return time.monotonic() - self.began > share * self.seconds

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def group_over(self, transport: str) -> Iterator[ProcessGroup]:
        """A new group of all ranks, whose ops go over a transport; what fails in it is lost with it."""
        self.groups += 1
        group = new_group(
            tuple(range(self.ranks)),
            name=f"qualify {self.groups}",
            description=f"{transport} is tried on it",
            timeout=timedelta(seconds=GPU_CALL_SECONDS if self.on_gpu else CALL_SECONDS),
            backend=None,
            options=None,
        )
        with self.asking_for(transport):
            yield group

    @contextmanager
    def computing(self) -> Iterator[None]:
        """On GPUs by our kernels, of which some wait for rows, and none is timed first; on a CPU by torch."""
        before, backends.backend = backends.backend, "triton" if self.on_gpu else "torch"
        try:
            yield
        finally:
            backends.backend = before

    @contextmanager
    def asking_for(self, transport: str) -> Iterator[None]:
        """Choose the transport as if TPKERNELS_TRANSPORT said so."""
        before, select.requested_transport = select.requested_transport, transport
        try:
            yield
        finally:
            select.requested_transport = before

    def transports(self) -> dict[str, str]:
        """Return the transports of this device, each with why it is left out here, or ""."""
        if self.ranks == 1:
            return dict.fromkeys(
                ("c10d", "symmetric" if self.on_gpu else "shared"), "a rank alone sends nothing"
            )
        if not self.on_gpu:
            return {"c10d": "", "shared": ""}
        count = torch.cuda.device_count()
        apart = [
            f"{i} and {j}"
            for i in range(count)
            for j in range(i)
            if not torch.cuda.can_device_access_peer(i, j)
        ]
        return {"c10d": "", "symmetric": f"GPUs {apart[0]} do not reach each other's memory" if apart else ""}
