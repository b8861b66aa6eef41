"""What a run owes its user when something breaks: launchers, ranks, signals and checkpoints are real."""

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.living_ranks import ALICE, TINY, TORCHRUN, told_by, train_on, training
from tests.patience import patient
from tests.warm_python import await_end_of, children_of
from tpkernels.cli import main

ENDLESS = ("--tp", "2", "--steps", "100000")
both_launchers = pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["its_own", "torchrun"])


def exists(path):
    return lambda: path.exists() and path.stat().st_size


def losses_of(lines):
    return [json.loads(line)["loss"] for line in lines.read_text().splitlines()]


def our_messages(errors):
    return re.findall(r"^python -m tpkernels train: rank .*", errors, re.MULTILINE)


def rank_1_dies_once():
    """In its sixth step, and not again once torchrun has restarted it."""
    if os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        from tpkernels.training.trainer import Trainer

        step, steps = Trainer._step, []

        def _step(trainer):
            steps.append(trainer)
            if len(steps) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(trainer)

        Trainer._step = _step


def test_torchrun_restarts_and_goes_on_as_if_nothing_had_been(tmp_path, ranks2):
    folder, lines, undisturbed = (tmp_path / name for name in ("saved", "metrics", "undisturbed"))
    launcher = (*TORCHRUN, "--max-restarts", "1")
    options = f"--tp 2 --steps 8 --save {folder} --save-every 4 --resume --json {lines}".split()
    with training(*options, launcher=launcher, planted=rank_1_dies_once) as run:
        code = run.wait()
    assert code == 0, run.stderr
    assert len(our_messages(run.stderr)) == 1, run.stderr  # of the rank that lost the other
    assert re.search(r"rows of rank \d did not arrive|one died|came too late", run.stderr)
    assert re.search(rf"^from {folder}/step-00000004, after 4 steps$", run.stdout, re.MULTILINE)
    again = train_on(ranks2, "--tp", "2", "--steps", "8", "--json", str(undisturbed))
    assert again.returncode == 0, again.stderr
    assert len(losses_of(lines)) == 8
    assert losses_of(lines) == losses_of(undisturbed)  # to the digit


@both_launchers
def test_ranks_end_with_a_launcher_that_is_killed(launcher, tmp_path):
    lines = tmp_path / "metrics.jsonl"
    with training(*ENDLESS, "--json", lines, launcher=launcher) as run:
        run.until(exists(lines))
        ranks = children_of(run.pid)
        run.kill()
        run.wait()
        await_end_of(ranks)


@both_launchers
def test_sigterm_saves_and_resume_goes_on_with_other_ranks(launcher, tmp_path, ranks2):
    lines, folder = tmp_path / "metrics.jsonl", tmp_path / "saved"
    with training(*ENDLESS, "--json", lines, "--save", folder, launcher=launcher) as run:
        run.until(exists(lines))
        run.terminate()
        code = run.wait()
    done = len(losses_of(lines))
    assert f"saved {folder}/step-{done:08}" in run.stdout
    assert our_messages(run.stderr) == []
    assert (folder / "latest").read_text() == f"step-{done:08}"
    if launcher:
        return
    assert code == 0, run.stderr
    assert "Traceback" not in run.stderr

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
    with training(*ENDLESS, "--json", lines) as run:
        run.until(exists(lines))
        ranks = children_of(run.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)  # named first of those that the launcher finds dead at once
        assert run.wait() == 128 + signal.SIGKILL
    assert "rank 0 was killed by SIGKILL; the other ranks were ended" in run.stderr
    assert "Traceback" not in run.stderr
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_only_the_rank_that_knows_says_why(tmp_path):
    """One data rank meets a byte that the vocabulary does not have; the other only sees it go."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"abc" * 300 + b"z" + b"abc" * 300)
    command = f"--data {text} --dp 2 --batch 2 --size vocab_size=110 --tokens 250 --steps 200".split()
    with training(*command) as run:
        assert run.wait() == 1
    assert re.search("expected (target|ids) from 0 to 109", run.stderr), run.stderr
    assert "Traceback" not in run.stderr


def test_a_full_disk_is_told_and_costs_no_earlier_checkpoint(tmp_path, ranks2):
    folder = tmp_path / "saved"
    with training(*ENDLESS, "--save", folder, "--save-every", "5") as run:
        run.until(exists(folder / "latest"))
        full = children_of(run.pid)[1]
        resource.prlimit(full, resource.RLIMIT_FSIZE, (1000, 1000))  # of one rank alone
        assert run.wait() == 1
    assert len(our_messages(run.stderr)) == 1, run.stderr
    assert "the checkpoint could not be written to" in run.stderr
    assert "File too large (rank 1)" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(folder.glob(".*unfinished"))
    assert (folder / "latest").read_text() in {path.name for path in folder.glob("step-*")}
    # what was saved before is whole, and what a run that was killed while it wrote leaves is never taken
    latest = folder / (folder / "latest").read_text()
    done = int(latest.name.removeprefix("step-"))
    half = folder / f".step-{done + 1:08}.unfinished"
    shutil.copytree(latest, half)
    next(half.glob("*.distcp")).write_bytes(b"half")
    shutil.copytree(half, folder / f"step-{done + 1:08}")  # renamed, but not yet `latest`
    again = train_on(
        ranks2,
        *f"--tp 2 --steps {done + 2} --save {folder} --save-every 1 --resume".split(),
        *f"--profile {tmp_path} --profile-step 1".split(),
    )
    assert again.returncode == 0, again.stderr
    assert f"from {latest}, after {done} steps" in again.stdout
    assert f"no profile: step 1 did not come; this run began after {done} of {done + 2}" in again.stdout
    assert (folder / "latest").read_text() == f"step-{done + 2:08}"
    assert (folder / f"step-{done + 1:08}.abandoned").is_dir()


def test_a_folder_with_another_run_is_told_before_the_first_step(tmp_path, ranks1):
    (tmp_path / "step-00000004").mkdir()
    lines = tmp_path / "metrics.jsonl"
    run = train_on(ranks1, *f"--steps 2 --save {tmp_path} --json {lines}".split())
    assert run.returncode == 2
    assert len(our_messages(run.stderr)) == 1, run.stderr
    assert "holds checkpoints of another run; pass --resume" in run.stderr
    assert not lines.exists()


def test_a_rank_that_hangs_is_given_up_in_time(tmp_path):
    lines, seconds = tmp_path / "metrics.jsonl", round(patient(3))
    with training(*ENDLESS, "--timeout", seconds, "--json", lines) as run:
        run.until(lambda: lines.exists() and lines.read_text().count("\n") > 2)  # all connections are made
        hanging = children_of(run.pid)[1]
        os.kill(hanging, signal.SIGSTOP)
        run.until(lambda: our_messages(run.stderr))  # the other one's
        os.kill(hanging, signal.SIGCONT)  # else the launcher waits a while before it kills
        assert run.wait() == 1
    assert "rank 0: RuntimeError" in run.stderr
    # of a transfer, or of what a rank looks up in the store
    assert re.search(rf"(Timed out waiting|timeout after) {seconds}000ms", run.stderr), run.stderr
    assert "the other ranks were ended" in run.stderr
    assert "Traceback" not in run.stderr


def main_at_own_rate(command):
    return main([*command, "--peak-rate", f"0.00{1 + int(os.environ['RANK'])}"])


def test_ranks_that_were_given_other_options_are_told(ranks2):
    """As where torchrun is started on two machines with other words."""
    run = told_by(
        ranks2, main_at_own_rate, ["train", "--data", str(ALICE), *TINY, "--tp", "2", "--steps", "2"]
    )
    assert run.returncode != 0, run.stdout
    assert "ranks disagree on config.peak_rate of train: rank 0 has 0.001; rank 1 has 0.002" in run.stderr
