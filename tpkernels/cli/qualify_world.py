"""The ranks of `qualify`, the lines of its table, and its saved report.

All ranks do each step together, and each gets all ranks' results. A report is kept for a model of GPU and
these versions, in the user's cache.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.dispatch.cache import Versions
from tpkernels.dispatch.cache import versions_for as versions_for
from tpkernels.files import cache_folder, parsed, read_text, replace_text
from tpkernels.groups.c10d import new_group
from tpkernels.training.launch import join_world

T = TypeVar("T")

# of one call: a rank that takes longer has failed. On GPUs the first call compiles kernels.
CALL_SECONDS, GPU_CALL_SECONDS = 30.0, 300.0
STEP_SECONDS = 600.0  # in which all ranks end a step, failed or not
FORMAT = 1


@dataclass(frozen=True)
class Check:
    """One line of the table of `qualify`: a test and its result."""

    part: str  # kernels, transports, calls, graphs, times, buckets, ranks
    name: str
    status: Literal["right", "wrong", "left out"]
    text: str
    seconds: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Qualification:
    """The report of a run of `qualify`."""

    versions: Versions
    ranks: int
    seed: int
    checks: Sequence[Check]
    auto: str  # the choice of TPKERNELS_TRANSPORT=auto, and why

    @property
    def right(self) -> bool:
        return bool(self.checks) and not any(check.status == "wrong" for check in self.checks)

    def as_json(self) -> str:
        content = {"format": FORMAT, "right": self.right, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"

    def table(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [
            f"{each.status:<8}  {each.part:<10}  {each.name:<{width}}  {each.text}" for each in self.checks
        ]
        return "\n".join(lines)


def versions_here() -> Versions:
    """Return the versions of the GPU of this process, or of the CPU."""
    return versions_for(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")


def path_for(versions: Versions) -> Path | None:
    """Return the path of a report; None without a cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / f"qualified_{versions.slug}.json"


def save_report(report: Qualification) -> None:
    """Save a report in place of the one for these versions; OSError if it cannot be written."""
    path = path_for(report.versions)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, report.as_json())


def saved_report(versions: Versions) -> dict[str, Any] | None:
    """Return the saved report for these versions; None without a readable one."""
    path = path_for(versions)
    try:
        content = None if path is None else parsed(read_text(path))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    return content if content.get("versions") == asdict(versions) else None


class LeftOut(str):
    """The result of a step that cannot be tried here: the reason, the same on all ranks."""


@dataclass
class QualifyWorld:
    """One rank of `qualify`. All ranks do each step together, even if one of them fails."""

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
        """Do a step on all ranks, also if it fails on some; return each rank's error and result."""
        fault, value = "", None
        try:
            value = step()
            self.synchronize()
        except Exception as error:  # any error becomes a line of the table
            fault = f"rank {self.rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, (fault, value))  # tests never use the default group
        return [fault for fault, _ in answers if fault], [value for _, value in answers]

    def check(self, part: str, name: str, step: Callable[[], str]) -> Check:
        """Do a step that returns the text of its line, or raises; return the line of the table."""
        return self._check(part, name, step, lambda texts: (texts[0], {}))

    def timed(self, part: str, name: str, step: Callable[[], Mapping[str, list[float]]], said: str) -> Check:
        """Do a step that returns each way's milliseconds by round, or raises; return the line of the table.

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
        """told: converts the results of all ranks to the text of the line, and its numbers"""
        began = time.monotonic()
        faults, found = self.all_do(step)
        seconds = round(time.monotonic() - began, 2)
        if faults:
            return Check(part, name, "wrong", "; ".join(faults), seconds)
        text, numbers = told(found)
        status: Literal["right", "left out"] = "left out" if isinstance(text, LeftOut) else "right"
        return Check(part, name, status, text, seconds, numbers)

    def late(self, share: float) -> bool:
        """Whether that fraction of the time is over, by this rank's clock."""
        return time.monotonic() - self.began > share * self.seconds

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def group_over(self, transport: str) -> Iterator[ProcessGroup]:
        """Make a new group of all ranks whose ops use a transport; a failure affects this group only."""
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
        """Compute by our kernels on a GPU, without timing candidates; by torch on a CPU."""
        before, backends.backend = backends.backend, "triton" if self.on_gpu else "torch"
        try:
            yield
        finally:
            backends.backend = before

    @contextmanager
    def asking_for(self, transport: str) -> Iterator[None]:
        """Choose the transport as by TPKERNELS_TRANSPORT, inside the block."""
        before, select.requested_transport = select.requested_transport, transport
        try:
            yield
        finally:
            select.requested_transport = before

    def transports(self) -> dict[str, str]:
        """Return the transports of this device, each with the reason to leave it out, or ""."""
        if self.ranks == 1:
            in_memory = ("symmetric", select.IN_ROUNDS) if self.on_gpu else ("shared",)
            return dict.fromkeys(("c10d", *in_memory), "a rank alone sends nothing")
        if not self.on_gpu:
            return {"c10d": "", "shared": ""}
        count = torch.cuda.device_count()
        pairs = ((i, j) for i in range(count) for j in range(i))
        apart = [f"{i} and {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        why = f"GPUs {apart[0]} do not reach each other's memory" if apart else ""
        several = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks)) < self.ranks
        in_rounds = why or "ranks are on several machines" * several
        return {"c10d": "", "symmetric": why, select.IN_ROUNDS: in_rounds}
