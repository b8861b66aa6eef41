import os

import pytest

from tpkernels.buckets.first_use import problem_with_extension


@pytest.fixture(scope="session", autouse=True)
def extension():
    """Built before ranks need it, which have less time. Where it cannot be, tests are skipped, or fail."""
    problem = problem_with_extension()
    if problem is not None and os.environ.get("TPKERNELS_REQUIRE_EXT") != "1":
        pytest.skip(problem[1])
    assert problem is None
