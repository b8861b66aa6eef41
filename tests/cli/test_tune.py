"""`python -m tpkernels tune`, as a user types it; timing itself by a fake clock."""

import itertools
import json

import pytest
import torch

from tests.dispatch.conftest import TRITON_WINS, VERSIONS, FakeTimer, need_interpreter
from tpkernels import cli
from tpkernels.cli import main, tune
from tpkernels.dispatch import candidates
from tpkernels.dispatch.autotune import Autotuner
from tpkernels.dispatch.cache import Cache
from tpkernels.kernels.target import INTERPRETER

DRY = ["tune", "--dry-run", "--shapes", "8192x4096x4096"]


def test_dry_run_lists_candidates(capsys, tmp_path):
    report = tmp_path / "tune.json"
    assert main([*DRY, "--steps", "linear,wgrad_accumulate_", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    announced, _, rest = printed.partition("\n")
    assert announced == "3 shapes, 16 candidates: at most about 1 min (2.5 s a candidate)"
    assert rest.startswith("candidates on NVIDIA H100 80GB HBM3, not timed:\nlinear bfloat16 8192x4096x4096")
    listed = json.loads(report.read_text())
    assert listed["gpu"] == "NVIDIA H100 80GB HBM3"
    # linear with and without its activation, and the accumulation
    assert len(listed["candidates"]) == 3
    for key, names in listed["candidates"].items():
        assert names[0] == "torch"
        assert all(f"    {name}\n" in printed for name in names)
        assert ("addmm_dtype_out" in names) == key.startswith("wgrad_accumulate_")


def test_a_model_is_listed_with_what_it_will_take(capsys, tmp_path):
    report = tmp_path / "tune.json"
    command = ["tune", "--dry-run", "--shapes", "model:llama3-8b,tp:8,64x32x16", "--json", str(report)]
    assert main(command) == 0
    announced = capsys.readouterr().out.partition("\n")[0]
    listed = json.loads(report.read_text())["candidates"]
    count = sum(map(len, listed.values()))
    assert announced.startswith(f"{len(listed)} shapes, {count} candidates: at most about ")
    assert "dglu bfloat16 8192x4096x1792 swiglu rows,rows,rows,rows,rows" in listed
    assert "dglu bfloat16 64x32x16 swiglu rows,rows,rows,rows,rows" in listed

    assert main([*command[:-2], "--steps", "dglu"]) == 0
    assert capsys.readouterr().out.startswith("2 shapes, ")


def test_without_triton_its_candidates_are_missed_aloud(capsys, monkeypatch):
    for module in (cli, tune, candidates):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main([*DRY, "--steps", "wgrad"]) == 0
    said = capsys.readouterr()
    assert said.err == "note: triton is not installed, so its kernels are no candidates here\n"
    assert "triton/" not in said.out
    with pytest.raises(SystemExit):
        main(["tune", "--shapes", "64x64x64"])
    assert "tune needs triton, which is not installed" in capsys.readouterr().err


@pytest.fixture
def timer(monkeypatch, tmp_path) -> FakeTimer:
    """A machine with a GPU, as far as the command can tell."""
    need_interpreter()
    timer = FakeTimer(TRITON_WINS)

    def autotuner_on(device):
        return Autotuner(torch.device("cpu"), INTERPRETER, timer, Cache(tmp_path, VERSIONS), lambda _: "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "autotuner_on", autotuner_on)
    return timer


def test_tune_times_remembers_and_reports(timer, capsys, tmp_path):
    report = tmp_path / "out" / "tune.json"
    report.parent.mkdir()
    command = ["tune", "--shapes", "64x48x32", "--json", str(report)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out.count("(timed: triton/") == 9  # each step, linear twice
    assert not printed.err  # no bar where nobody watches
    written = json.loads(report.read_text())
    assert written["versions"]["gpu"] == VERSIONS.gpu
    assert len(written["choices"]) == 9

    asked = len(timer.asked)
    assert main(command) == 0
    assert len(timer.asked) == asked
    assert capsys.readouterr().out.count("(cached: triton/") == 9
    assert json.loads(report.read_text()) == written

    assert main([*command, "--again"]) == 0
    assert len(timer.asked) == 2 * asked
    assert capsys.readouterr().out.startswith("9 shapes, 31 candidates: ")


def test_tune_begins_nothing_after_its_seconds(timer, capsys, monkeypatch):
    clock = itertools.count(0, 10)  # began at 0, then at 10, 20, ...
    monkeypatch.setattr(tune, "monotonic", clock.__next__)
    assert main(["tune", "--shapes", "64x48x32", "--seconds", "25"]) == 0
    printed = capsys.readouterr().out
    assert (printed.count("(timed: triton/"), printed.count(": left, --seconds 25 are over")) == (2, 7)
