"""`python -m tpkernels train`: a process with its launcher, or ranks of a pool without one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.patience import patient
from tests.programs import started
from tests.ranks import RankPool
from tests.segments import tp_invariance
from tpkernels.cli import main
from tpkernels.training.launch import loopback_store

ALICE = Path(__file__).parents[2] / "data" / "alice.txt"
SIZES = ["--size", "hidden_size=16", "--size", "num_layers=1"]
TINY = [*SIZES, "--tokens", "16", "--batch", "4", "--warmup", "1"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@contextmanager
def training(
    *arguments: object, launcher: tuple[object, ...] = ("-m", "tpkernels")
) -> Iterator[subprocess.Popen[str]]:
    """Run `train` with its launcher, or under another."""
    with started(*launcher, "train", "--data", ALICE, *TINY, *arguments) as run:
        yield run


def end_of(run: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a run and of its ranks; return its exit code and output."""
    printed, errors = run.communicate(timeout=patient(120))
    return subprocess.CompletedProcess(run.args, run.returncode, printed, errors)


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
    rank = dist.get_rank()
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    dist.destroy_process_group()  # a run makes its own
    told = patch.dict(os.environ, {name: str(value) for name, value in environment.items()})
    hook = patch.object(sys, "excepthook", sys.excepthook)  # torch wraps it when a run makes its world
    as_new = tp_invariance(0)  # the process has computed with one number of segments or another before
    outputs = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
    with told, hook, as_new, outputs[0] as printed, outputs[1] as errors:
        code = program(command)
    return code, printed.getvalue(), errors.getvalue()
