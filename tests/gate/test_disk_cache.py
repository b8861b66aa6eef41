"""The cache on disk gives back what was put there, or nothing; a damaged file is nothing."""

import os
from pathlib import Path

import pytest

from tests.gate.samples import FACTS
from tpkernels.files import cache_folder
from tpkernels.gate.ahead_of_time import Facts
from tpkernels.gate.disk_cache import DiskCache

DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "not_json": lambda text: "\0\1\2",
    "deeply_nested": lambda text: "[" * 100_000,
    "of_other_shape": lambda text: "[1, 2]",
    "changed": lambda text: text.replace("163", "16"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_cache_ignores_a_damaged_file(damage, tmp_path):
    cache = DiskCache(tmp_path)
    cache.put("key", FACTS.as_json())
    assert Facts.from_json(cache.get("key")) == FACTS
    assert cache.get("another key") is None
    (file,) = tmp_path.iterdir()
    file.write_text(damage(file.read_text()))
    assert cache.get("key") is None
    cache.put("key", FACTS.as_json())
    assert Facts.from_json(cache.get("key")) == FACTS


@pytest.mark.parametrize("in_the_way", ["a fifo", "a file"])
def test_cache_does_without_what_it_cannot_read_or_make(in_the_way, tmp_path):
    (tmp_path / "a file").write_text("")
    cache = DiskCache(tmp_path / in_the_way / "folder")
    cache.put("key", 1)
    if in_the_way == "a fifo":
        (file,) = (tmp_path / in_the_way / "folder").iterdir()
        file.unlink()
        os.mkfifo(file)
    assert cache.get("key") is None


def test_facts_of_another_version_are_refused():
    with pytest.raises(TypeError):
        Facts.from_json(FACTS.as_json() | {"more": 1})


def test_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("TPKERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/tpkernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/tpkernels")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None
    cache = DiskCache.of_user("facts")
    cache.put("key", 1)
    assert cache.get("key") is None
