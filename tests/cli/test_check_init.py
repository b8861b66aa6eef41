"""`check --init` in a stranger's folder: what it writes, the workflow as a script, planted faults."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import write_files

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guard-your-kernels.md"
INIT = ["check", "--init", ".", "--run", "launches.py"]
CHECK = ["check", "--config", "gate.toml", "--only", "softmax_kernel"]
FAULTS = {  # file, edit, finding
    "mask": (
        "kernels.py",
        (', mask=at < columns, other=float("-inf"))', ")"),
        r"kernels\.py:7: numerics of softmax_kernel/2: read outside x_ptr \(kernels\.py:10\).*",
    ),
    "half": (
        "kernels.py",
        ("tl.sum(e, 0)", "tl.sum(e.to(tl.float16), 0)"),
        r"kernels\.py:7: entry softmax_kernel on sm_90: sum in fp16 \(kernels\.py:12\): rounded .*",
    ),
    "warps": (
        "launches.py",
        ("BLOCK=triton", "num_warps=1, BLOCK=triton"),
        "note: 'launches.py' launches softmax_kernel with num_warps 1, was 4",
    ),
    "results": (
        "gate-results.json",
        (' "softmax_kernel": {', ' "other": {'),
        r"kernels\.py:7: numerics of softmax_kernel: no results are recorded of it: --update records today's",
    ),
    "shapes": (
        "launches.py",
        ("(7, 1000)", "(7, 992)"),
        r".*gate\.toml: kernels\.softmax_kernel/2: 'launches\.py' launches it no more with such types .*",
    ),
}


@pytest.fixture(scope="module")
def guarded(compiler, tmp_path_factory) -> Path:
    """The page's folder, in which `--init` ran."""
    folder = tmp_path_factory.mktemp("stranger")
    write_files(PAGE, folder)
    ran = compiler.command(folder, *INIT, PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (folder / "said.txt").write_text(ran.stdout)
    return folder


def test_it_says_which_kernels_are_guarded_and_by_what(guarded):
    said = (guarded / "said.txt").read_text()
    rules = "no_spills, vector_loads, vector_stores, wide_offsets, wide_sums"
    assert f"kernels.py:7: softmax_kernel: guarded: {rules}\n" in said
    assert (
        "kernels.py:16: matmul_kernel: guarded: no_spills, vector_loads, vector_stores, async_loads, " in said
    )
    results = json.loads((guarded / "gate-results.json").read_text())["results"]
    names = [f"softmax_kernel{number}" for number in ("", "/2")]
    cases = {case for name in names for case in (name, f"{name}/fp32 for bf16")}
    assert {case for case in results if case.startswith("softmax")} == cases
    assert all([*results[case]] == ["y_ptr"] for case in cases)


def test_workflow_runs_here_as_a_script(guarded, compiler):
    """All of its commands but pip's, whose packages are those of this environment: of the pinned versions."""
    (job,) = yaml.safe_load((guarded / ".github/workflows/kernels.yml").read_text())["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    pinned = dict(re.findall(r"(torch|triton|numpy)==(\S+)", " ".join(runs)))
    script = "".join(f"{run}\n" for run in runs if not run.startswith("python -m pip install "))
    here = {"PYTHONPATH": str(ROOT), "TPKERNELS_CACHE_DIR": str(compiler.cache)}
    environment = {**os.environ, **here, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=guarded,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first = ran.stdout.splitlines()[0]
    assert {name: f"{name} {number}" in first for name, number in pinned.items()} == dict.fromkeys(
        pinned, True
    )
    assert {name for name in pinned} == {"torch", "triton", "numpy"}
    assert json.loads((guarded / "check.json").read_text())["failures"] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_told_with_its_line(fault, guarded, compiler, tmp_path):
    file, (before, after), finding = FAULTS[fault]
    shutil.copytree(guarded, tmp_path / "team")
    text = (tmp_path / "team" / file).read_text()
    assert text.count(before) >= 1, "plant it anew"
    (tmp_path / "team" / file).write_text(text.replace(before, after))
    ran = compiler.command(tmp_path / "team", *CHECK, PYTHONPATH=str(ROOT))
    assert ran.returncode in (1, 2), ran.stdout + ran.stderr
    assert re.search(f"^{finding}$", ran.stdout + ran.stderr, re.MULTILINE), ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (INIT[:3], ". has 2 kernels:\n  softmax_kernel (kernels.py:7), by softmax()"),
        (["check", "--init", "nowhere", "--run", "launches.py"], "'nowhere' is no folder, and no package"),
        ([*INIT, "--config", "kernels.py"], "kernels.py exists: --init writes a new one only"),
    ],
)
def test_what_is_missing_is_asked_for_on_one_screen(words, told, compiler, tmp_path):
    write_files(PAGE, tmp_path)
    ran = compiler.command(tmp_path, *words, PYTHONPATH=str(ROOT))
    assert ran.returncode == 2, ran.stdout
    assert told in ran.stderr
    assert not (tmp_path / "gate.toml").exists()
    assert len(shlex.split(ran.stderr, comments=False)) < 200
