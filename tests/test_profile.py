"""Where a profile says that time went."""

import subprocess
import sys
import time

from tests.profile import COLLECTION, OTHERWISE, Stopwatch, page_of, seconds_of


def test_stopwatch_counts_a_cause_inside_another_for_the_inner_one():
    watch = Stopwatch()
    watch.collected()
    inner = watch.timed(lambda: time.sleep(0.2), "inner")
    watch.timed(lambda: (time.sleep(0.05), inner()), "outer")()
    took = watch.read()
    assert set(took["clock"]) == {COLLECTION, OTHERWISE, "outer", "inner"}
    assert took["clock"]["inner"] >= 0.2
    assert took["clock"]["outer"] >= 0.05
    assert watch.read()["clock"].get("inner", 0) == 0  # read once


def test_stopwatch_counts_what_children_computed():
    watch = Stopwatch()
    start = watch.counted(subprocess.run, "processes")
    start([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    took = watch.read()
    assert took["started"] == {"processes": 1}
    assert took["processor"][""] >= 0.3


def test_page_adds_up_tests_by_folder_and_file():
    test = {"clock": {OTHERWISE: 2.0, COLLECTION: 9.0}, "started": {"ranks": 3}, "processor": {"": 4.0}}
    page = page_of(
        [("tests/ops/test_a.py::test_1", test), ("tests/ops/test_a.py::test_2[x]", test)], 0.3, 0.5
    )
    for row in (
        "took the machine 0.30 s before the tests, 0.50 s after",
        f"| {COLLECTION} | 18 |",
        "| ranks | 6 |",
        "| tests/ops | 2 | 4 | 8 |",
    ):
        assert row in page
    assert "| tests/ops/test_a.py | 2 | 4 | 8 |" in page


def test_a_file_without_a_row_takes_as_much_as_others_of_its_folder():
    page = "| tests/ops | 9 | 10 | 8 |\n| tests/ops/test_a.py | 2 | 4 | 8 |\n"
    files = [f"tests/ops/test_{name}.py" for name in "abc"]
    assert [seconds_of(page, [*files, "tests/gate/test_d.py"])[file] for file in files] == [4, 3, 3]
