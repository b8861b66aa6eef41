"""`check --config` with kernels that are not ours: those of the page, in a fresh folder, with faults."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import triton

from tests.test_docs import write_files
from tpkernels.gate.expectations import minor_version, read
from tpkernels.gate.report import IF_MEANT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guard-your-kernels.md"

# fault -> the kernel of the page that has it, where it is planted, what the check says
PLANTED = {
    "spill": (
        "matmul",
        {"num_warps = 8": "num_warps = 4"},
        r"entry spill on sm_90: spills: \d+ loads and stores of local memory, \d+ bytes of stack",
    ),
    "stage": (
        "matmul",
        {"num_stages = 3": "num_stages = 2"},
        r"entry stage on sm_90: a pipeline of 3 is one of 2",
    ),
    "narrow": (
        "softmax",
        {
            'values = { stride = "columns" }': 'values = { stride = "columns + 1" }\n'
            'strides = { x_ptr = ["stride", 1], y_ptr = ["stride", 1] }'
        },
        "entry narrow on sm_90: no LDG.128 or LDGSTS.128 or UTMALDG: nothing loads 16 bytes at a time",
    ),
    "formula": (
        "softmax",
        {"(e / tl.sum(e, 0))": "(e / (tl.sum(e, 0) + 1))"},
        r"numerics of formula/rows=7,columns=1000: y_ptr is off by \d\.\d+ times the bound",
    ),
    "read": (
        "softmax",
        {
            '.load(x_ptr + row * stride + at, mask=at < columns, other=float("-inf"))': ".where("
            'at < columns, tl.load(x_ptr + row * stride + at), float("-inf"))'
        },
        r"numerics of read/rows=7,columns=1000: read outside x_ptr \(read\.py:10\)",
    ),
    "half": (
        "softmax",
        {".to(tl.float32)\n    e": ".to(tl.float16)\n    e"},
        r"numerics of half/rows=7,columns=1000/fp32 for bf16: y_ptr is off by \d+\.\d+ times the bound",
    ),
    "mistake": (
        "softmax",
        {"tl.max(x, 0)": "tl.max(x, 3)"},
        r"entry mistake on sm_90: does not compile: mistake\.py:11: .+",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page has in its folder."""
    write_files(PAGE, tmp_path)
    return tmp_path


@pytest.fixture
def check(compiler, folder):
    def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
        ran = compiler.command(folder, "check", *arguments, PYTHONPATH=str(ROOT))
        assert "Traceback" not in ran.stderr, ran.stderr
        return ran

    return checked


def planted(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Sound and faulty files: for each fault a table and a module of its own, copied from the page."""
    head, *tables = (folder / "truth.toml").read_text().split("[kernels.")
    kernels = (folder / "kernels.py").read_text()
    sound, faulty = {"gate.toml": head}, {"gate.toml": head}
    for fault, (kernel, changes, _) in PLANTED.items():
        table = next(table for table in tables if table.startswith(f"{kernel}]"))
        table = table.replace(f"{kernel}]", f"[kernels.{fault}]", 1).replace('"kernels:', f'"{fault}:')
        if fault != "formula":
            table = table.replace('["sm_80", "sm_90"]', '["sm_90"]')
        assert all(before in table + kernels for before in changes), f"{fault}: plant it anew"
        for files, edits in ((sound, {}), (faulty, changes)):
            for name, text in {"gate.toml": table, f"{fault}.py": kernels}.items():
                for before, after in edits.items():
                    text = text.replace(before, after)
                files[name] = files.get(name, "") + text
    return sound, faulty


@pytest.mark.sweep
def test_each_planted_fault_turns_the_check_red(check, folder):
    options = ["--config", "gate.toml", "--json", "check.json"]
    sound, faulty = planted(folder)
    for name, text in sound.items():
        (folder / name).write_text(text)
    ran = check(*options, "--update")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all well: 8 compilations and 24 computations" in ran.stdout
    rows = read(folder / "truth-budgets.json")[minor_version(triton.__version__)].keys()
    assert rows == {("sm_80", "formula"), *(("sm_90", fault) for fault in PLANTED)}

    for name, text in faulty.items():
        (folder / name).write_text(text)
    ran = check(*options)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    for fault, (_, _, finding) in PLANTED.items():
        assert re.search(rf"^{fault}\.py:\d+: {finding}$", ran.stdout, re.MULTILINE), (
            f"{fault} not in {ran.stdout}"
        )
    failures = json.loads((folder / "check.json").read_text())["failures"]
    assert {re.search(r"(?:entry|numerics of) (\w+)", failure)[1] for failure in failures} == set(PLANTED)
    wrong = [failure for failure in failures if " numerics of " in failure]
    computing_wrong = {re.search(r"numerics of (\w+)", failure)[1] for failure in wrong}
    assert computing_wrong == {"formula", "read", "half", "mistake"}, "others compute what they should"
    assert IF_MEANT not in ran.stdout, "faults are among the changes"


def test_what_is_wrong_beyond_the_file_is_one_line(check, folder):
    (folder / "oracles.py").write_text("def softmax(x_ptr):\n    return x_ptr\n\nmatmul = 3\n")
    ran = check("--config", "truth.toml", "--skip", "compile")
    assert ran.returncode == 2
    told = r"error: .*truth\.toml: kernels\.matmul: oracle: expected a function, oracles:matmul is a int"
    assert re.fullmatch(f"python -m tpkernels check: {told}\n", ran.stderr)
