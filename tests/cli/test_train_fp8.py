"""`train --fp8`: what it takes, what it says, and that it goes on where it was."""

import json

import pytest

from tests.checks import without_progress
from tests.cli.living_ranks import train_on
from tpkernels.cli import train as train_command
from tpkernels.ops.quantize import Recipe


def parsed(*arguments):
    parser = train_command._parser()
    return train_command._config(train_command._with_config(parser, ["--data", "x", *arguments]))


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


@pytest.mark.parametrize("fp8", ["rowwise", "blockwise+head"])
def test_a_run_says_it_proves_itself_and_goes_on(fp8, tmp_path, ranks2):
    path, folder = tmp_path / "lines.jsonl", tmp_path / "saved"
    run = ["--tp", "2", "--sequence-parallel", "--steps", "4", "--fp8", fp8, "--dtype", "bfloat16"]
    whole = train_on(ranks2, *run, "--prove", "2", "--json", str(path))
    assert whole.returncode == 0, whole.stderr
    assert f"; products in fp8, {fp8}\n" in whole.stdout
    expected = losses(path)
    begun = train_on(ranks2, *run, "--json", str(path), "--save", str(folder), "--save-every", "2")
    assert begun.returncode == 0, begun.stderr
    (folder / "latest").write_text("step-00000002")
    gone_on = train_on(ranks2, *run, "--json", str(path), "--save", str(folder), "--resume")
    assert (gone_on.returncode, without_progress(gone_on.stderr)) == (0, "")
    assert losses(path) == expected


def losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]
