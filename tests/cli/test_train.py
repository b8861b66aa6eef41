"""`python -m tpkernels train`, as a user types it: real ranks, real text."""

import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tests.cli.living_ranks import ALICE, TINY, train_on
from tests.conftest import HAS_GPU
from tpkernels.cli import main
from tpkernels.cli import train as train_command
from tpkernels.models.config import SMALL
from tpkernels.training.config import TrainConfig


def train(*arguments, launcher=(), environment=None, timeout=300):
    command = [sys.executable, *launcher, "-m", "tpkernels", "train", "--data", str(ALICE), *TINY, *arguments]
    if launcher:
        command = [sys.executable, *launcher, "-m", "tpkernels", *command[command.index("train") :]]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(environment or {})}
    )


def test_trains_proves_itself_and_writes(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    page = tmp_path / "page" / "index.html"
    options = f"--tp 2 --dp 2 --sequence-parallel --steps 4 --prove 2 --sample 5 --json {lines}".split()
    run = train(*options, "--page", str(page))
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
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
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = train(
        "--config", str(config), "--steps", "2", launcher=launcher, environment={"OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    assert "over 2 tensor-parallel x 1 data-parallel ranks" in run.stdout
    assert "2 steps" in run.stdout  # what is typed goes before what is in the file


def test_a_mistake_ends_all_ranks_with_one_message():
    run = train("--batch", "3", "--dp", "2")
    assert run.returncode == 2
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
    ("arguments", "message"),
    [
        (["--size", "depth=3"], "depth: a model has no such size"),
        (["--size", "num_heads"], "--size: expected NAME=VALUE, got 'num_heads'"),
        (["--size", "num_layers=two"], "num_layers: expected a whole number of at least 1, got 'two'"),
        (["--max-norm", "-1"], "max_norm: expected more than 0, got -1.0"),
        (["--peak-rate", "inf"], "peak_rate: expected a number of 0 or more, got inf"),
        (["--size", "bias=maybe"], "bias: expected true or false, got 'maybe'"),
        (["--size", "num_layers=true"], "num_layers: expected a whole number of at least 1, got True"),
        (["--size", "norm_eps=-1"], "norm_eps: expected a number of 0 or more, got -1"),
        (["--size", "rotary_base=0"], "rotary_base: expected a number above 0, got 0"),
        (["--size", "rotary_base=far"], "rotary_base: expected a number above 0, got 'far'"),
        (["--accumulate", "0"], "accumulate: expected at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        train_command._config(train_command._parser().parse_args(["--data", "x", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data: expected a file to learn from"),
        (["--data", "x", "--tp", "0"], "expected at least one rank each, got 0 and 1"),
        (["--data", "x", "--config", "absent.json"], "--config: "),
        (["--data", "x", "--resume"], "expected a folder, --save FOLDER"),
        (["--data", "x", "--model", "gpt5"], "model: expected one of gpt2-small"),
        (["--data", "x", "--steps", "0", "--dp", "2"], "steps: expected at least 1, got 0"),
        (["--data", "x", "--prove", "-1"], "--prove: expected 0 or more, got -1"),
        (["--data", "x", "--sample", "-1"], "--sample: expected 0 or more, got -1"),
        (["--data", "x", "--save", "y", "--save-every", "-1"], "--save-every: expected 0 or more, got -1"),
        (["--data", "x", "--page", "/"], "argument --page: cannot write to '/'"),
        (["--data", "x", "--page", f"{__file__}/page.html"], "argument --page: cannot write to"),
        (
            ["--data", "x", "--prove", "1", "--dropout", "0.1"],
            "expected a run from the start without dropout",
        ),
    ],
)
def test_bad_options_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
        ("[1]", "--config: expected an object of options, got list"),
    ],
)
def test_options_in_a_file_are_looked_at_like_typed_ones(options, message, tmp_path, capsys):
    config = tmp_path / "run.json"
    config.write_text(options)
    with pytest.raises(SystemExit):
        main(["train", "--data", "x", "--config", str(config)])
    assert message in capsys.readouterr().err


@contextmanager
def running(lines, *arguments):
    """A run of two ranks without an end, once it has made a step."""
    command = [sys.executable, "-m", "tpkernels", "train", "--data", str(ALICE), *TINY]
    command += ["--tp", "2", "--steps", "100000", "--json", str(lines), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        try:
            deadline = time.monotonic() + 180  # of a busy machine
            while not lines.is_file() or not lines.read_text():
                assert time.monotonic() < deadline, "no step was made"
                assert run.poll() is None, run.communicate()
                time.sleep(0.1)
            yield run
        finally:
            run.terminate()


def test_death_of_a_rank_ends_the_others_with_one_message(tmp_path):
    with running(tmp_path / "metrics.jsonl") as run:
        ranks = children_of(run.pid)
        assert len(ranks) == 2
        heard = {pid: listening(pid) for pid in (run.pid, *ranks)}  # a store, and two of gloo
        assert all(heard.values()), heard
        assert {address for addresses in heard.values() for address in addresses} == {"127.0.0.1"}
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = run.communicate(timeout=180)
    assert run.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL; the other ranks were ended" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def listening(pid):
    """The addresses that sockets of a process listen on."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    own = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [address_of(row[1]) for row in rows if row[3] == "0A" and row[9] in own]


def address_of(written):
    """Of 0100007F:1F90, as the kernel writes addresses: words of four bytes, each in the machine's order."""
    words = bytes.fromhex(written.partition(":")[0])
    ordered = [words[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, 16, 4)]
    return str(ipaddress.ip_address(b"".join(ordered)))


def test_sockets_of_other_machines_are_seen():
    """What the test above looks for, here with a fault."""
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert sorted(listening(os.getpid()))[:1] == ["0.0.0.0"]
        assert "127.0.0.1" in listening(os.getpid())


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    with running(tmp_path / "metrics.jsonl") as run:
        ranks = children_of(run.pid)
        run.kill()
        run.wait(timeout=30)
        await_end_of(ranks)


def await_end_of(ranks):
    deadline = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, "ranks live on without their launcher"
        time.sleep(0.1)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"  # its new parent may be slow to reap
    except FileNotFoundError:
        return False


def test_only_the_rank_that_knows_says_why(tmp_path):
    """One data rank meets a byte that the vocabulary does not have; the other only sees it go."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc" * 300 + b"z" + b"abc" * 300)
    command = f"--data {text} --dp 2 --batch 2 --size vocab_size=110 --tokens 250 --steps 200".split()
    run = train(*command)
    assert run.returncode == 1
    assert (
        run.stderr.count("expected target from 0 to 109") + run.stderr.count("expected ids from 0 to 109")
        >= 1
    )
    assert "Traceback" not in run.stderr


def test_sigterm_saves_and_resume_goes_on_with_other_ranks(tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "saved"
    with running(lines, "--save", str(folder)) as run:
        run.terminate()
        printed, errors = run.communicate(timeout=180)
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    done = len(lines.read_text().splitlines())
    assert f"saved {folder}/step-{done:08}" in printed

    # what a run that died while it wrote leaves behind is never taken
    (folder / f".step-{done + 5:08}.unfinished").mkdir()
    options = f"--dp 2 --steps {done + 2} --save {folder} --resume --json {lines}".split()
    again = train_on(ranks2, *options)
    assert again.returncode == 0, again.stderr
    assert f"from {folder}/step-{done:08}, after {done} steps" in again.stdout
    reports = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [report["step"] for report in reports] == list(range(1, done + 3))

    other_batches = train_on(ranks2, *options, "--seed", "5")
    assert other_batches.returncode == 2
    assert other_batches.stderr.count("expected seed 1234, which the run began with, got 5") == 1

    nothing_left = train_on(ranks2, *options)
    assert nothing_left.returncode == 0
    assert f"all {done + 2} steps were done before" in nothing_left.stdout


def test_saves_on_the_way_and_starts_where_there_is_nothing(tmp_path, ranks1):
    folder = tmp_path / "saved"
    run = train_on(ranks1, *f"--steps 5 --save {folder} --save-every 2 --resume".split())
    assert run.returncode == 0, run.stderr
    assert f"no checkpoint in {folder}: from the start" in run.stdout
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-{n:08}" for n in (2, 4, 5)]


def children_of(pid):
    """In the order in which they were started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in found)
