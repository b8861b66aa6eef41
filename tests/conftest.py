"""Fixtures for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.compiled import Compiler
    from tests.ranks import RankPool
    from tests.stand_in_gpu import StandIn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; read when torch is imported

import torch

from tests.checks import lacking, needs_of
from tests.products import SWEEP

# A shell's job in the background ignores Ctrl-C, and so would whatever tests start, to interrupt it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A worker of xdist by its environment: what tests start would take itself for one, and measure nothing.
os.environ.pop("PYTEST_XDIST_WORKER", None)

# The same examples each time, for as long as a busy machine takes; a machine with a GPU need not have it.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "busy", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("busy")

STAND_INS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # read where a kernel is decorated: for a whole process, or not at all
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if (item.get_closest_marker("sweep") is not None) != SWEEP]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if (item.get_closest_marker("sweep") is not None) == SWEEP]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a GPU each test that needs one runs on stand-ins for several, see `tests.stand_in_gpu`."""
    if metafunc.definition.get_closest_marker("gpu") and not HAS_GPU:
        metafunc.parametrize("stand_in_gpu", STAND_INS, indirect=True)


@pytest.fixture(autouse=True)  # before what a test makes on it
def stand_in_gpu(request: pytest.FixtureRequest) -> Iterator[StandIn | None]:
    with ExitStack() as entered:
        gpu = None
        if hasattr(request, "param"):
            from tests.stand_in_gpu import stand_in

            gpu = entered.enter_context(stand_in(request.param))
        if torch.cuda.is_available() and (needs := needs_of(request.node)):
            from tpkernels.kernels.target import target_of

            device = torch.device("cuda", torch.cuda.current_device())
            if why := lacking(needs, target_of(device)):
                pytest.skip(why)
        yield gpu


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported is neither garbage nor a model's wrapper: `parallelize` looks at all other objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _whatever_ran_before() -> None:
    """Tests run in any order: random numbers, and how often code was compiled, are of each test alone."""
    torch.manual_seed(20261121)
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled
        torch.compiler.reset()


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankPool]:
    from tests.ranks import IN_TURN, RankPool

    with RankPool(4, IN_TURN) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    """For `make sweep`: they take as long as four ranks do twice."""
    from tests.ranks import RankPool

    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4(rank_processes: RankPool) -> RankPool:
    return _first(4, rank_processes)


@pytest.fixture(scope="session")
def ranks2(rank_processes: RankPool) -> RankPool:
    return _first(2, rank_processes)


@pytest.fixture(scope="session")
def ranks1(rank_processes: RankPool) -> RankPool:
    return _first(1, rank_processes)


@pytest.fixture(params=["ranks1", "ranks2", "ranks4"])
def world(request: pytest.FixtureRequest) -> str:
    """Tests may parametrize it."""
    return str(request.param)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world: str) -> RankPool:
    return request.getfixturevalue(world)  # type: ignore[no-any-return]


def _first(world_size: int, processes: RankPool) -> RankPool:
    """A process costs seconds to start: fewer ranks are some of those that more have."""
    from tests.ranks import RankPool

    return RankPool(world_size, within=processes)


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Compiler]:
    """See `tests.compiled`."""
    from tests.compiled import compiling

    base = tmp_path_factory.getbasetemp()  # of a worker of xdist it lies in that of the run
    with compiling((base.parent if hasattr(pytestconfig, "workerinput") else base) / "compiled") as process:
        yield process
