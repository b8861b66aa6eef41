import os

import pytest

from tests.buckets.ways import WAYS, Ranks
from tests.ranks import RankPool
from tpkernels.buckets.build import problem_with_extension


@pytest.fixture(scope="session", autouse=True)
def extension():
    """Built before ranks need it, which have less time. Where it cannot be, tests are skipped, or fail."""
    problem = problem_with_extension()
    if problem is not None and os.environ.get("TPKERNELS_REQUIRE_EXT") != "1":
        pytest.skip(problem[1])
    assert problem is None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs in memory that ranks share, or as it says: `both_ways`, or `pytest.mark.way("c10d")`."""
    if "way" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("way")
        metafunc.parametrize("way", marker.args if marker else WAYS[:1], scope="session")


@pytest.fixture
def ranks2(ranks2: RankPool, way: str) -> Ranks:
    return Ranks(ranks2, way)


@pytest.fixture
def ranks4(ranks4: RankPool, way: str) -> Ranks:
    return Ranks(ranks4, way)
