"""`python -m tpkernels clock`: what it says of kernels."""

import json

import pytest

from tests.gate.samples import COST
from tpkernels.cli import main
from tpkernels.gate import workers
from tpkernels.gate.ahead_of_time import CompileJob
from tpkernels.gate.clock.model import PEAK, Board, KernelPrediction
from tpkernels.gate.clocking import ClockedJob, Predicted, predicted
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.workload import FromCatalog

NAME = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
MODEL = KernelPrediction(418e-6, 576.0, 0.58, 0.75, 1.43e9, 7.76, 0.03, 0.4, "main loop")


@pytest.fixture
def answer(monkeypatch):
    """What each kernel's process answers."""

    def answering(with_what):
        monkeypatch.setattr(workers, "results_of", lambda work, tasks, *_: [with_what] * len(tasks))

    answering(Predicted(NAME, COST, MODEL))
    return answering


def test_table_says_what_bounds_a_kernel_and_that_it_is_a_model(answer, capsys):
    assert main(["clock", NAME, "--shape", "8192x4096x3584"]) == 0
    said = capsys.readouterr().out
    first, _, heading, row, *_ = said.splitlines()
    assert first == (
        "8,192 x 4,096 x 3,584 tokens, out_features and in_features, by a model of an H100 SXM; nothing here "
        "was measured, see docs/clock.md"
    )
    assert "time (model)" in heading
    assert row.split() == [
        *(NAME, "1,040", "copies", "5,950", "stores", "75%", "576", "58%", "7.76", "418", "us", "+-8%"),
        *("main", "loop"),
    ]
    assert "measured" not in said.replace("nothing here was measured", "")


def test_json_has_the_cost_and_the_models_error(answer, tmp_path):
    path = tmp_path / "clock.json"
    assert main(["clock", NAME, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["shape"] == {"tokens": 8192, "out_features": 4096, "in_features": 4096}
    (kernel,) = written["kernels"]
    assert (kernel["entry"], kernel["cost"]["edge"]["cycles"]) == (NAME, 5950.0)
    assert (kernel["model"]["error"], kernel["model"]["of_peak"]) == (0.08, 0.58)
    assert "nothing here was measured" in written["note"]


def test_what_cannot_be_clocked_is_named_and_exit_code_1(answer, capsys):
    answer("UnknownInstruction: FROB at 0x40")
    assert main(["clock", NAME]) == 1
    assert capsys.readouterr().out == f"{NAME}: UnknownInstruction: FROB at 0x40\n"


def test_a_kernel_is_clocked_from_end_to_end(compiler, tmp_path):
    ran = compiler.command(tmp_path, "clock", NAME, "--shape", "4096x2048x1024", "--json", "report.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (one,) = json.loads((tmp_path / "report.json").read_text())["kernels"]
    assert one["entry"] == NAME
    assert one["model"]["waves"] == pytest.approx(32 * 8 / 132)
    assert 0 < one["model"]["seconds"] < 1e-2
    assert 0 < one["model"]["tflops"] < PEAK


def test_a_block_of_rows_is_clocked_at_the_shape_that_is_asked_for(compiler):
    """In the catalog it has 512 columns: what these take is too little for the bytes of 16,032."""
    entry = entry_specs()["softmax_statistics/pointer/bf16/2048"].entry()
    task = ClockedJob(CompileJob(entry, "sm_90"), FromCatalog(entry, (1024, 16032, 1024)))
    found = compiler.run(predicted, task)
    assert isinstance(found, Predicted), found
    assert found.model.seconds > 1024 * 16032 * 2 / Board().sheet
