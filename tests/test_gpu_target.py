"""`make gpu` as far as a machine without a GPU can follow it: its plan, and a rehearsal."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu, quick_stages
from bench.__main__ import main as bench
from bench.gpu import long_stages, plan
from bench.measured import HEADING, NOTHING
from bench.measured import PAGE as MEASURED
from bench.results import NEEDED, RATIOS
from bench.stages import (
    GRACE,
    PROCESS,
    RESULTS,
    STAGE,
    TAR,
    CannotRun,
    Command,
    Result,
    Stage,
    results_in,
    run_stages,
)
from tests.compiled import Compiler
from tests.patience import patient
from tests.programs import ran, started, until
from tpkernels.kernels.target import H100

ROOT = Path(__file__).parents[1]
QUICK = {
    "build": 40,
    "launchers": 75,
    "order": 40,
    "reserved_sms": 45,
    "products": 150,
    "overlap": 40,
    "host_time": 30,
    "registers": 30,
}
LONG = ["kernels", "tests", "sanitizer", "qualify", "bench", "gate"]
# stage of a rehearsal: what one more process does to itself after its first result, and what is said of it
FAULTS = {
    "reserved_sms": ("time.sleep(10**6)", "out of time", ""),
    "overlap": ("os.abort()", "failed", "ended by SIGABRT"),
    "host_time": ("os.kill(os.getpid(), 9)", "failed", "ended by SIGKILL"),
}


def made(*options: str) -> list[str]:
    """What `make gpu` would run."""
    make = ["make", "-C", str(ROOT), "--no-print-directory", "gpu", f"PYTHON={sys.executable}", "DRY_RUN=1"]
    ended = subprocess.run(
        [*make, *options], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The commands of `make gpu`, in their order."""
    return made()


def limits(lines: list[str]) -> dict[str, int]:
    return {found[1]: int(found[2]) for line in lines if (found := re.match(r"(\w+): at most (\d+) s", line))}


def files(lines: list[str]) -> set[str]:
    return {found[1] for line in lines if (found := re.search(r" (?:kernels|tests) (tests/\S+\.py)$", line))}


def test_quick_stages_take_nine_minutes_at_most():
    quick = made("QUICK=1")
    assert list(limits(quick).items()) == list(QUICK.items())
    assert sum(limit + 2 * GRACE for limit in QUICK.values()) <= 540
    assert quick[-1] == f"in all at most {sum(limit + 2 * GRACE for limit in QUICK.values()):.0f} s"


def test_the_long_run_begins_with_the_quick_stages(lines):
    assert list(limits(lines)) == [*QUICK, *LONG]
    assert sum(limits(lines).values()) < 30 * 60


def test_every_room_that_is_named_has_tests():
    for room in (gpu.KERNELS, *gpu.OTHERS):
        assert (ROOT / "tpkernels" / room).is_dir()
        assert list((ROOT / "tests" / room).glob("test_*.py")), room


def test_nothing_is_timed_beside_anything(tmp_path):
    stages = [*gpu.quick_stages(tmp_path, "", 8), *long_stages(tmp_path, 8)]
    timed = ("reserved_sms", "products", "overlap", "host_time", "registers", "qualify", "bench", "gate")
    assert {stage.name: stage.jobs for stage in stages if stage.name in timed} == dict.fromkeys(timed, 1)


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
    """One that has torch, Triton, numpy and pytest; the stages, too."""
    program = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "hypothesis ruff mypy build yaml pytest_benchmark matplotlib xdist".split():
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Bare())
import bench.gpu, bench.quick_stages, bench.measured
from bench.cases import host_cost, linear, overlap, scaled
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:hypothesispytest", *sys.argv[1:]]))
"""
    collected = ran("-c", program, *sorted(files(lines)), cwd=ROOT)
    assert collected.returncode == 0, collected.stdout[-2000:]


def test_sanitizer_is_left_out_in_words_where_there_is_none(monkeypatch):
    (sanitizer,) = (stage for stage in long_stages(Path("out/gpu"), 8) if stage.name == "sanitizer")
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: None)
    with pytest.raises(CannotRun, match="compute-sanitizer is not on the PATH"):
        sanitizer.commands()
    monkeypatch.setattr(gpu.shutil, "which", lambda tool: f"/cuda/{tool}")
    for command in sanitizer.commands().values():
        assert (command[0], command[-2]) == ("/cuda/compute-sanitizer", gpu.SANITIZED_CASES)
    collect = ("-m", "pytest", "-q", "--collect-only", "-k", gpu.SANITIZED_CASES)
    chosen = ran(*collect, *gpu.SANITIZED, cwd=ROOT).stdout
    assert all(f"{file}::" in chosen for file in gpu.SANITIZED), chosen


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """The stage, of results in a folder; runs of other days are in the folder `before`."""
    info = {key: 1.0 for key in (*NEEDED, *RATIOS)} | {"device": "NVIDIA Imaginary"}
    case = {"fullname": "a", "extra_info": info}
    (tmp_path / "bench.json").write_text(json.dumps({"benchmarks": [case]}))
    monkeypatch.setattr(gpu, "BEFORE", tmp_path / "before")
    (stage,) = (stage for stage in long_stages(tmp_path, 8) if stage.name == "gate")
    return stage


def test_gate_compares_with_a_run_on_another_day(gate, tmp_path):
    before = tmp_path / "before" / "nvidia-imaginary.json"
    before.parent.mkdir()
    before.touch()
    assert gate.commands()["gate"][-3:] == ["--times", str(before), str(tmp_path / "bench.json")]


def test_gate_says_where_the_first_run_belongs(gate):
    with pytest.raises(CannotRun, match=r"bench.json belongs into .*before/nvidia-imaginary.json"):
        gate.commands()


def test_gate_waits_for_results(tmp_path):
    lines = plan(long_stages(tmp_path, 8))
    assert sum("left out now: there are no results yet" in line for line in lines) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run everything")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "a CUDA device is needed"),
        (["--stages", "tests,tunes", "--dry-run"], f"of {', '.join([*QUICK, *LONG])}; got 'tunes'"),
    ],
    ids=["no_gpu", "misspelt"],
)
def test_without_a_gpu_it_says_so_and_names_bad_stages(options, said, capsys):
    with pytest.raises(SystemExit) as ended:
        sys.exit(bench(["gpu", *options]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_results_go_where_a_variable_says():
    (line,) = (line for line in made("QUICK=1", "OUT=/there") if line.endswith(" overlap"))
    assert "--out /there overlap" in line


def test_every_test_of_virtual_ranks_is_in_order():
    collected = ran("-m", "pytest", "-q", "--collect-only", gpu.ORDER_TESTS, cwd=ROOT).stdout.split()
    names = [name for name in collected if name.startswith(f"{gpu.ORDER_TESTS}::")]
    for words in gpu.ORDER.values():
        chosen = [name for name in names if any(word in name for word in words.split(" or "))]
        assert chosen, words
        names = [name for name in names if name not in chosen]
    assert all("processes" in name or "share_a_gpu" in name for name in names), names


# -- a rehearsal -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """The folder of a rehearsal in which a process hangs, one crashes, and one is killed."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there: `make gpu` is no rehearsal")
    base = tmp_path_factory.getbasetemp()  # of a worker of xdist it lies in that of the run
    shared = base.parent if hasattr(pytestconfig, "workerinput") else base
    out, done = shared / "rehearsal", shared / "rehearsed"
    try:
        out.mkdir()
    except FileExistsError:  # of another worker
        until(done.exists, 600)
        return out
    stages = gpu.quick_stages(out, "make gpu QUICK=1 REHEARSE=1", 2, rehearse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("PATH", f"{fake_ncu(tmp_path_factory.mktemp('bin'))}:{os.environ['PATH']}")
        try:
            run_stages([with_its_fault(stage, out) for stage in stages], out)
        finally:
            done.touch()
    return out


def fake_ncu(folder: Path) -> Path:
    """A tool that runs the program that it is given, and says of two kernels what ncu would."""
    rows = [
        f'"{number}","{name}","GPU Speed Of Light Throughput","Duration","us","{1.5 + number}"'
        for number, name in enumerate(("_linear_fwd_kernel", "_wgrad_kernel"))
    ]
    said = "\n".join(['"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"', *rows])
    tool = folder / "ncu"
    look = f'while [ "$1" != {sys.executable} ]; do shift; done; "$@" || exit 9'
    tool.write_text(f"#!/bin/sh\n{look}\necho ==PROF== Connected\ncat <<'END'\n{said}\nEND\n")
    tool.chmod(0o755)
    return folder


def with_its_fault(stage: Stage, out: Path) -> Stage:
    if stage.name not in FAULTS:
        return replace(stage, limit=patient(stage.limit))
    write = f"Result({stage.name!r}, 'before it', 'passed', 0.0).write(Path({str(out)!r}))"
    imports = "import os, time; from pathlib import Path; from bench.stages import Result"
    program = f"{imports}; {write}; {FAULTS[stage.name][0]}"

    def commands() -> Mapping[str, Command]:
        return {"faulty": [sys.executable, "-c", program], **stage.commands()}

    return replace(stage, limit=patient(20), commands=commands)


def of_stage(out: Path, stage: str) -> dict[str, Result]:
    return {one.name: one for one in results_in(out / RESULTS) if one.stage == stage}


def test_a_rehearsal_goes_through_all_stages_in_order(rehearsal):
    lines = results_in(rehearsal / RESULTS)
    assert list(dict.fromkeys(one.stage for one in lines)) == list(QUICK)
    assert [one.stage for one in lines if one.name == STAGE] == list(QUICK)
    starts = [index for index, one in enumerate(lines) if index == 0 or lines[index - 1].name == STAGE]
    assert len(starts) == len(QUICK), "a stage's own line is its last"


def test_a_rehearsal_has_one_line_a_result(rehearsal):
    lines = results_in(rehearsal / RESULTS)
    assert len({(one.stage, one.name) for one in lines}) == len(lines)
    assert {one.status for one in lines} <= {"passed", "failed", "out of time", "skipped"}
    assert all(one.seconds >= 0 for one in lines)


@pytest.mark.parametrize("stage", FAULTS)
def test_a_fault_is_named_and_loses_no_other_result(rehearsal, stage):
    found = of_stage(rehearsal, stage)
    _, status, said = FAULTS[stage]
    assert (found[f"{PROCESS}faulty"].status, found["before it"].status) == (status, "passed")
    assert found[f"{PROCESS}faulty"].error.startswith(said)
    assert found[f"{PROCESS}{stage}"].status == "passed"
    assert (found[STAGE].status, found[STAGE].error) == (status, f"faulty: {status}")


@pytest.mark.parametrize("stage", [stage for stage in QUICK if stage not in FAULTS])
def test_other_stages_of_a_rehearsal_pass(rehearsal, stage):
    for one in of_stage(rehearsal, stage).values():
        assert one.status in ("passed", "skipped"), one


def test_a_rehearsal_says_that_it_is_none_of_a_gpu(rehearsal):
    machine = results_in(rehearsal / RESULTS)[0]
    assert (machine.stage, machine.name) == ("build", "machine")
    assert machine.values["stands_in"]
    assert machine.values["gpu"].startswith("none: ")
    assert machine.values["command"] == "make gpu QUICK=1 REHEARSE=1"
    assert {"date", "revision", "torch", "triton", "python", "target"} <= machine.values.keys()


VALUES = {  # stage, part of a name: what is said of it
    ("build", "segment_sum/descriptor"): {"kernels"},
    ("launchers", "linear_fwd/"): {"of_bound"},
    ("reserved_sms", "cublas"): {"alone", "beside", "reserved", "obeys"},
    ("products", "tp8 linear"): {
        "ms",
        "ms_eager",
        "tflops",
        "flops",
        "chosen",
        "dropped",
        "dtype",
        "company",
    },
    ("products", "tp1 glu"): {"ms", "tflops"},
    ("products", "mlp"): {"ms", "tflops", "flops"},
    ("products", "fp8"): {"ms", "tflops", "flops"},
    ("overlap", "transfer 1"): {"milliseconds", "efficiency", "control_efficiency", "shape", "link"},
    ("host_time", "forward ours captured"): {"us", "calls"},
    ("registers", "segment_sum/descriptor"): {"registers", "spills", "shared", "blocks", "kernel"},
    ("registers", "ncu _wgrad_kernel"): {"Duration us"},
}


@pytest.mark.parametrize(("stage", "name"), VALUES, ids=lambda word: word.strip("/"))
def test_a_line_has_its_values(rehearsal, stage, name):
    found = [one.values for key, one in of_stage(rehearsal, stage).items() if name in key]
    assert found
    for values in found:
        assert VALUES[stage, name] <= values.keys()


def test_bf16_comes_before_fp8(rehearsal):
    dtypes = [
        one.values["dtype"] for one in of_stage(rehearsal, "products").values() if one.values.get("dtype")
    ]
    assert dtypes == sorted(dtypes)
    assert {*dtypes} == {"bfloat16", "fp8"}


def test_few_files_and_a_tar_of_all(rehearsal):
    names = sorted(path.name for path in rehearsal.iterdir())
    assert len(names) <= 8
    assert all(path.is_file() for path in rehearsal.iterdir())
    with tarfile.open(rehearsal / TAR) as tar:
        assert tar.getnames() == [name for name in names if name != TAR]
        inside = tar.extractfile(RESULTS)
        assert inside is not None
        assert inside.read() == (rehearsal / RESULTS).read_bytes()


def test_what_is_there_when_it_is_told_to_end_is_in_the_tar(tmp_path):
    options = ("--rehearse", "--stages", "launchers,overlap", "--out", tmp_path)
    with started("-m", "bench", "gpu", *options, cwd=ROOT) as program:
        until(lambda: (tmp_path / RESULTS).exists())
        program.send_signal(signal.SIGTERM)
        assert program.wait(patient(60)) == 128 + signal.SIGTERM
    lines = results_in(tmp_path / RESULTS)
    assert (lines[-1].name, lines[-1].status, lines[-1].error) == (STAGE, "failed", "interrupted")
    assert {one.stage for one in lines} == {"launchers"}
    with tarfile.open(tmp_path / TAR) as tar:
        inside = tar.extractfile(RESULTS)
        assert inside is not None
        assert inside.read() == (tmp_path / RESULTS).read_bytes()


# -- what is compiled ahead, and what is written afterwards ------------------------------------------------


def keys_of(name: str, cache: str) -> tuple[list[str], list[str]]:
    """Triton's keys of what is compiled ahead for a case, and of what its launches ask for."""
    from unittest.mock import patch

    from triton.runtime import driver

    from tests.kernels.test_launch_plans import _driver
    from tpkernels.gate.numerics import Frames
    from tpkernels.kernels import launch
    from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS

    os.environ["TRITON_CACHE_DIR"] = cache
    ahead = [one.hash for one in quick_stages.compiled(H100, "cuda", name)]
    asked: list[str] = []

    def start(kernel, grid):
        def run(*arguments, **constants):
            kernel.device_caches.clear()  # Triton looks into its cache on disk again
            asked.append(kernel[grid](*arguments, **constants, **LAUNCH_OPTIONS).hash)

        return run

    driver.set_active(_driver)
    with launch.emulation(H100, start), patch.object(launch, "allocate", Frames().empty):
        quick_stages.compiled_calls(H100, "cuda")[name]()
    return ahead, asked


@pytest.mark.parametrize("name", ["dgrad_act/pointer/fp16/silu", "linear_fwd/descriptor/bf16/wait"])
def test_launches_find_what_was_compiled_ahead(compiler: Compiler, name):
    ahead, asked = compiler.run(keys_of, name, str(compiler.cache / "triton"))
    assert asked
    assert ahead == asked


@pytest.fixture
def measured(rehearsal, tmp_path) -> Path:
    """The lines of a rehearsal as if of a GPU, and a page."""
    first, *others = results_in(rehearsal / RESULTS)
    replace(first, values={**first.values, "stands_in": False, "gpu": "NVIDIA H200"}).write(tmp_path)
    for one in others:
        one.write(tmp_path)
    (tmp_path / "page.md").write_text(MEASURED.read_text())
    return tmp_path


def test_a_page_gets_a_section_of_a_run(measured):
    page, before = measured / "page.md", MEASURED.read_text()
    assert bench(["measured", str(measured / RESULTS), "--page", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(before.replace(NOTHING, "[One run on a GPU](#on-a-gpu) is below.").strip())
    assert NOTHING not in text
    section = text.partition(f"\n{HEADING}\n")[2]
    machine = results_in(measured / RESULTS)[0].values
    for word in ("NVIDIA H200", machine["date"][:10], machine["command"], machine["triton"], "*model*"):
        assert word in section
    cublas = of_stage(measured, "reserved_sms")["cublas"].values
    assert f"| cublas | {cublas['alone']:.3g} ms |" in section
    assert "ended by SIGKILL" in section
    assert bench(["measured", str(measured / RESULTS), "--page", str(page)]) == 0
    assert page.read_text() == text, "a second time changes nothing"


@pytest.mark.parametrize("fault", ["rehearsal", "no_machine", "absent", "no_result"])
def test_a_page_stays_as_it_is_without_a_run_on_a_gpu(measured, rehearsal, fault, capsys):
    page, results = measured / "page.md", measured / "other.jsonl"
    lines = (rehearsal / RESULTS).read_text().splitlines(keepends=True)
    if fault != "absent":
        results.write_text({"rehearsal": "".join(lines), "no_machine": lines[-1], "no_result": "{}"}[fault])
    before = page.read_text()
    with pytest.raises(SystemExit) as ended:
        sys.exit(bench(["measured", str(results), "--page", str(page)]))
    said = {"rehearsal": "nothing was measured", "no_machine": "of the machine"} | {"absent": "No such file"}
    assert said.get(fault, "line 1") in capsys.readouterr().err
    assert (ended.value.code, page.read_text()) == (2, before)


@pytest.mark.skipif(HEADING in MEASURED.read_text().splitlines(), reason="a run on a GPU is in the page")
def test_nothing_is_claimed_of_a_gpu_yet():
    assert NOTHING in MEASURED.read_text()
