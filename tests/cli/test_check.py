"""`python -m tpkernels check` as others run it: green on what is sound, red on faults planted in a copy."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import triton

import tpkernels
from tests.checks import without_progress
from tests.patience import patient
from tpkernels.gate.expectations import minor_version, read
from tpkernels.registered.names import TABLE

SOUND = "sum_rows/pointer/bf16/512x128"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to plant faults in."""
    package = Path(tpkernels.__file__).parent
    shutil.copytree(package, tmp_path / "tpkernels", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


@pytest.fixture
def check(compiler, copy):
    """The check of the package in `copy`."""

    def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
        ran = compiler.command(copy, "check", *arguments)
        assert "Traceback" not in ran.stderr, ran.stderr
        return ran

    return checked


def plant(folder: Path, file: str, sound: str, faulty: str) -> None:
    path = folder / "tpkernels" / file
    source = path.read_text()
    assert sound in source, f"{file} has changed: plant the fault anew"
    path.write_text(source.replace(sound, faulty))


def test_check_is_green_then_quick_and_after_a_change_red(check, copy):
    name = "dgrad/pointer/fp32"  # two tiles to compile in three forms, and three cases to compute
    arguments = f"--arch sm_80,sm_120,sm_80 --only {name} --json report.json".split()
    reports = []
    for _ in range(2):  # an architecture that is named twice is compiled once
        ran = check(*arguments)
        assert ran.returncode == 0, ran.stdout
        assert "all well: 12 compilations and 3 computations" in ran.stdout
        assert re.search(rf"^ok +{name}/64x64x16-w8-s3-p1/gelu_tanh\+db +\d+ ", ran.stdout, re.MULTILINE)
        assert without_progress(ran.stderr) == ""
        reports.append(json.loads((copy / "report.json").read_text()))
    first, second = reports
    assert first == second  # down to the seconds that compiling took: nothing was compiled again
    assert first["failures"] == []
    assert first["versions"]["triton"] == triton.__version__
    assert {row["architecture"] for row in first["compiled"]} == {"sm_80", "sm_120"}
    assert all(row["facts"]["registers"] > 0 for row in first["compiled"])

    plant(copy, "kernels/blocks.py", "r.to(tl.int64)[:, None] * stride_row", "r[:, None] * stride_row")
    plant(copy, "kernels/blocks.py", "(c < cols)[None, :], other=0.0)", "(c < cols + 8)[None, :], other=0.0)")
    plant(copy, "kernels/blocks.py", "mask = (r < rows)[:, None] &", "mask = (r < rows + 1)[:, None] &")
    ran = check("--arch", "sm_80", "--only", name)
    assert ran.returncode == 1
    assert f"entry {name}/64x64x16-w8-s3-p1/gelu_tanh+db on sm_80: 32-bit product in an address" in ran.stdout
    told = rf"numerics of {name}: written outside an output \(blocks\.py:\d+\); result 0 holds NaN"
    assert re.search(told, ran.stdout)


def test_update_records_what_exceeded_the_budget_and_drops_what_is_gone(check, copy):
    table = copy / "tpkernels" / "kernels" / "budgets.json"
    text = table.read_text()
    row = re.compile(rf'("{re.escape(SOUND)}": \{{ [^}}]*"registers": )\d+')
    gone = '"gone/pointer": { "instructions": "", "loop": "", "rest": "", "registers": 8, "shared": 0 },'
    table.write_text(row.sub(r"\g<1>8", text).replace('"sm_90": {', f'"sm_90": {{ {gone}'))
    arguments = ("--arch", "sm_90", "--skip", "numerics", "--only", SOUND)
    ran = check(*arguments)
    assert ran.returncode == 1
    told = rf"^entry {re.escape(SOUND)} on sm_90: 8 to \d+ registers, still \d+ blocks an SM$"
    assert re.search(told, ran.stdout, re.MULTILINE)
    assert "note: 1 budgets of what is no longer in entries.py: --update drops them" in ran.stdout
    assert check(*arguments, "--update").returncode == 0
    ran = check(*arguments)
    assert ran.returncode == 0
    assert "note:" not in ran.stdout
    minor = minor_version(triton.__version__)
    updated, shipped = read(table)[minor], read(TABLE)[minor]
    assert updated.provenance["triton"] == triton.__version__
    assert updated.rows["sm_90"] == shipped.rows["sm_90"]  # the others are as they were


def test_check_turns_red_on_an_interpreter_that_talks_and_dies(check, copy):
    program = "gate/user_kernels/numerics.py"
    plant(copy, program, "torch.manual_seed(SEED)", "print('[1]'), exit('no more')")
    ran = check("--skip", "compile", "--only", "dgrad/pointer/fp32")
    assert ran.returncode == 1
    assert "numerics of dgrad/pointer/fp32: ended its process with exit code 1: no more" in ran.stdout


def test_report_that_cannot_be_finished_takes_neither_findings_nor_notes_along(check, copy):
    (copy / "tpkernels" / "kernels" / "budgets.json").unlink()
    ran = check("--arch", "sm_80", "--skip", "numerics", "--only", SOUND, "--json", "/dev/full")
    assert ran.returncode == 2
    assert "1 failures in 1 compilations" in ran.stdout
    minor = minor_version(triton.__version__)
    assert f"\nno budgets for Triton {minor} on sm_80 (some for Triton none)" in ran.stdout
    assert "error: cannot write the report: " in ran.stderr


def test_interrupted_check_ends_at_once_and_in_a_word(copy):
    """Ctrl-C reaches every process in the foreground."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = "-m tpkernels check --skip numerics --arch sm_90 --only wgrad/descriptor"
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=copy,
        env=environment | {"PYTHONPATH": str(copy), "TPKERNELS_CACHE_DIR": str(copy / "cache")},
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + patient(60)
    while not list(copy.glob("cache/facts/*.json")):  # until compiling is under way
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=patient(20))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert without_progress(said) == "interrupted\n"
    assert process.returncode == 130
