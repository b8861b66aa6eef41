"""Whatever lies where a run expects its files: one line and exit code 2, or a run that goes on."""

import json
import os
import re
import shutil

import pytest

from tests.cli.living_ranks import train_on
from tests.interop.test_damaged_checkpoint import cut, flip

STEP = "step-00000002"


@pytest.fixture(scope="module")
def saved(ranks2, tmp_path_factory):
    """A folder with a run of two steps, and its lines."""
    folder = tmp_path_factory.mktemp("saved")
    options = f"--tp 2 --steps 2 --save {folder / 'run'} --json {folder / 'metrics'}".split()
    run = train_on(ranks2, *options)
    assert run.returncode == 0, run.stderr
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


def in_step(damage, *arguments):
    return lambda folder: damage(*arguments)(folder / "run" / STEP)


def latest_is(text):
    return lambda folder: (folder / "run" / "latest").write_text(text)


def latest_is_a_fifo(folder):
    (folder / "run" / "latest").unlink()
    os.mkfifo(folder / "run" / "latest")


def link_instead_of_the_next(folder):
    (folder / "theirs").mkdir()
    (folder / "theirs" / "kept").touch()
    (folder / "run" / ".step-00000003.unfinished").symlink_to(folder / "theirs")


def lines_are_a_folder(folder):
    (folder / "metrics").unlink()
    (folder / "metrics").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (in_step(flip, "__1_0.distcp"), "__1_0.distcp is damaged: expected SHA-256"),
        (in_step(flip, ".metadata"), ".metadata is damaged: expected SHA-256"),
        (in_step(cut, "__0_0.distcp"), "__0_0.distcp is damaged: expected SHA-256"),
        (in_step(cut, "SHA256SUMS"), "SHA256SUMS is damaged in line"),
        (latest_is("../elsewhere"), "latest names '../elsewhere', which is not there"),
        (latest_is("\x1b[2J"), r"latest names '\x1b[2J', which is not there"),
        (latest_is_a_fifo, "expected a regular file at"),
        (link_instead_of_the_next, ".step-00000003.unfinished; remove it"),
        (lines_are_a_folder, "Is a directory"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
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


def test_half_a_line_is_named_and_the_run_goes_on(resumed, tmp_path):
    metrics = tmp_path / "copy" / "metrics"

    def kill_while_it_writes(_):
        metrics.write_text(metrics.read_text() + '{"step": 3, "lo')

    run = resumed(kill_while_it_writes)
    assert run.returncode == 0, run.stderr
    assert f"{metrics}: line 3 holds no step; left out" in run.stdout
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2, 3]
    assert (tmp_path / "copy" / "metrics.damaged").read_text().endswith('{"step": 3, "lo')


def without_sums(folder):
    (folder / "run" / STEP / "SHA256SUMS").unlink()


def test_a_checkpoint_from_before_there_were_sums_goes_on_with_a_warning(resumed):
    run = resumed(without_sums)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("whether its files are damaged is not known") == 1


def test_ranks_of_torchrun_refuse_huge_sizes_alike(ranks2):
    run = train_on(ranks2, "--tp", "2", "--size", "vocab_size=9999999999999")
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert re.search(r"need(s)? at least [\d,]+ GiB of memory for weights", run.stderr)
