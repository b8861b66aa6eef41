"""`python -m tpkernels clock`: what it says of kernels, and of ops on several ranks."""

import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from bench.streams.times import COMPUTE, HOST, NCCL, TRANSFER, Ran, TimelineTask
from tests.gate.samples import COST
from tpkernels import cli
from tpkernels.cli import clock_ops, main
from tpkernels.cli.clock_ops import Clocked, ClockRequest
from tpkernels.dispatch.registered import entry_specs
from tpkernels.gate import workers
from tpkernels.gate.clock.model import Board, KernelPrediction
from tpkernels.gate.clock.timeline import Run, WarpSpan
from tpkernels.pictures.figure import can_draw
from tpkernels.planning.step_time import OPERATORS, WAYS

NAME = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
PREDICTED = KernelPrediction(418e-6, 576.0, 0.75, 1.43e9, 0.03, 0.4, "main loop", 0.08)
SPANS = (
    WarpSpan(0, 0, "products", 100.0, 300.0, "64x256x16"),
    WarpSpan(0, 4, "products", 200.0, 400.0, "64x256x16"),
    WarpSpan(0, 0, "copies", 0.0, 250.0, "16384 bytes"),
    WarpSpan(0, 0, "waits", 0.0, 100.0, "copies"),
    WarpSpan(0, 0, "waits", 500.0, 540.0, "scoreboard: LDG"),
    WarpSpan(0, 0, "epilogue", 400.0, 800.0, ""),
    WarpSpan(0, 8, "waits", 0.0, 900.0, "mbarrier"),
)
RUN = Run(
    1000.0, 300.0, ({"copies": 100.0},) * 9, ((0.0, 1000.0),), 5000, 0, 16384, 16384, 8192, (), (), SPANS
)
CLOCKED = Clocked(NAME, COST, 64, 7.76, PREDICTED, (RUN, 1, 12))


@pytest.fixture
def answer(monkeypatch):
    """What each kernel's process answers."""

    def answering(with_what):
        monkeypatch.setattr(workers, "results_of", lambda work, requests, *_: [with_what] * len(requests))

    answering(CLOCKED)
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
        *(NAME, "1,040", "copies", "5,950", "stores", "75%", "7.76", "418", "us", "+-8%", "576", "58%"),
        *("main", "loop"),
    ]
    assert "measured" not in said.replace("nothing here was measured", "")


def test_json_has_the_cost_and_the_models_error(answer, tmp_path):
    path = tmp_path / "clock.json"
    assert main(["clock", NAME, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["shape"] == {"tokens": 8192, "out_features": 4096, "in_features": 4096}
    (kernel,) = written["kernels"]
    assert kernel["cost"]["edge"]["cycles"] == 5950.0
    assert kernel["model"]["error"] == 0.08
    assert kernel["model"]["of_peak"] == pytest.approx(576 / 989.4)
    assert "nothing here was measured" in written["note"]


def test_what_cannot_be_clocked_is_named_and_exit_code_1(answer, capsys):
    answer("UnknownInstruction: FROB at 0x40")
    assert main(["clock", NAME]) == 1
    assert capsys.readouterr().out == f"{NAME}: UnknownInstruction: FROB at 0x40\n"


def test_picture_shows_engines_and_groups_of_warps(answer, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib draws pictures")
    for name, start in (("tile.png", b"\x89PNG"), ("tile.svg", b"<svg")):
        assert main(["clock", NAME, "--picture", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    svg = (tmp_path / "tile.svg").read_text()
    for words in (
        "tensor cores, products: 300 cycles of 300",  # of both groups, counted once
        "30% of the time",
        "warps 0-3, waits: 140 cycles of 1,000",
        "warps 0-3, epilogue: 400 cycles",
        "waits 14%: copies",
        "warp 8",
        "1 tile of 12 of 64 steps on one SM, by a model",
    ):
        assert words in svg, words


@pytest.mark.parametrize("tool", ["ptxas", "cuobjdump"])
def test_a_missing_tool_is_named(tool, monkeypatch, capsys):
    import triton

    class Knobs:
        def __getattr__(self, name):
            if name == tool:
                raise RuntimeError("Cannot find it")
            return SimpleNamespace(path="somewhere")

    monkeypatch.setattr(triton.knobs, "nvidia", Knobs())
    with pytest.raises(SystemExit) as exit_:
        main(["clock", NAME])
    assert exit_.value.code == 2
    assert f"{tool}, which Triton brings along, is missing: Cannot find it" in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(cli, "can_draw", lambda: False)
    with pytest.raises(SystemExit):
        main(["clock", NAME, "--picture", "x.png"])
    assert "expected matplotlib" in capsys.readouterr().err


def test_a_kernel_is_clocked_from_end_to_end(compiler, tmp_path):
    ran = compiler.command(tmp_path, "clock", NAME, "--shape", "4096x2048x1024", "--json", "report.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (one,) = json.loads((tmp_path / "report.json").read_text())["kernels"]
    assert one["entry"] == NAME
    assert one["steps"] == 16  # 1024 by 64
    assert 0 < one["model"]["seconds"] < 1e-2
    assert 0 < one["model"]["tflops"] < clock_ops.PEAK


def test_a_block_of_rows_is_clocked_at_the_shape_that_is_asked_for(compiler):
    """In the catalog it has 512 columns: what these take is too little for the bytes of 16,032."""
    entry = entry_specs()["softmax_statistics/pointer/bf16/2048"].entry()
    found = compiler.run(clock_ops.clock_kernel, ClockRequest(entry, (1024, 16032, 1024), False))
    assert isinstance(found, Clocked), found
    assert found.predicted.seconds > 1024 * 16032 * 2 / Board().sheet


USUAL = ["clock", "column_linear", "--tokens", "2048", "--in", "4096", "--out", "14336", "--tp", "4"]


@pytest.mark.parametrize("op", OPERATORS)
def test_each_op_says_what_each_way_takes_and_what_hides_what(op, capsys):
    assert main(["clock", op, *USUAL[2:]]) == 0
    printed = capsys.readouterr().out
    assert "model: " in printed
    assert "nothing here was measured on a GPU" in printed.splitlines()[1]
    for way in WAYS:
        assert sum(line.startswith(f"{way} ") for line in printed.splitlines()) == 2, "forward and backward"
        assert f"\n{way}, backward:" in printed
    assert " behind " in printed


def test_times_are_those_of_the_file(tmp_path, capsys):
    file = tmp_path / "said.json"
    assert main([*USUAL, "--directions", "forward", "--ways", "naive", "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    assert said["model"] is True
    (naive,) = said["ways"]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("naive "))
    assert row.split()[1] == f"{1e6 * naive['seconds']:.0f}"
    assert {span["rank"] for span in naive["spans"]} == {0, 1, 2, 3}
    assert all(span["stop"] >= span["start"] for span in naive["spans"])


@pytest.mark.skipif(not can_draw(), reason="pictures need matplotlib")
@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_time_line_is_drawn(tmp_path, form, capsys):
    file = tmp_path / f"lines.{form}"
    assert main([*USUAL, "--ways", "c10d", "--picture", str(file)]) == 0
    assert (b"wgrad" in file.read_bytes()) == (form == "svg")


def test_time_lines_begin_when_a_gpu_does():
    """The host was three calls ahead: only what it does from then on is drawn."""

    def ran(queue, start, stop, kind="product"):
        return Ran(TimelineTask(("", 0), (queue, 0), stop - start, name=queue, kind=kind), start, stop)

    found = SimpleNamespace(
        way="c10d",
        direction="forward",
        ran=[
            ran(HOST, 0.0, 12.0),
            ran(COMPUTE, 10.0, 10.0001),
            ran(NCCL, 15.0, 25.0, TRANSFER),
            ran(COMPUTE, 20.0, 50.0),
        ],
    )
    tenth = clock_ops._COLUMNS // 8
    assert [line.split("|")[1].rstrip() for line in clock_ops._time_line(found)] == [
        "#" + " " * (2 * tenth - 1) + "#" * 6 * tenth,
        " " * tenth + "=" * 2 * tenth,
    ]
    drawn = {}
    with patch.object(clock_ops, "lanes", lambda heading, panels, note: drawn.update(panels)):
        clock_ops._picture(SimpleNamespace(op="linear"), SimpleNamespace(tokens=1, ranks=2), [found])
    (spans,) = drawn.values()
    assert [(span.start, span.stop) for span in spans] == [
        (10.0, 12.0),
        (10.0, 10.0001),
        (15.0, 25.0),
        (20.0, 50.0),
    ]
