"""Lines of JSON go on after a restart, whatever the run before left of them."""

import json
import os

import pytest

from tpkernels import files
from tpkernels.training.folder import opened_after

GOOD = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6)]


def go_on(path, done, line="new"):
    lines, said = opened_after(path, done)
    with lines:
        lines.write(f"{line}\n")
    return said


def test_lines_beyond_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics"
    path.write_text("".join(f"{line}\n" for line in GOOD))
    assert go_on(path, 3) == ""
    assert path.read_text().splitlines() == [*GOOD[:3], "new"]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics"]


def test_a_link_to_the_lines_stays_one(tmp_path):
    (tmp_path / "lines").write_text("\n".join(GOOD))
    (tmp_path / "metrics").symlink_to("lines")
    assert go_on(tmp_path / "metrics", 2) == ""
    assert (tmp_path / "metrics").is_symlink()
    assert (tmp_path / "lines").read_text().splitlines() == [*GOOD[:2], "new"]


def test_a_run_from_the_start_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "metrics"
    path.write_text(GOOD[0])
    assert go_on(path, 0) == ""
    assert path.read_text() == "new\n"
    assert go_on(tmp_path / "absent", 3) == ""
    assert (tmp_path / "absent").read_text() == "new\n"


BAD = {
    "half_a_line": b'{"step": 4, "los',
    "half_a_character": b'{"step": 4, "loss": "\xc3',
    "no_object": b"[4]",
    "no_step": b'{"loss": 1}',
    "step_is_a_word": b'{"step": "4"}',
    "deeply_nested": b"[" * 100_000,
    "zeros": b"\0" * 512,  # as some file systems leave after a loss of power
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("at", [1, 3], ids=["within", "at_the_end"])
def test_damaged_lines_are_named_and_set_aside(bad, at, tmp_path):
    path = tmp_path / "metrics"
    (tmp_path / "metrics.damaged").write_text("of an earlier restart")
    lines = [line.encode() for line in GOOD[:3]]
    lines.insert(at, bad)
    before = b"\n".join(lines)
    path.write_bytes(before)
    said = go_on(path, 3)
    assert said == (
        f"{path}: line {at + 1} holds no step; left out, and the file as it was is {path}.damaged-2"
    )
    assert path.read_text().splitlines() == [*GOOD[:3], "new"]
    assert (tmp_path / "metrics.damaged-2").read_bytes() == before
    assert (tmp_path / "metrics.damaged").read_text() == "of an earlier restart"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics"
    path.write_text("\n".join(GOOD))

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        opened_after(path, 3)
    assert path.read_text() == "\n".join(GOOD)


def test_a_pipe_is_written_to_and_never_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert go_on(path, 3) == ""
        assert os.read(reader, 100) == b"new\n"
    finally:
        os.close(reader)
