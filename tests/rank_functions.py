"""What the tests of the rank pool send to ranks: functions that answer, raise, hang, crash and die."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

FOREVER = 600.0  # far beyond every time-out here


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def add(a: int, b: int) -> int:
    return a + b


def shout() -> None:
    os.write(1, f"rank {dist.get_rank()} was here\n".encode())
    print(f"rank {dist.get_rank()} printed")


def make_a_lonely_group() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def sum_in_a_new_group() -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    return x.item()


def gather_as_dtensor(columns: int) -> None:
    """Torch remembers how, of each shape that was gathered, and by which groups."""
    rows = distribute_tensor(torch.ones(4, columns), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert rows.full_tensor().sum() == 4 * columns  # type: ignore[attr-defined]


def groups_of_gloo() -> int:
    """How many are alive, by the thread that each has."""
    gc.collect()
    names = [Path("/proc/self/task", each, "comm").read_text() for each in os.listdir("/proc/self/task")]
    return names.count("gloo_tcp_loop\n")


def excepthook_name() -> str:
    return sys.excepthook.__qualname__


def raise_on_every_rank() -> None:
    raise ValueError(f"no luck on rank {dist.get_rank()}")


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def sleep() -> None:
    time.sleep(FOREVER)


def raise_on_rank_1(others_do: Callable[[], object] = rank_and_size) -> str:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    others_do()
    return "fine"


class Stubborn(Exception):
    """Can be pickled, but not unpickled: a common mistake."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def leave() -> None:
    sys.exit("enough")


def reduce_alone() -> None:
    if dist.get_rank() == 0:
        reduce()


def alarm_the_parent_and_hang() -> None:
    if dist.get_rank() == 0:
        parent = multiprocessing.parent_process()  # os.getppid() may have forked us
        os.kill(parent.pid, signal.SIGALRM)
    sleep()


def return_before_a_pending_reduce_is_done() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def end_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.Signals[how])
    dist.barrier()


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


def set_up_model_parallel(problem: str) -> None:
    """As far as the pool can see: a module with a function."""

    def destroy_model_parallel() -> None:
        assert dist.is_initialized()  # its groups go before the default group
        sys.modules.pop("tpkernels.groups.initialize")
        if problem:
            raise KeyError(problem)

    module: Any = SimpleNamespace(destroy_model_parallel=destroy_model_parallel)
    sys.modules["tpkernels.groups.initialize"] = module


def model_parallel_is_set_up() -> bool:
    return "tpkernels.groups.initialize" in sys.modules


def report_pid_and_hang() -> None:
    """Rank 0 in a collective that never ends; it can report from there, as gloo has let go of the GIL."""
    if dist.get_rank() == 0:
        threading.Timer(0.5, report_pid).start()
        reduce()
    report_pid()
    sleep()


def report_pid() -> None:
    os.write(1, f"{os.getpid()}\n".encode())
