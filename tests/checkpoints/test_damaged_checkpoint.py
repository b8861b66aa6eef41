"""A checkpoint that is damaged, or made to do harm, is one error on all ranks, and changes nothing."""

import hashlib
import os
import pickle
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata

from tests.checkpoints.test_dcp import assert_equal, everything, trained
from tests.checks import error_of
from tests.interop.refused import refused
from tests.on_ranks import on_ranks
from tpkernels import initialize_model_parallel, manual_seed
from tpkernels.checkpoints import dcp


def save(folder):
    initialize_model_parallel(2)
    manual_seed(1)
    dcp.save(Path(folder, "good"), *trained("odd", 1), extra={"step": 2})


def load(folder):
    """What is said; the model and its optimizer must be as they were."""
    initialize_model_parallel(2)
    manual_seed(1)
    model, optimizer = trained("odd", 2, lr=0.3)
    before = deepcopy(everything(model, optimizer))
    said = error_of(dcp.load, folder, model, optimizer)
    assert_equal(everything(model, optimizer), before)
    return said


@pytest.fixture(scope="module")
def good(ranks2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    ranks2.run(save, str(folder))
    return folder / "good"


class Harm:
    """What a file must not be able to do."""

    def __reduce__(self):
        return os.mkdir, (HARM,)


HARM = "/tmp/tpkernels-was-harmed"


def edited(change):
    """A change of what `.metadata` says, by somebody who writes a fitting sum, too."""

    def edit(folder):
        held = pickle.loads((folder / ".metadata").read_bytes())
        held = change(held) or held
        content = pickle.dumps(held)
        (folder / ".metadata").write_bytes(content)
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        lines[0] = f"{hashlib.sha256(content).hexdigest()}  .metadata"
        (folder / "SHA256SUMS").write_text("\n".join(lines))

    return edit


def flip(name, at=1 / 2):
    def damage(folder):
        content = bytearray((folder / name).read_bytes())
        content[int(len(content) * at)] ^= 4
        (folder / name).write_bytes(content)

    return damage


def cut(name):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def without(name):
    return lambda folder: (folder / name).unlink()


def fifo(name):
    def swap(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return swap


def without_a_sum(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    (folder / "SHA256SUMS").write_text("\n".join(lines[:-1]))


def first_shard(**fields):
    """A change of where the first shard is said to be."""
    return edited(lambda held: vars(next(iter(held.storage_data.values()))).update(fields))


def rows(**fields):
    """A change of the first chunk of the table's rows."""
    return edited(lambda held: vars(held.state_dict_metadata["model.table.weight"].chunks[0]).update(fields))


def without_a_chunk(held):
    held.state_dict_metadata["model.table.weight"].chunks.pop()


def unknown_parameter(held):
    held.state_dict_metadata["optimizer.state.absent.exp_avg"] = metadata.BytesStorageMetadata()


WRONG_SUM = "is damaged: expected SHA-256"
CASES = {
    "bit_of_a_shard": (flip("__1_0.distcp"), f"__1_0.distcp {WRONG_SUM}"),
    "bit_of_another_rank's": (flip("__0_0.distcp"), f"__0_0.distcp {WRONG_SUM}"),
    "bit_of_metadata": (flip(".metadata"), f".metadata {WRONG_SUM}"),
    "bit_of_a_sum": (flip("SHA256SUMS", 0), f"SHA256SUMS is damaged in line 1|{WRONG_SUM}"),
    "half_a_shard": (cut("__1_0.distcp"), f"__1_0.distcp {WRONG_SUM}"),
    "half_of_the_sums": (cut("SHA256SUMS"), "SHA256SUMS is damaged in line 2"),
    "a_sum_too_few": (without_a_sum, "SHA256SUMS is damaged: it has no sum of __1_0.distcp"),
    "no_shard": (without("__0_0.distcp"), "__0_0.distcp is missing; restore it"),
    "no_metadata": (without(".metadata"), ".metadata is missing; restore it"),
    "no_sums": (without("SHA256SUMS"), "SHA256SUMS is missing; restore it"),
    "fifo_for_metadata": (fifo(".metadata"), ".metadata is missing"),
    "fifo_for_sums": (fifo("SHA256SUMS"), "expected a regular file at"),
    "code": (edited(lambda held: Harm()), "it names posix.mkdir, which no checkpoint needs"),
    "code_of_torch": (edited(lambda held: filesystem.FileSystem()), "it names torch.distributed.checkpoint"),
    "no_metadata_at_all": (edited(lambda held: [1]), "expected Metadata, got list"),
    "path_above": (first_shard(relative_path="../x/__0_0.distcp"), "a file in the folder, got '../x/"),
    "path_from_root": (first_shard(relative_path="/etc/passwd"), "in the folder, got '/etc/passwd'"),
    "absent_file": (first_shard(relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    "too_few_rows": (edited(without_a_chunk), "'model.table.weight': expected 28 elements, got"),
    "rows_outside": (rows(offsets=torch.Size([70, 0])), "'model.table.weight' of (7, 4): got a chunk of"),
    "beyond_the_end": (first_shard(length=1 << 40), "bytes, it has"),
    "before_the_start": (first_shard(offset=-8), "bytes, it has"),
    "unknown_parameter": (edited(unknown_parameter), "'exp_avg' of 'absent', which is not in its groups"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named_on_all_ranks_and_changes_nothing(case, good, ranks2, tmp_path):
    damage, expected = CASES[case]
    shutil.copytree(good, tmp_path / case)
    damage(tmp_path / case)
    shutil.rmtree(HARM, ignore_errors=True)
    (kind, text), second = ranks2.run(load, tmp_path / case)
    assert not Path(HARM).exists()
    assert (kind, text) == second
    assert kind == "ValueError"
    assert any(part in text for part in expected.split("|")), text


def test_sums_are_those_that_others_compare(good):
    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("there is no sha256sum here")
    said = subprocess.run([program, "--check", "SHA256SUMS"], cwd=good, capture_output=True, text=True)
    assert said.stdout.splitlines() == [".metadata: OK", "__0_0.distcp: OK", "__1_0.distcp: OK"]


@on_ranks(2)
def test_objects_are_loaded_only_where_the_caller_trusts_them(tmp_path):
    initialize_model_parallel(2)
    model, path, step = trained("odd", 1)[0], tmp_path / "object", SimpleNamespace(step=2)
    dcp.save(path, model, extra=step)
    before = deepcopy(model.state_dict())
    text = refused("ValueError", "'extra' cannot be read (UnpicklingError", dcp.load, path, model)
    assert "pass weights_only=False if you trust its author" in text
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert dcp.load(path, model, weights_only=False) == step


@on_ranks(2)
def test_code_in_extra_is_not_run(tmp_path):
    """The sums fit."""
    initialize_model_parallel(2)
    model = trained("odd", 1)[0]
    shutil.rmtree(HARM, ignore_errors=True)
    dcp.save(tmp_path / "code", model, extra=Harm())
    refused("ValueError", "'extra' cannot be read", dcp.load, tmp_path / "code", model)
    assert not Path(HARM).exists()


def through_a_link(folder):
    initialize_model_parallel(2)
    return error_of(dcp.save, Path(folder, "step-1"), trained("odd", 1)[0])


@pytest.fixture
def others(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "theirs").write_text("kept")
    yield tmp_path
    assert [path.name for path in (tmp_path / "others").iterdir()] == ["theirs"]
    assert (tmp_path / "others" / "theirs").read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        (".step-1.unfinished", "others", "expected no symbolic link at {}; remove it"),
        (".step-1.unfinished", "nowhere", "expected no symbolic link at {}; remove it"),
        ("step-1", "nowhere", "there is something already"),
        (".latest.unfinished", "others/theirs", "expected no symbolic link"),
    ],
)
def test_a_link_in_place_of_what_is_written_is_not_followed(name, target, said, ranks2, others):
    (others / name).symlink_to(target)
    for kind, text in ranks2.run(through_a_link, str(others)):
        assert kind == "FileExistsError"
        assert said.format(others / name) in text


def test_latest_that_is_a_link_is_replaced_and_not_written_through(ranks2, others):
    (others / "latest").symlink_to("others/theirs")
    assert ranks2.run(through_a_link, str(others)) == [("nothing", "")] * 2
    assert dcp.latest(others) == others / "step-1"
