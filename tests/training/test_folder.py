"""Checkpoints go into a folder that was looked at, and lines of JSON go on after a restart."""

import json
import os

import pytest

from tests.ranks import RankFailure
from tpkernels import files
from tpkernels.training.config import (
    checkpoint_of,
    open_lines_after,
    prepare_folder,
    rename_later_checkpoints,
)


def prepared(folder, resume):
    prepare_folder(folder, resume=resume)


def test_a_folder_is_made_and_an_unusable_one_is_the_same_error_on_all_ranks(tmp_path, ranks2):
    ranks2.run(prepared, tmp_path / "new" / "one", False)
    assert list((tmp_path / "new" / "one").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(RankFailure) as failed:
        ranks2.run(prepared, tmp_path / "file", True)
    assert {str(error) for error in failed.value.exceptions.values()} == {
        f"--save {tmp_path / 'file'}: on rank 0: [Errno 17] File exists: '{tmp_path / 'file'}'"
    }
    assert len(failed.value.exceptions) == 2


def test_checkpoints_of_another_run_need_a_word(tmp_path, ranks2):
    checkpoint_of(tmp_path, 7).mkdir()
    with pytest.raises(RankFailure, match="holds checkpoints of another run; pass --resume"):
        ranks2.run(prepared, tmp_path, False)
    ranks2.run(prepared, tmp_path, True)


def test_later_checkpoints_are_set_aside_and_never_lost(tmp_path, ranks2):
    for _ in range(2):
        for done in (3, 4, 5, 123456789):
            checkpoint_of(tmp_path, done).mkdir(exist_ok=True)
        (tmp_path / "step-mine").mkdir(exist_ok=True)
        ranks2.run(rename_later_checkpoints, tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000003",
        "step-00000004",
        "step-00000005.abandoned",
        "step-00000005.abandoned-2",
        "step-123456789.abandoned",
        "step-123456789.abandoned-2",
        "step-mine",
    ]


GOOD = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]


def go_on(path, done, line="new"):
    with open_lines_after(path, done) as lines:
        lines.write(f"{line}\n")


def test_lines_beyond_the_checkpoint_are_dropped_and_links_stay(tmp_path):
    path, link = tmp_path / "lines", tmp_path / "metrics"
    path.write_text("".join(f"{line}\n" for line in GOOD))
    link.symlink_to("lines")
    go_on(link, 3)
    assert path.read_text().splitlines() == [*GOOD[:3], "new"]
    assert link.is_symlink()
    assert {file.name for file in tmp_path.iterdir()} == {"lines", "metrics"}


BAD = {
    "half_a_line": b'{"step": 4, "los',
    "half_a_character": b'{"step": 4, "loss": "\xc3',
    "no_object": b"[4]",
    "no_step": b'{"loss": 1}',
    "step_is_a_word": b'{"step": "4"}',
    "deeply_nested": b"[" * 100_000,
    "zeros": b"\0" * 512,  # as some file systems leave after a loss of power
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_damaged_lines_are_dropped(bad, tmp_path):
    path = tmp_path / "metrics"
    path.write_bytes(b"\n".join([GOOD[0].encode(), bad, *(line.encode() for line in GOOD[1:3]), bad]))
    go_on(path, 3)
    assert path.read_text().splitlines() == [*GOOD[:3], "new"]
    go_on(path, 0)  # from the start
    assert path.read_text() == "new\n"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics"
    path.write_text("\n".join(GOOD))

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        open_lines_after(path, 3)
    assert path.read_text() == "\n".join(GOOD)


def test_a_pipe_is_written_to_and_never_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        go_on(path, 3)
        assert os.read(reader, 100) == b"new\n"
    finally:
        os.close(reader)
