"""What a run owes its user when something breaks: real ranks, real signals, real checkpoints."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

from tests.cli.living_ranks import ALICE, TINY, train_on
from tests.cli.test_train import await_end_of, children_of

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@contextmanager
def started(*arguments, launcher=()):
    """A run of two tensor-parallel ranks."""
    program = [*launcher, "-m", "tpkernels", "train"] if launcher else ["-m", "tpkernels", "train"]
    command = [sys.executable, *program, "--data", str(ALICE), *TINY, "--tp", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        try:
            yield run
        finally:
            run.terminate()


def wait_for(path, run):
    deadline = time.monotonic() + 180  # of a busy machine
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < deadline, f"{path} did not appear"
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)


def losses_of(lines):
    return [json.loads(line)["loss"] for line in lines.read_text().splitlines()]


def our_messages(errors):
    return re.findall(r"^python -m tpkernels train: rank .*", errors, re.MULTILINE)


def test_torchrun_restarts_and_goes_on_as_if_nothing_had_been(tmp_path, ranks2):
    folder, lines, undisturbed = (
        tmp_path / "saved",
        tmp_path / "metrics.jsonl",
        tmp_path / "undisturbed.jsonl",
    )
    options = f"--steps 160 --save {folder} --save-every 40 --resume --json {lines}".split()
    with started(*options, launcher=[*TORCHRUN, "--max-restarts", "1"]) as run:
        wait_for(folder / "latest", run)
        os.kill(children_of(run.pid)[-1], signal.SIGKILL)
        printed, errors = run.communicate(timeout=180)
    assert run.returncode == 0, errors
    assert len(our_messages(errors)) == 1, errors  # of the rank that lost the other
    assert re.search(r"rows of rank \d did not arrive|one died|came too late", errors)
    assert re.search(rf"^from {folder}/step-000000[48]0, after [48]0 steps$", printed, re.MULTILINE)
    again = train_on(ranks2, "--tp", "2", "--steps", "160", "--json", str(undisturbed))
    assert again.returncode == 0, again.stderr
    assert len(losses_of(lines)) == 160
    assert losses_of(lines) == losses_of(undisturbed)  # to the digit


def test_sigterm_reaches_ranks_through_torchrun(tmp_path):
    folder, lines = tmp_path / "saved", tmp_path / "metrics.jsonl"
    options = f"--steps 100000 --save {folder} --json {lines}".split()
    with started(*options, launcher=TORCHRUN) as run:
        wait_for(lines, run)
        run.terminate()
        printed, errors = run.communicate(timeout=180)
    done = len(losses_of(lines))
    assert f"saved {folder}/step-{done:08}" in printed
    assert our_messages(errors) == []
    assert (folder / "latest").read_text() == f"step-{done:08}"


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    with started(*f"--steps 100000 --json {lines}".split(), launcher=TORCHRUN) as run:
        wait_for(lines, run)
        ranks = children_of(run.pid)
        run.kill()
        run.wait(timeout=30)
        await_end_of(ranks)


def test_a_full_disk_is_told_and_costs_no_earlier_checkpoint(tmp_path, ranks2):
    folder = tmp_path / "saved"
    with started(*f"--steps 100000 --save {folder} --save-every 30".split()) as run:
        wait_for(folder / "latest", run)
        full = children_of(run.pid)[1]
        resource.prlimit(full, resource.RLIMIT_FSIZE, (1000, 1000))  # of one rank alone
        _, errors = run.communicate(timeout=180)
    assert run.returncode == 1
    assert len(our_messages(errors)) == 1, errors
    assert "the checkpoint could not be written to" in errors
    assert "File too large (rank 1)" in errors
    assert "Traceback" not in errors
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
    lines = tmp_path / "metrics.jsonl"
    with started(*f"--steps 100000 --timeout 8 --json {lines}".split()) as run:
        wait_for(lines, run)
        hanging = children_of(run.pid)[1]
        os.kill(hanging, signal.SIGSTOP)
        message = run.stderr.readline()  # the other one's
        os.kill(hanging, signal.SIGCONT)  # else the launcher waits a while before it kills
        _, errors = run.communicate(timeout=180)
    assert run.returncode == 1
    assert "rank 0: RuntimeError" in message
    assert "Timed out waiting 8000ms" in message
    assert "the other ranks were ended" in errors
    assert "Traceback" not in errors
