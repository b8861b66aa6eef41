"""What a stage of `make gpu` runs on: a GPU, or a CPU that stands in for one in a rehearsal."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.measure import Way, as_graph, seconds_on_clock
from tpkernels.dispatch.timing import CudaStream, TimedStream
from tpkernels.kernels.target import H100, INTERPRETER, Target, target_of

if TYPE_CHECKING:
    from tpkernels.cli.sm_probe import ProbedGpu
    from tpkernels.reserved_sms import ProductLibrary

ROOT = Path(__file__).parents[1]
ROUNDS = 15


class Cuda:
    """The current GPU, with its current stream and one beside."""

    name = "cuda"

    @property
    def target(self) -> Target:
        """What kernels run on, and are compiled for."""
        return target_of(torch.device(self.name))

    compiled_for = target

    def facts(self) -> dict[str, Any]:
        """What is known of the machine."""
        properties = torch.cuda.get_device_properties(0)
        return versions() | {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "memory": properties.total_memory,
        }

    @cached_property
    def stream(self) -> TimedStream:
        return CudaStream(torch.device(self.name, torch.cuda.current_device()))

    def capture(self, way: Way) -> Way:
        """What replays a way that was called before."""
        return as_graph(way)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def pinned(self, tensor: Tensor) -> Tensor:
        """The tensor in memory that copy engines read."""
        return tensor.pin_memory()

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(priority=-1)

    def fork(self) -> None:
        """Let the stream beside wait for the current one."""
        self._side.wait_stream(torch.cuda.current_stream())

    def beside(self) -> Any:
        """A context in which the stream beside is the current one."""
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        """Let the current stream wait for the one beside."""
        torch.cuda.current_stream().wait_stream(self._side)

    def probed(self) -> ProbedGpu:
        from tpkernels.cli.sm_probe import CudaGpu

        return CudaGpu(torch.device(self.name, torch.cuda.current_device()))


class StandIn:
    """A CPU with one stream that is never behind; kernels are interpreted, and compiled for an H100."""

    name, target, compiled_for = "cpu", INTERPRETER, H100

    def facts(self) -> dict[str, Any]:
        return versions() | {"gpu": f"none: {platform.machine()} stands in"}

    @cached_property
    def stream(self) -> TimedStream:
        return StandInStream()

    def capture(self, way: Way) -> Way:
        return way

    def synchronize(self) -> None:
        pass

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    def fork(self) -> None:
        pass

    def beside(self) -> Any:
        return nullcontext()

    def join(self) -> None:
        pass

    def probed(self) -> ProbedGpu:
        return StandInGpu()


Device = Cuda | StandIn


def milliseconds(device: Device, way: Way) -> float:
    """The median time of a call on the device."""
    found = []
    for _ in range(ROUNDS):
        start = device.stream.mark()
        way()
        end = device.stream.mark()
        end.synchronize()
        found.append(float(start.elapsed_time(end)))
    return median(found)


class StandInStream:
    """A stream whose work is done when it is enqueued."""

    def is_quiet(self) -> bool:
        return True

    def hold(self, milliseconds: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def mark(self) -> StandInEvent:
        return StandInEvent()


class StandInEvent:
    """A moment on the clock."""

    def __init__(self) -> None:
        self.moment = time.perf_counter()

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: StandInEvent) -> float:
        return 1e3 * (end.moment - self.moment)


class StandInGpu:
    """Multiplies on the CPU, whatever is reserved."""

    sms = 8
    libraries: tuple[ProductLibrary, ...] = ("cublas", "ours")

    def milliseconds(self, library: ProductLibrary, *, busy: int, reserved: int) -> float:
        x = torch.ones(32, 32)
        return 1e3 * seconds_on_clock(lambda: x @ x)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str | None]:
    """The versions that a result depends on."""
    triton = version_of("triton")
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton}
    return found | {"cuda": torch.version.cuda if torch.cuda.is_available() else None}


@cache
def revision() -> str | None:
    """The commit, with + after it where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:  # no git
        return None
    return ran.stdout.strip() or None
