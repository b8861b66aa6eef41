"""`make gpu` as far as a machine without a GPU can follow it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shapes import all_shapes, sizes_of

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The commands of `make gpu`, in their order."""
    ran = run("make", "-n", "gpu", f"PYTHON={sys.executable}")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def place(lines: list[str], part: str) -> int:
    (number,) = (number for number, line in enumerate(lines) if part in line)
    return number


def files(lines: list[str]) -> set[str]:
    return {found[1] for line in lines if (found := re.search(r"pytest -q (tests/\S+\.py) ", line))}


def test_nothing_is_timed_before_the_tests_are_done(lines):
    tests = [number for number, line in enumerate(lines) if "pytest -q tests/" in line]
    assert tests[-1] < place(lines, "tpkernels tune") < place(lines, "bench/test_linear.py")


def test_every_test_that_needs_a_gpu_is_run(lines):
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked
    assert marked <= files(lines)
    for room in ("kernels", "ops", "tuning"):
        held = {f"tests/{room}/{path.name}" for path in (ROOT / "tests" / room).glob("test_*.py")}
        assert held <= files(lines)


def test_files_can_be_imported_on_a_bare_machine(lines):
    """One that has pytest and no more of what only development needs."""
    program = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hypothesis", "ruff", "mypy", "build"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Bare())
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:hypothesispytest", *sys.argv[1:]]))
"""
    ran = run(sys.executable, "-c", program, *sorted(files(lines)))
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_every_step_leaves_json(lines):
    for line in lines:
        if " -m pytest " in line or " tune " in line:
            assert re.search(r"(--outcomes|--json|--benchmark-json) out/gpu/\S+\.json", line), line


def test_very_same_tuning_can_be_listed_without_a_gpu(lines, tmp_path):
    command = lines[place(lines, "tpkernels tune")].replace("out/gpu", str(tmp_path))
    ran = run("bash", "-c", f"{command} --dry-run")
    assert ran.returncode == 0, ran.stderr
    listed = json.loads((tmp_path / "tune.json").read_text())["candidates"]
    assert len(listed) > 100
    assert all(names[0] == "torch" and len(names) > 1 for names in listed.values())


def test_what_is_tuned_is_what_is_timed(lines):
    benchmarks = lines[place(lines, "bench/test_linear.py")]
    assert "-k '4096 and (tp1 or tp8)'" in benchmarks
    timed = [s for s in all_shapes() if "4096" in str(s) and ("tp1" in str(s) or "tp8" in str(s))]
    printed = run(sys.executable, "-m", "bench.shapes", "4096", "1,8").stdout.strip()
    assert printed == sizes_of(timed)
    assert "bench.shapes 4096 1,8" in lines[place(lines, "tpkernels tune")]


def test_outcomes_are_written_also_of_failures(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_good(): pass\ndef test_bad(): assert 1 == 2, 'planted'\n")
    report = tmp_path / "out" / "two.json"
    plugin = ("-p", "tests.outcomes", "--outcomes", str(report))
    ran = run(sys.executable, "-m", "pytest", "-q", str(tmp_path / "test_two.py"), *plugin)
    assert ran.returncode == 1, ran.stderr
    outcome = json.loads(report.read_text())
    assert (outcome["exit_code"], outcome["counts"]["passed"], outcome["counts"]["failed"]) == (1, 1, 1)
    ((name, why),) = outcome["failures"].items()
    assert name.endswith("test_bad")
    assert "planted" in why
