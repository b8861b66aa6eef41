"""When something breaks: launchers, ranks, signals and checkpoints are real."""

import json
import os
import re
import resource
import signal
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.checks import without_progress
from tests.cli.living_ranks import ALICE, TINY, TORCHRUN, end_of, told_by, train_on, training
from tests.patience import patient
from tests.programs import await_end_of, children_of, is_running, until
from tpkernels.cli import main
from tpkernels.training.trainer import Trainer

ENDLESS = ("--tp", "2", "--steps", "100000")
TRAIN = ["train", "--data", str(ALICE), *TINY]


def exists(path):
    return lambda: path.exists() and path.stat().st_size


def losses_of(lines):
    return [json.loads(line)["loss"] for line in lines.read_text().splitlines()]


def our_messages(errors):
    return re.findall(r"^python -m tpkernels train: rank .*", errors, re.MULTILINE)


DIES_ONCE = """
import os, signal, sys
from tpkernels.cli import main
from tpkernels.training.trainer import Trainer

step = Trainer._step

def dying(trainer):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and trainer.done == 5 and trainer.state.rank == 1:
        os.kill(os.getpid(), 9)
    return step(trainer)

Trainer._step = dying
sys.exit(main(sys.argv[1:]))
"""


def test_torchrun_restarts_from_the_checkpoint_with_losses_of_an_undisturbed_run(tmp_path, ranks2):
    folder, lines, undisturbed = (tmp_path / name for name in ("saved", "metrics", "undisturbed"))
    program, config = tmp_path / "dies_once.py", tmp_path / "run.json"
    program.write_text(DIES_ONCE)
    config.write_text(json.dumps({"tp": 2, "steps": 50, "save_every": 4, "resume": True}))
    launcher = (*TORCHRUN, "--max-restarts", "1", program)
    options = f"--config {config} --steps 8 --save {folder} --json {lines}".split()
    with training(*options, launcher=launcher) as started:
        run = end_of(started)
    assert run.returncode == 0, run.stderr
    assert len(our_messages(run.stderr)) == 1, run.stderr  # of the rank that lost the other
    assert re.search(r"rows of rank \d did not arrive|one died|came too late", run.stderr)
    assert re.search(rf"^from {folder}/step-00000004, after 4 steps$", run.stdout, re.MULTILINE)
    again = train_on(ranks2, "--tp", "2", "--steps", "8", "--json", str(undisturbed))
    assert again.returncode == 0, again.stderr
    assert len(losses_of(lines)) == 8  # what is typed goes before what is in the file
    assert losses_of(lines) == losses_of(undisturbed)  # to the digit


@pytest.mark.parametrize(
    "program", [("-m", "tpkernels"), (*TORCHRUN, "-m", "tpkernels")], ids=["own", "torchrun"]
)
def test_ranks_end_with_a_launcher_that_is_killed(program, tmp_path):
    lines = tmp_path / "metrics.jsonl"
    with training(*ENDLESS, "--json", lines, launcher=program) as run:
        until(exists(lines), 120)
        ranks = children_of(run.pid)
        run.kill()
        await_end_of(ranks)


def test_sigterm_saves_and_resume_goes_on_with_other_ranks(tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "saved"
    with training(*ENDLESS, "--json", lines, "--save", folder) as started:
        until(exists(lines), 120)
        started.terminate()
        run = end_of(started)
    assert (run.returncode, without_progress(run.stderr)) == (0, "")
    done = len(losses_of(lines))
    assert f"saved {folder}/step-{done:08}" in run.stdout
    assert (folder / "latest").read_text() == f"step-{done:08}"

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


def test_death_of_a_rank_ends_the_others_with_one_message(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    with training(*ENDLESS, "--json", lines) as started:
        until(exists(lines), 120)
        ranks = children_of(started.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)  # named first of those that the launcher finds dead at once
        run = end_of(started)
    assert run.returncode == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL; the other ranks were ended" in run.stderr
    assert "Traceback" not in run.stderr
    assert not any(map(is_running, ranks))


def test_only_the_rank_that_knows_says_why(tmp_path, ranks2):
    """One data rank meets a byte that the vocabulary does not have; the other only sees it go."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc" * 300 + b"z" + b"abc" * 300)
    options = f"--data {text} --dp 2 --batch 2 --size vocab_size=110 --tokens 250 --steps 200".split()
    run = train_on(ranks2, *options)
    assert run.returncode == 1
    assert re.search("expected (target|ids) from 0 to 109", run.stderr), run.stderr
    assert "Traceback" not in run.stderr


def main_with_a_full_disk(command):
    """On rank 1, once a checkpoint is there."""
    save = Trainer.save

    def saving(trainer, folder):
        if trainer.done > 2 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        return save(trainer, folder)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with patch.object(Trainer, "save", saving):
            return main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_and_costs_no_earlier_checkpoint(tmp_path, ranks2):
    folder = tmp_path / "saved"
    options = f"--tp 2 --steps 4 --save {folder} --save-every 2".split()
    run = told_by(ranks2, main_with_a_full_disk, [*TRAIN, *options])
    assert run.returncode == 1, run.stdout
    assert len(our_messages(run.stderr)) == 1, run.stderr
    assert "the checkpoint could not be written to" in run.stderr
    assert "File too large (rank 1)" in run.stderr
    assert not list(folder.glob(".*unfinished"))
    assert (folder / "latest").read_text() == "step-00000002"
    again = train_on(ranks2, *options, "--resume")
    assert again.returncode == 0, again.stderr
    assert f"from {folder}/step-00000002, after 2 steps" in again.stdout
    other = train_on(ranks2, *options)
    assert other.returncode == 2
    assert "holds checkpoints of another run; pass --resume" in other.stderr


def main_where_rank_1_hangs(command):
    """Until rank 0 has ended."""
    step, store = Trainer._step, dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))

    def hanging(trainer):
        if trainer.done == 2 and dist.get_rank() == 1:
            store.wait(["rank 0 has ended"], timedelta(minutes=10))
        return step(trainer)

    with patch.object(Trainer, "_step", hanging):
        code = main(command)
    if os.environ["RANK"] == "0":
        store.set("rank 0 has ended", "now")
    return code


def test_a_rank_that_hangs_is_given_up_in_time(ranks2):
    seconds = round(patient(5))
    run = told_by(ranks2, main_where_rank_1_hangs, [*TRAIN, *ENDLESS, "--timeout", str(seconds)])
    assert run.returncode == 1
    assert "rank 0: RuntimeError" in run.stderr
    # of a transfer, or of what a rank looks up in the store
    assert re.search(rf"(Timed out waiting|timeout after) {seconds}000ms", run.stderr), run.stderr
    assert "Traceback" not in run.stderr


def main_at_own_rate(command):
    return main([*command, "--peak-rate", f"0.00{1 + int(os.environ['RANK'])}"])


def test_ranks_that_were_given_other_options_are_told(ranks2):
    """As where torchrun is started on two machines with other options."""
    run = told_by(ranks2, main_at_own_rate, [*TRAIN, "--tp", "2", "--steps", "2"])
    assert run.returncode != 0, run.stdout
    assert "ranks disagree on config.peak_rate of train: rank 0 has 0.001; rank 1 has 0.002" in run.stderr
