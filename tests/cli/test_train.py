"""`python -m tpkernels train`, as a user types it: real ranks, real text."""

import json
from dataclasses import fields, replace

import pytest
import torch

from tests.checks import without_progress
from tests.cli.living_ranks import TORCHRUN, train_on, training
from tests.conftest import HAS_GPU
from tpkernels.cli import main
from tpkernels.cli import train as train_command
from tpkernels.models.config import SMALL
from tpkernels.training.config import TrainConfig


def test_trains_proves_itself_and_writes(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    page = tmp_path / "page" / "index.html"
    options = f"--tp 2 --dp 2 --sequence-parallel --steps 4 --prove 2 --sample 5 --json {lines}".split()
    with training(*options, "--page", page) as run:
        code = run.wait()
    assert (code, without_progress(run.stderr)) == (0, "")
    assert "over 2 tensor-parallel x 2 data-parallel ranks on cpu; 4 steps of 4 x 16 tokens" in run.stdout
    assert "largest difference" in run.stdout
    assert "\nAlice " in run.stdout
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    assert reports[-1]["loss"] < reports[0]["loss"]
    assert {"loss", "norm", "rate", "seconds", "tokens"} < set(reports[0])
    closing = run.stdout.rpartition("\n\n")[2]
    assert f"loss {reports[0]['loss']:.3f} -> {reports[-1]['loss']:.3f} in" in closing
    assert "losses of 2 steps agree with an unsharded run's within" in closing
    assert f"page      {page}\n" in closing
    assert str(page.with_name("timeline.png")) in closing or "no pictures: expected matplotlib" in closing
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") in (1, 3)
    assert "rank 3 computes" in html or html.count("<svg") == 1  # without matplotlib


def test_runs_under_torchrun_and_from_a_file_of_options(tmp_path):
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"tp": 2, "steps": 50, "peak-rate": 1e-3}))
    with training("--config", config, "--steps", "2", launcher=TORCHRUN) as run:
        assert run.wait() == 0, run.stderr
    assert "over 2 tensor-parallel x 1 data-parallel ranks" in run.stdout
    assert "2 steps" in run.stdout  # what is typed goes before what is in the file


def test_a_mistake_ends_all_ranks_with_one_message():
    with training("--batch", "3", "--dp", "2") as run:
        assert run.wait() == 2
    assert run.stderr.count("batch: expected a multiple of the 2 data-parallel ranks, got 3") == 1
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3", "--dp", "2"], "batch: expected a multiple of the 2 data-parallel ranks, got 3"),
        (["--data", "absent.txt"], "absent.txt is not a file"),
        (["--tp", "2", "--batch", "1", "--prove", "1"], "prove: expected a batch that 2 data-parallel ranks"),
        (["--dp", "2", "--batch", "2", "--accumulate", "2"], "accumulate: expected a divisor of the 1"),
        (["--sample", "3", "--size", "vocab_size=300"], "sample: expected a model of a text's bytes"),
        (["--tokens", "15", "--tp", "2", "--sequence-parallel"], "ranks divide, got 15"),
    ],
)
def test_a_mistake_is_one_message_of_all_ranks(arguments, message, ranks1, ranks2):
    run = train_on(ranks2 if {"--tp", "--dp"} & {*arguments} else ranks1, *arguments)
    assert run.returncode == 2
    assert run.stderr.count(message) == run.stderr.count("python -m tpkernels train: rank ") == 1


def test_each_field_of_a_run_is_an_option_with_its_default_and_help():
    parser = train_command._parser()
    usual = TrainConfig(model=SMALL, data="x", dtype=torch.bfloat16 if HAS_GPU else torch.float32)
    assert train_command._config(parser.parse_args(["--data", "x"])) == usual
    told = " ".join(parser.format_help().split())
    for option in fields(TrainConfig):
        assert option.metadata.get("help", "") in told, option.name
    changed = "--batch 2 --peak-rate 0.5 --no-overlap --sequence-parallel --recompute full --dtype float64"
    assert train_command._config(parser.parse_args(["--data", "x", *changed.split()])) == replace(
        usual,
        batch=2,
        peak_rate=0.5,
        overlap=False,
        sequence_parallel=True,
        recompute="full",
        dtype=torch.float64,
    )


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


def test_saves_on_the_way_and_starts_where_there_is_nothing(tmp_path, ranks1):
    folder = tmp_path / "saved"
    run = train_on(ranks1, *f"--steps 5 --save {folder} --save-every 2 --resume".split())
    assert run.returncode == 0, run.stderr
    assert f"no checkpoint in {folder}: from the start" in run.stdout
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{n:08}" for n in (2, 4, 5)]


def test_speed_memory_and_trace(tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "traces"
    run = train_on(ranks2, *f"--tp 2 --steps 5 --peak-tflops 2 --profile {folder} --json {lines}".split())
    assert run.returncode == 0, run.stderr
    assert " on each of 2 ranks: MFU 0.0 % of 2 TFLOP/s" in run.stdout
    assert "peak resident set of the process" in run.stdout
    assert f"profile of step 4: {folder}/step-00000004-rank-*.json" in run.stdout
    assert [path.name for path in sorted(folder.iterdir())] == [
        "step-00000004-rank-0.json",
        "step-00000004-rank-1.json",
    ]
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    for report in reports:
        assert report["mfu"] == pytest.approx(report["tflops_per_rank"] / 2)
        # 2 x (256 x 16 of the head, 2 x 16 x 16 + 2 x 16 x 8 of attention, 3 x 16 x 64 of the MLP, scores)
        flops = 6 * (256 * 16 + 2 * 256 + 2 * 128 + 3 * 16 * 64 + 2 * 16 * 16)
        speed = flops * report["tokens"] / report["seconds"] / 2
        assert report["tflops_per_rank"] == pytest.approx(speed / 1e12)
    assert ["memory" in report for report in reports] == [False] * 4 + [True]
    assert {"rank", "weights", "gradients", "optimizer", "peak", "peak_is"} == set(reports[-1]["memory"])


def test_profile_goes_before_the_time_line_of_a_page(tmp_path, ranks1):
    """A step has one profiler; here both would be of the last one."""
    page, folder = tmp_path / "index.html", tmp_path / "traces"
    run = train_on(ranks1, *f"--steps 2 --profile {folder} --page {page}".split())
    assert run.returncode == 0, run.stderr
    assert [path.name for path in folder.iterdir()] == ["step-00000002-rank-0.json"]
    html = page.read_text(encoding="utf-8")
    assert "<h2>Loss</h2>" in html
    assert "One step" not in html
