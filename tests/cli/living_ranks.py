"""`python -m tpkernels train`: a process with its launcher, or ranks of a pool without one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.patience import patient
from tests.ranks import RankPool
from tests.segments import tp_invariance
from tpkernels.cli import main
from tpkernels.training.launch import loopback_store

ALICE = Path(__file__).parents[2] / "data" / "alice.txt"
SIZES = ["--size", "hidden_size=16", "--size", "num_layers=1"]
TINY = [*SIZES, "--tokens", "16", "--batch", "4", "--warmup", "1"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Program:
    """A running process, whose output lies in files."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    @property
    def ranks(self) -> list[int]:
        """Process ids of its children, in the order in which they were started."""
        return sorted(
            map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())
        )

    def wait(self) -> int:
        return self.process.wait(patient(120))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; fail if the process ends before."""
        deadline = time.monotonic() + patient(120)
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain: {self.stdout}{self.stderr}"
            assert self.process.poll() is None, self.stdout + self.stderr
            time.sleep(0.02)


@contextmanager
def training(folder: Path, *arguments: object, launcher: tuple[object, ...] = ()) -> Iterator[Program]:
    """Run `train` with its launcher, or under another; its output goes to files in `folder`."""
    program = launcher or ("-m", "tpkernels")
    command = [sys.executable, *program, "train", "--data", ALICE, *TINY, *arguments]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=errors)
    try:
        yield Program(process, folder)
    finally:
        process.kill()
        process.wait()


def train_on(ranks: RankPool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the ranks of a run say together; its exit code is that of one that failed, if any did."""
    return told_by(ranks, main, ["train", "--data", str(ALICE), *TINY, *arguments])


def told_by(
    ranks: RankPool, program: Callable[[list[str]], int], command: list[str]
) -> subprocess.CompletedProcess[str]:
    """The same of any program, which finds the environment of a launcher and no process group."""
    store = loopback_store()  # as the launcher's own
    codes, printed, errors = zip(*ranks.run(_as_rank, store.port, program, command), strict=True)
    return subprocess.CompletedProcess(command, max(codes), "".join(printed), "".join(errors))


def _as_rank(port: int, program: Callable[[list[str]], int], command: list[str]) -> tuple[int, str, str]:
    environment = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
    }
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    dist.destroy_process_group()  # a run makes its own
    told = patch.dict(os.environ, {name: str(value) for name, value in environment.items()})
    hook = patch.object(sys, "excepthook", sys.excepthook)  # torch wraps it when a run makes its world
    as_new = tp_invariance(0)  # the process has computed with one number of segments or another before
    with (
        told,
        hook,
        as_new,
        redirect_stdout(io.StringIO()) as printed,
        redirect_stderr(io.StringIO()) as errors,
    ):
        code = program(command)
    return code, printed.getvalue(), errors.getvalue()
