"""Whatever lies where a file is expected, nothing hangs, nothing else is written, and nothing is lost."""

import grp
import os
import pwd
import stat
from types import SimpleNamespace

import pytest

from tests.checks import open_files
from tpkernels import files
from tpkernels.dispatch.cache import Cache, Choice, Versions
from tpkernels.files import (
    cache_folder,
    clear,
    make_folder,
    parsed,
    read_bytes,
    read_own,
    read_text,
    replace_text,
    unused,
    why_not_ours,
)
from tpkernels.gate.disk_cache import DiskCache


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_at_once(make, tmp_path):
    make(tmp_path / "x")
    before = open_files()
    with pytest.raises(ValueError, match="expected a regular file at"):
        read_bytes(tmp_path / "x")
    assert not open_files() - before


def test_regular_files_are_read_also_through_a_link(tmp_path):
    (tmp_path / "x").write_text("é", encoding="utf-8")
    (tmp_path / "link").symlink_to("x")
    assert read_text(tmp_path / "link") == "é"
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent")
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_text(tmp_path / "x")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", "[1,]"])
def test_no_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|Illegal"):
        parsed(text)


def test_json_is_what_it_says():
    assert parsed('{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("target", ["file", "folder", "nowhere"])
def test_a_link_is_never_followed(target, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "temporary").symlink_to(target)
    with pytest.raises(FileExistsError, match=r"expected no symbolic link at .*temporary; remove it"):
        clear(tmp_path / "temporary")
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "kept").read_text() == "kept"
    (tmp_path / ".x.unfinished").symlink_to(target)
    with pytest.raises(FileExistsError):
        replace_text(tmp_path / "x", "new")
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "file").read_text() == "kept"


def test_leavings_are_cleared(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "half").touch()
    (tmp_path / "file").touch()
    for name in ("folder", "file", "absent"):
        clear(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to("x")
    (tmp_path / ".x.unfinished").write_text("half of an earl")  # of a process that was killed
    replace_text(path, "new")
    assert path.read_text() == "new"
    replace_text(link, "of its own")
    assert (link.is_symlink(), link.read_text(), path.read_text()) == (False, "of its own", "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="no room"):
        replace_text(path, "newer")
    assert path.read_text() == "new"


def no_room(*_):
    raise OSError("no room")


def test_unused_names_skip_links_that_lead_nowhere(tmp_path):
    assert unused(tmp_path / "x") == tmp_path / "x"
    (tmp_path / "x").symlink_to("nowhere")
    (tmp_path / "x-2").mkdir()
    assert unused(tmp_path / "x") == tmp_path / "x-3"


def test_caches_are_where_the_first_of_these_says(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME", "TPKERNELS_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert cache_folder() == tmp_path / "TPKERNELS_CACHE_DIR"
    monkeypatch.delenv("TPKERNELS_CACHE_DIR")
    assert cache_folder() == tmp_path / "XDG_CACHE_HOME" / "tpkernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "HOME" / ".cache" / "tpkernels"


def give_away(path, monkeypatch):
    """Have a path belong to another user."""
    if os.getuid() == 0:
        os.chown(path, 4321, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4321)


@pytest.mark.parametrize("place", ["root/folder/file", "root/folder", "root"])
@pytest.mark.parametrize("how", ["another user's", "others write", "a group writes"])
def test_what_others_can_have_written_is_refused(how, place, tmp_path, monkeypatch):
    path, root = tmp_path / "root" / "folder" / "file", tmp_path / "root"
    make_folder(path.parent)
    path.write_text("planted")
    path.chmod(0o644)
    assert read_own(path, root) == "planted"
    if how == "another user's":
        give_away(tmp_path / place, monkeypatch)
    else:
        monkeypatch.setattr(files, "_is_own_group", lambda _: False)
        (tmp_path / place).chmod(0o757 if how == "others write" else 0o775)
    said = "belongs to user" if how == "another user's" else "can be written by other users"
    with pytest.raises(PermissionError, match=f"{said}.* remove it, or "):
        read_own(path, root)


def test_a_group_of_this_user_alone_may_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("ours")
    (tmp_path / "file").chmod(0o664)
    me = pwd.getpwuid(os.getuid()).pw_name
    for name, members, ours in ((me, [], True), (me, ["eve"], False), ("staff", [], False)):
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        assert (why_not_ours(tmp_path / "file", tmp_path) == "") is ours, (name, members)


def test_caches_of_choices_and_of_compilations_ignore_planted_files(tmp_path, caplog):
    versions = Versions("a GPU", "2.0", "3.0", "abc")
    Cache(tmp_path / "choices", versions).put("key", Choice("planted", {}))
    DiskCache(tmp_path / "values").put("key", 7)
    for folder in ("choices", "values"):
        (tmp_path / folder).chmod(0o777)
    assert Cache(tmp_path / "choices", versions).get("key") is None
    assert "can be written by other users" in caplog.text
    assert DiskCache(tmp_path / "values").get("key") is None
    (tmp_path / "values").chmod(0o755)
    assert DiskCache(tmp_path / "values").get("key") == 7
