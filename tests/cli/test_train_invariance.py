"""`train --tp-invariant`: the same lines at every size, and what is refused before the first step."""

import json

import pytest

from tests.checks import without_progress
from tests.cli.living_ranks import train_on
from tpkernels.interop import dcp

FOUR = ["--tp-invariant", "4", "--accumulate", "2", "--steps", "4"]  # the model has 4 heads


def lines_of(path):
    """Losses and norms of a run's lines."""
    return [(line["loss"], line["norm"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def lines(tmp_path, ranks1):
    """Of an undisturbed run on one rank."""
    run = train_on(ranks1, *FOUR, "--json", str(tmp_path / "one.jsonl"))
    assert run.returncode == 0, run.stderr
    assert "alice.txt; the same bits at every tensor-parallel size that divides 4\n" in run.stdout
    return lines_of(tmp_path / "one.jsonl")


def test_lines_are_the_same_at_every_size(lines, tmp_path, ranks2, ranks4):
    for ranks, options in ((ranks2, ["--prove", "2"]), (ranks4, ["--sequence-parallel"])):
        path = tmp_path / f"{ranks.world_size}.jsonl"
        run = train_on(ranks, *FOUR, "--tp", str(ranks.world_size), *options, "--json", str(path))
        assert run.returncode == 0, run.stderr
        assert lines_of(path) == lines


def test_a_run_goes_on_at_another_size(lines, tmp_path, ranks1, ranks2, ranks4):
    path, folder = tmp_path / "several.jsonl", tmp_path / "saved"
    saving = [*FOUR, "--json", str(path), "--save", str(folder)]
    begun = train_on(ranks4, *saving, "--tp", "4", "--save-every", "2")
    assert begun.returncode == 0, begun.stderr
    (folder / "latest").write_text("step-00000002")
    assert dcp.latest(folder).name == "step-00000002"
    gone_on = train_on(ranks2, *saving, "--tp", "2", "--resume")
    assert gone_on.returncode == 0, gone_on.stderr
    assert without_progress(gone_on.stderr) == ""
    assert lines_of(path) == lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp-invariant 3", "tp_invariant: expected 0 (off) or a power of two up to 1024, got 3"),
        ("--tp-invariant 1", "--tp: expected a tensor-parallel size that divides the 1 segments"),
        ("--tp-invariant 8", "num_heads: expected a multiple of the 8 segments of TP-invariance, got 4"),
        (
            "--tp-invariant 4 --size ffn_hidden_size=30",
            "output_size (30) is not divisible by the 4 segments of TP-invariance",
        ),
        (
            "--tp-invariant 4 --tokens 18 --sequence-parallel",
            "tokens: expected a number that the 4 segments of TP-invariance divide, got 18",
        ),
        ("--tp-invariant 4 --dropout 0.1", "dropout: expected 0 with TP-invariance, got 0.1"),
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
