"""`python -m tpkernels train`, as a user types it: real ranks, real text."""

import json
import os
import re
import shutil
from dataclasses import fields, replace

import pytest
import torch

from tests.checkpoints.test_damaged_checkpoint import flip
from tests.checks import without_progress
from tests.cli.living_ranks import train_on
from tests.conftest import HAS_GPU
from tpkernels.cli import OneLineParser, main
from tpkernels.cli import train as train_command
from tpkernels.models.config import SMALL
from tpkernels.ops.quantize import Recipe
from tpkernels.training.config import TrainConfig


def test_trains_proves_itself_and_writes(tmp_path, ranks4):
    lines = tmp_path / "metrics.jsonl"
    page = tmp_path / "page" / "index.html"
    options = f"--tp 2 --dp 2 --sequence-parallel --steps 4 --prove 2 --sample 5 --json {lines} --page {page}"
    run = train_on(ranks4, *options.split())
    assert (run.returncode, without_progress(run.stderr)) == (0, "")
    assert "over 2 tensor-parallel x 2 data-parallel ranks on cpu; 4 steps of 4 x 16 tokens" in run.stdout
    assert "largest difference" in run.stdout
    assert "\nAlice " in run.stdout
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert {"loss", "norm", "rate", "seconds", "tokens"} < set(reports[0])
    for report in reports:  # in a log there is no changing line
        assert f"\nstep {report['step']}/4: loss {report['loss']:.3f}, " in run.stdout
    assert f"loss {reports[0]['loss']:.3f} -> {reports[-1]['loss']:.3f} in" in run.stdout
    assert "losses of 2 steps agree with an unsharded run's within" in run.stdout
    assert f"page      {page}\n" in run.stdout
    assert f"{page.with_name('loss.png')}\n" in run.stdout or "no pictures: expected matplotlib" in run.stdout
    assert page.read_text(encoding="utf-8").count("<svg") in (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3", "--dp", "2"], "batch: expected a multiple of the 2 data-parallel ranks, got 3"),
        (["--data", "absent.txt"], "absent.txt is not a file"),
        (["--tp", "2", "--batch", "1", "--prove", "1"], "prove: expected a batch that 2 data-parallel ranks"),
        (["--dp", "2", "--batch", "2", "--accumulate", "2"], "accumulate: expected a divisor of the 1"),
        (["--sample", "3", "--size", "vocab_size=300"], "sample: expected a model of a text's bytes"),
        (["--tokens", "15", "--tp", "2", "--sequence-parallel"], "ranks divide, got 15"),
        (["--tp", "2", "--size", "vocab_size=9999999999999"], "GiB of memory for weights"),
    ],
)
def test_a_mistake_is_one_message_of_all_ranks(arguments, message, ranks1, ranks2):
    run = train_on(ranks2 if {"--tp", "--dp"} & {*arguments} else ranks1, *arguments)
    assert run.returncode == 2
    assert run.stderr.count(message) == run.stderr.count("python -m tpkernels train: rank ") == 1


def parser_for(words):
    parser = OneLineParser()
    train_command.add_options(parser, words)
    return parser


def test_each_field_of_a_run_is_an_option_with_help():
    parser = parser_for([])
    usual = TrainConfig(model=SMALL, data="x", dtype=torch.bfloat16 if HAS_GPU else torch.float32)
    assert train_command._config(parser.parse_args(["--data", "x"])) == usual
    told = " ".join(parser.format_help().split())
    for option in fields(TrainConfig):
        assert option.metadata.get("help", "") in told, option.name
    changed = "--batch 2 --peak-rate 0.5 --no-overlap --sequence-parallel --recompute full --dtype float64"
    expected = {"batch": 2, "peak_rate": 0.5, "overlap": False, "sequence_parallel": True}
    expected |= {"recompute": "full", "dtype": torch.float64}
    found = train_command._config(parser.parse_args(["--data", "x", *changed.split()]))
    assert found == replace(usual, **expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{"stepz": 3}', "--config: stepz: there is no such option"),
        ('{"step": 3}', "--config: step: there is no such option"),  # a typed one may be cut short
        ('{"overlap": false}', "--config: overlap: there is no such option"),  # but no_overlap
        ('{"config": "other.json"}', "--config: config: there is no such option"),
        ('{"sequence_parallel": "false"}', 'sequence_parallel: expected true or false, got "false"'),
        ('{"recompute": false}', "--config: recompute: expected a value, got false"),
        ('{"model": null}', "--config: model: expected a value, got null"),
        ('{"steps": [1, 2]}', "--config: steps: expected a value, got [1, 2]"),
        ('{"size": {"num_layers": 2}}', '--config: size: expected a value, got {"num_layers": 2}'),
        ('{"prompt": "-x", "steps": "-x"}', "argument --steps: invalid int value: '-x'"),
        ('{"steps": 1.5}', "argument --steps: invalid int value: '1.5'"),
        ('{"dtype": "float8"}', "argument --dtype: invalid choice: 'float8'"),
        ('{"fp8": null}', "--config: fp8: expected a value, got null"),
        ("[1]", "--config: expected an object of options, got list"),
        ('{"steps":' + "[" * 100_000, "--config: it is nested too deeply"),
    ],
    ids=lambda text: text[:50],
)
def test_options_in_a_file_are_looked_at_like_typed_ones(options, message, tmp_path, capsys):
    config = tmp_path / "run.json"
    config.write_text(options)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", "x", "--config", str(config)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_speed_memory_and_trace(tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "traces"
    run = train_on(ranks2, *f"--tp 2 --steps 5 --peak-tflops 2 --profile {folder} --json {lines}".split())
    assert run.returncode == 0, run.stderr
    assert " on each of 2 ranks: MFU 0.0 % of 2 TFLOP/s" in run.stdout
    assert "peak memory of a rank: " in run.stdout
    assert f"profile of step 4: {folder}/step-00000004-rank-*.json" in run.stdout
    written = sorted(path.name for path in folder.iterdir())
    assert written == [f"step-00000004-rank-{rank}.json" for rank in range(2)]
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    for report in reports:
        assert report["mfu"] == pytest.approx(report["tflops_per_rank"] / 2)
        # 2 x (256 x 16 of the head, 2 x 16 x 16 + 2 x 16 x 8 of attention, 3 x 16 x 64 of the MLP, scores)
        flops = 6 * (256 * 16 + 2 * 256 + 2 * 128 + 3 * 16 * 64 + 2 * 16 * 16)
        speed = flops * report["tokens"] / report["seconds"] / 2
        assert report["tflops_per_rank"] == pytest.approx(speed / 1e12)
    assert ["peak_memory" in report for report in reports] == [False] * 4 + [True]


STEP = "step-00000002"


@pytest.fixture(scope="module")
def saved(ranks2, tmp_path_factory):
    """A folder with a run of two steps, and its lines."""
    folder = tmp_path_factory.mktemp("saved")
    options = f"--tp 2 --steps 2 --save {folder / 'run'} --save-every 1 --json {folder / 'metrics'} --resume"
    run = train_on(ranks2, *options.split())
    assert run.returncode == 0, run.stderr
    assert f"no checkpoint in {folder / 'run'}: from the start" in run.stdout
    assert sorted(path.name for path in (folder / "run").glob("step-*")) == ["step-00000001", STEP]
    return folder


@pytest.fixture
def resumed(saved, ranks2, tmp_path):
    """A way to go on with a copy of it, once something was done to that."""
    shutil.copytree(saved, tmp_path / "copy")

    def go_on(damage=lambda folder: None, *arguments):
        damage(tmp_path / "copy")
        folder = tmp_path / "copy"
        options = f"--tp 2 --steps 3 --save {folder / 'run'} --json {folder / 'metrics'} --resume".split()
        return train_on(ranks2, *options, *arguments)

    return go_on


def flip_a_bit(folder):
    flip("__1_0.distcp")(folder / "run" / STEP)


def lines_are_a_folder(folder):
    (folder / "metrics").unlink()
    (folder / "metrics").mkdir()


def latest_is_no_name(folder):
    (folder / "run" / "latest").write_text("\x1b[2J")


def latest_is_a_fifo(folder):
    (folder / "run" / "latest").unlink()
    os.mkfifo(folder / "run" / "latest")


def link_instead_of_the_next(folder):
    (folder / "theirs").mkdir()
    (folder / "theirs" / "kept").touch()
    (folder / "run" / ".step-00000003.unfinished").symlink_to(folder / "theirs")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "__1_0.distcp is damaged: expected SHA-256"),
        (latest_is_no_name, r"latest names '\x1b[2J', which is not there"),
        (latest_is_a_fifo, "expected a regular file at"),
        (link_instead_of_the_next, ".step-00000003.unfinished; remove it"),
        (lines_are_a_folder, "Is a directory"),
    ],
)
def test_what_cannot_be_used_is_one_message_of_all_ranks(damage, message, resumed, tmp_path):
    run = resumed(damage)
    assert run.returncode == 2, run.stdout + run.stderr
    assert len(re.findall("^python -m tpkernels train: rank ", run.stderr, re.MULTILINE)) == 1
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert (tmp_path / "copy" / "run" / STEP).is_dir()
    if damage is link_instead_of_the_next:
        assert (tmp_path / "copy" / "theirs" / "kept").exists()


def parsed(*arguments):
    words = ["--data", "x", *arguments]
    return train_command._config(parser_for(words).parse_args(words))


def test_its_words_are_those_of_recipes(tmp_path):
    assert parsed().recipe is None
    assert parsed("--fp8").recipe == Recipe.rowwise()
    assert parsed("--fp8", "--steps", "3").recipe == Recipe.rowwise()
    assert parsed("--fp8", "blockwise+head").recipe == Recipe.blockwise(head=True)
    path = tmp_path / "run.json"
    for value, recipe in (("blockwise", Recipe.blockwise()), (True, Recipe.rowwise()), (False, None)):
        path.write_text(json.dumps({"fp8": value, "steps": 4}))
        assert parsed("--config", str(path)).recipe == recipe
    path.write_text('{"fp8": "blockwise"}')
    assert parsed("--config", str(path), "--fp8=").recipe is None  # what is typed goes first


FOUR = ["--tp-invariant", "4", "--accumulate", "2", "--steps", "4"]  # the model has 4 heads


def test_lines_are_the_same_on_one_rank_and_on_two(tmp_path, ranks1, ranks2):
    lines = []
    for ranks, options in ((ranks1, []), (ranks2, ["--tp", "2", "--prove", "2"])):
        path = tmp_path / f"{ranks.world_size}.jsonl"
        run = train_on(ranks, *FOUR, *options, "--json", str(path))
        assert run.returncode == 0, run.stderr
        assert "; the same bits at every tensor-parallel size that divides 4\n" in run.stdout
        reports = map(json.loads, path.read_text().splitlines())
        lines.append([(report["loss"], report["norm"]) for report in reports])
    assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp-invariant 3", "tp_invariant: expected 0 (off) or a power of two up to 1024, got 3"),
        ("--tp-invariant 1", "--tp: expected a tensor-parallel size that divides the 1 segments"),
        ("--tp-invariant 8", "num_heads: expected a multiple of the 8 segments of TP-invariance, got 4"),
        (
            "--tp-invariant 4 --tokens 18 --sequence-parallel",
            "tokens: expected a number that the 4 segments of TP-invariance divide, got 18",
        ),
    ],
)
def test_what_segments_do_not_divide_is_refused(options, message, ranks2):
    run = train_on(ranks2, "--tp", "2", *options.split())
    assert run.returncode == 2
    assert run.stdout == ""
    assert message in run.stderr
    assert run.stderr.count("\n") <= 2  # what the launcher would find first is told by each rank


def test_more_than_two_ranks_share_memory_and_are_not_compared_with_an_unsharded_run(ranks4):
    assert train_on(ranks4, "--tp-invariant", "4", "--dp", "4", "--steps", "2").returncode == 0
    run = train_on(ranks4, *FOUR, "--tp", "4", "--prove", "1")
    assert run.returncode == 2
    assert "prove: expected at most 2 ranks with TP-invariance, got 4" in run.stderr
