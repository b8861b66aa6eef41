"""Choices made on the CPU: a fake clock, and kernels in the interpreter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import pytest
import torch

from tpkernels.dispatch.cache import Cache, Versions
from tpkernels.dispatch.candidates import TargetGpu
from tpkernels.dispatch.chooser import Chooser
from tpkernels.dispatch.timing import Times
from tpkernels.kernels.target import INTERPRETER

CPU = torch.device("cpu")
VERSIONS = Versions("Test GPU 1", "2.13.0", "3.7.1", "0123456789ab")


@dataclass
class FakeTimer:
    """Says what it is told to of each candidate, and remembers what it was asked to run."""

    milliseconds: Mapping[str, float]  # by the beginning of a name
    asked: list[list[str]] = field(default_factory=list)
    on_gpu: Mapping[str, float] | None = None  # None: as long

    def __call__(self, runs: Mapping[str, Callable[[], object]]) -> Times:
        self.asked.append(list(runs))
        both = self.milliseconds, self.on_gpu or self.milliseconds
        return Times(*({name: _of(name, each) for name in runs} for each in both))


def _of(name: str, milliseconds: Mapping[str, float]) -> float:
    return next(ms for beginning, ms in milliseconds.items() if name.startswith(beginning))


MakeChooser = Callable[..., Chooser]
TRITON_WINS = {"triton/descriptor": 1.0, "triton/pointer": 2.0, "torch": 3.0, "addmm": 3.0, "mm+": 3.0}


def need_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which is off where there is a GPU")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPKERNELS_TUNE", "TPKERNELS_LOG", "TPKERNELS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_chooser(tmp_path: Path) -> MakeChooser:
    """A chooser whose process has just begun, on the cache of this test."""
    need_interpreter()

    def make(
        timer: Callable[..., Times] | None = None,
        obstacle: str | Callable[[torch.device], str | None] | None = None,
        clock: Callable[[], float] = perf_counter,
        folder: Path = tmp_path,
        versions: Versions = VERSIONS,
    ) -> Chooser:
        gpu, cache = TargetGpu(versions.gpu, INTERPRETER), Cache(folder, versions)
        stands = obstacle if callable(obstacle) else lambda device: obstacle
        return Chooser(CPU, gpu, timer or FakeTimer(TRITON_WINS), cache, stands, clock)

    return make
