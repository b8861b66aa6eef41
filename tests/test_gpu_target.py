"""`make gpu` as far as a machine without a GPU can follow it: the plan of its stages."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.__main__ import main as bench
from bench.gpu import plan, stages_of
from bench.results import NEEDED, RATIOS, slug
from bench.shapes import GPU_SET, all_shapes, sizes_of
from bench.stages import GRACE, CannotRun, Stage
from tests.patience import patient
from tests.programs import ran
from tpkernels.cli import main

ROOT = Path(__file__).parents[1]
STAGES = ["build", "kernels", "tests", "sanitizer", "qualify", "tune", "bench", "gate", "report"]
UNDISTURBED = ("qualify", "tune", "bench", "gate")


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The commands of `make gpu`, in their order."""
    make = ["make", "-C", str(ROOT), "--no-print-directory", "gpu", f"PYTHON={sys.executable}", "DRY_RUN=1"]
    made = subprocess.run(make, capture_output=True, text=True, timeout=patient(60), check=False)
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()


def place(lines: list[str], part: str) -> int:
    (number,) = (number for number, line in enumerate(lines) if part in line)
    return number


def files(lines: list[str]) -> set[str]:
    return {found[1] for line in lines if (found := re.search(r"--junitxml=\S+ (tests/\S+\.py)$", line))}


def test_stages_take_less_than_half_an_hour_in_calls_of_ten_minutes(lines):
    limits = {
        found[1]: int(found[2]) for line in lines if (found := re.match(r"(\w+): at most (\d+) s", line))
    }
    assert list(limits) == STAGES
    assert sum(limits.values()) < 30 * 60
    assert f"in all at most {sum(limits.values())} s" in lines
    shown = [found for line in lines if (found := re.search(r"STAGES=(\S+), at most (\d+) s", line))]
    calls = [found[1].split(",") for found in shown]
    assert [stage for call in calls for stage in call] == STAGES
    assert [int(found[2]) for found in shown] == [sum(limits[stage] for stage in call) for call in calls]
    assert all(int(found[2]) + GRACE < 600 for found in shown)
    assert calls[0] == ["build", "kernels"]


def test_stages_are_packed_in_their_order():
    stages = [Stage(name, limit, list) for name, limit in zip("abcde", (300, 290, 1, 589, 590), strict=True)]
    assert [[stage.name for stage in call] for call in gpu.calls(stages)] == [["a", "b"], ["c", "d"], ["e"]]


def test_every_room_that_is_named_has_tests():
    for room in (gpu.KERNELS, *gpu.OTHERS):
        assert (ROOT / "tpkernels" / room).is_dir()
        assert list((ROOT / "tests" / room).glob("test_*.py")), room


def test_nothing_is_timed_before_the_tests_are_done_nor_beside_anything(lines):
    tests = [number for number, line in enumerate(lines) if "--junitxml" in line]
    timed = ("tpkernels qualify", "tpkernels tune", "bench run --gpu-set", "bench.cases.overlap")
    order = [place(lines, part) for part in timed]
    assert [tests[-1], *order] == sorted([tests[-1], *order])
    timed = [stage for stage in stages_of(Path("out/gpu"), 8) if stage.name in UNDISTURBED]
    assert {stage.jobs for stage in timed} == {1}


def test_every_test_that_needs_a_gpu_is_run(lines):
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert marked
    assert marked <= files(lines)
    for room in (gpu.KERNELS, *gpu.OTHERS):
        held = {f"tests/{room}/{path.name}" for path in (ROOT / "tests" / room).glob("test_*.py")}
        assert held <= files(lines)


def test_files_can_be_imported_on_a_bare_machine(lines):
    """One that has pytest and no more of what only development needs."""
    program = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hypothesis", "ruff", "mypy", "build", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Bare())
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:hypothesispytest", *sys.argv[1:]]))
"""
    collected = ran("-c", program, *sorted(files(lines)), cwd=ROOT)
    assert collected.returncode == 0, collected.stdout[-2000:]


def test_every_step_leaves_a_report(lines):
    for line in lines:
        if " -m pytest " in line or " tune " in line or " qualify " in line or " bench run " in line:
            assert (
                re.search(r"(--json|-o) out/gpu/\S+\.json|--junitxml=out/gpu/\S+\.xml", line)
                or "sanitizer" in line
            ), line


def test_very_same_tuning_can_be_listed_without_a_gpu(lines, tmp_path):
    command = lines[place(lines, "tpkernels tune")].replace("out/gpu/tune", str(tmp_path))
    _, *words = shlex.split(command)
    assert words[:2] == ["-m", "tpkernels"]
    assert main([*words[2:], "--dry-run"]) == 0
    listed = json.loads((tmp_path / "tune.json").read_text())["candidates"]
    assert len(listed) > 100
    assert all(names[0] == "torch" and len(names) > 1 for names in listed.values())


def test_what_is_tuned_is_what_is_timed(lines):
    assert {(shape.tokens, shape.tensor) for shape in GPU_SET} == {(4096, 1), (4096, 8)}
    assert {shape.model.name for shape in GPU_SET} == {shape.model.name for shape in all_shapes()}
    assert f"--shapes {sizes_of(GPU_SET)} " in lines[place(lines, "tpkernels tune")]
    assert place(lines, "bench run --gpu-set")


def test_sanitizer_is_left_out_in_words_where_there_is_none(monkeypatch):
    (sanitizer,) = (stage for stage in stages_of(Path("out/gpu"), 8) if stage.name == "sanitizer")
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: None)
    with pytest.raises(CannotRun, match="compute-sanitizer is not on the PATH"):
        sanitizer.commands()
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: f"/cuda/{tool}")
    for command in sanitizer.commands():
        assert (command[0], command[-2]) == ("/cuda/compute-sanitizer", gpu.SANITIZED_CASES)
    collect = ("-m", "pytest", "-q", "--collect-only", "-k", gpu.SANITIZED_CASES)
    chosen = ran(*collect, *gpu.SANITIZED, cwd=ROOT).stdout
    assert all(f"{file}::" in chosen for file in gpu.SANITIZED), chosen


@pytest.mark.parametrize("known", [True, False])
def test_gate_compares_with_a_baseline_or_proposes_the_first(tmp_path, monkeypatch, known):
    device = "NVIDIA Imaginary"
    (tmp_path / "bench").mkdir()
    info = {key: 1.0 for key in (*NEEDED, *RATIOS)} | {"device": device}
    case = {"fullname": "a", "extra_info": info}
    (tmp_path / "bench" / "bench.json").write_text(json.dumps({"benchmarks": [case]}))
    monkeypatch.setattr(gpu, "path_for", lambda device: ROOT if known else tmp_path / "absent.json")
    (gate,) = (stage for stage in stages_of(tmp_path, 8) if stage.name == "gate")
    ((*_, last),) = commands = gate.commands()
    assert last == str(tmp_path / "bench" / "bench.json")
    assert ("--update" in commands[0], f"{slug(device)}.json" in str(commands)) == (not known, not known)


def test_gate_and_report_wait_for_results(tmp_path):
    lines = plan(stages_of(tmp_path, 8))
    assert sum("left out now: there are no results yet" in line for line in lines) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run everything")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a CUDA device is needed"),
        (["--stages", "tests,tunes", "--dry-run"], f"of {', '.join(STAGES)}; got 'tunes'"),
    ],
    ids=["no_gpu", "misspelt"],
)
def test_without_a_gpu_it_says_so_and_names_bad_stages(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        sys.exit(bench(["gpu", *options]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
