"""Choices made on the CPU: a fake clock, and kernels in the interpreter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import pytest
import torch

from tpkernels.dispatch.autotune import Autotuner
from tpkernels.dispatch.cache import Cache, Versions
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
    company: str = ""

    def __call__(self, runs: Mapping[str, Callable[[], object]]) -> Times:
        self.asked.append(list(runs))
        both = self.milliseconds, self.on_gpu or self.milliseconds
        return Times(*({name: _of(name, each) for name in runs} for each in both), self.company)


def _of(name: str, milliseconds: Mapping[str, float]) -> float:
    return next(ms for beginning, ms in milliseconds.items() if name.startswith(beginning))


MakeTuner = Callable[..., Autotuner]
TRITON_WINS = {"triton/descriptor": 1.0, "triton/pointer": 2.0, "torch": 3.0, "addmm": 3.0, "mm+": 3.0}


def call(tuner, record, *arguments, out=()):
    """Compute a primitive by the candidate that is chosen for its arguments."""
    return tuner.way_of(record, arguments, out)(*([out] if out else []), *arguments)


def known(tuner, record, *arguments):
    return tuner.known(tuner.request(record, arguments))


def timed(tuner, record, *arguments, **options):
    return tuner.timed(tuner.request(record, arguments), **options)


def need_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which is off where there is a GPU")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPKERNELS_TUNE", "TPKERNELS_LOG", "TPKERNELS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_tuner(tmp_path: Path) -> MakeTuner:
    """An autotuner whose process has just begun, on the cache of this test."""
    need_interpreter()

    def make(
        timer: Callable[..., Times] | None = None,
        not_now: str | Callable[[torch.device], str] = "",
        clock: Callable[[], float] = perf_counter,
        folder: Path = tmp_path,
        versions: Versions = VERSIONS,
        announces: bool = False,
    ) -> Autotuner:
        why = not_now if callable(not_now) else lambda device: not_now
        cache = Cache(folder, versions)
        tuner = Autotuner(CPU, INTERPRETER, timer or FakeTimer(TRITON_WINS), cache, why, clock)
        if not announces:
            tuner._logged.add("")  # as after the first choice
        return tuner

    return make
