"""Choices on disk: what survives, and what is ignored."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.dispatch.conftest import VERSIONS
from tpkernels.dispatch import cache as module
from tpkernels.dispatch.cache import Cache, Choice, parse, render

A = Choice("triton/a", {"torch": 2.0, "triton/a": 1.0})
B = Choice("torch", {"torch": 1.0})


def test_choice_survives_the_process(tmp_path):
    Cache(tmp_path / "new" / "folder", VERSIONS).put("k", A)
    again = Cache(tmp_path / "new" / "folder", VERSIONS)
    assert again.get("k") == A
    assert again.get("other") is None
    assert again.path.name == "test-gpu-1_torch-2.13.0_triton-3.7.1_kernels-0123456789ab.json"


def test_others_may_read_what_they_may_read_elsewhere(tmp_path):
    """A folder may be shared by users, say of a cluster that was tuned beforehand."""
    (tmp_path / "usual").write_text("")
    cache = Cache(tmp_path, VERSIONS)
    cache.put("k", A)
    assert cache.path.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_writers_take_over_what_others_wrote(tmp_path):
    first, second = Cache(tmp_path, VERSIONS), Cache(tmp_path, VERSIONS)
    first.put("a", A)
    second.put("b", B)
    assert second.get("a") == A
    assert Cache(tmp_path, VERSIONS).get("b") == B


def test_writers_do_not_undo_what_others_chose_anew(tmp_path):
    Cache(tmp_path, VERSIONS).put("k", A)
    training = Cache(tmp_path, VERSIONS)  # reads the old choice, and runs on
    Cache(tmp_path, VERSIONS).put("k", B)  # `tune --again`
    training.put("another", A)
    assert Cache(tmp_path, VERSIONS).get("k") == B


@pytest.mark.parametrize("field", ["gpu", "torch", "triton", "kernels"])
def test_other_versions_have_a_file_of_their_own(field, tmp_path):
    Cache(tmp_path, VERSIONS).put("k", A)
    assert Cache(tmp_path, replace(VERSIONS, **{field: "other"})).get("k") is None


def write_40(folder):
    cache, rank = Cache(Path(folder), VERSIONS), dist.get_rank()
    with patch.object(module, "LOCK_SECONDS", 100.0):  # however busy the machine is
        for i in range(40):
            cache.put(f"{rank}-{i}", Choice("torch", {"torch": float(i)}))


def test_concurrent_processes_lose_nothing(tmp_path, ranks4):
    reader = Cache(tmp_path, VERSIONS)
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(ranks4.run, write_40, str(tmp_path))
        while not writing.done():
            if reader.path.exists():
                parse(reader.path.read_text())  # never half a file
            time.sleep(0.01)
    assert writing.result() == [None] * 4
    written = {f"{rank}-{i}": Choice("torch", {"torch": float(i)}) for rank in range(4) for i in range(40)}
    final = Cache(tmp_path, VERSIONS)
    assert {key: final.get(key) for key in written} == written
    assert not list(tmp_path.glob("*.tmp"))


def test_writer_that_is_stuck_does_not_stop_the_others(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    cache = Cache(tmp_path, VERSIONS)
    with cache.path.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache.put("k", A)
    assert Cache(tmp_path, VERSIONS).get("k") == A


GOOD = render(VERSIONS, {"k": A})
BAD = {
    "empty": "",
    "cut_off": GOOD[: len(GOOD) // 2],
    "not_json": "choices: torch",
    "a_list": "[]",
    "other_format": GOOD.replace('"format": 1', '"format": 2'),
    "other_versions": render(replace(VERSIONS, torch="2.12.0"), {"k": A}),
    "no_choices": json.dumps({"format": 1, "versions": {}}),
    "name_is_a_number": GOOD.replace('"triton/a",', "7,"),
    "time_is_a_word": GOOD.replace("2.0", '"fast"'),
    "time_is_too_large": GOOD.replace("2.0", "1" + 400 * "0"),
    "deeply_nested": "[" * 100_000,
    "no_text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_file_is_ignored_with_one_warning_and_replaced(content, tmp_path, caplog):
    path = Cache(tmp_path, VERSIONS).path
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = Cache(tmp_path, VERSIONS)
    assert cache.get("k") is None
    cache.put("new", B)
    cache.put("newer", B)
    assert [f"ignoring {path}" in record.getMessage() for record in caplog.records] == [True]
    assert Cache(tmp_path, VERSIONS).get("new") == B


@pytest.mark.parametrize(
    "obstacle", ["a_file", "under_a_file", "a_folder_in_its_place", "fifo.json", "fifo.lock"]
)
def test_unwritable_folder_costs_one_warning_and_no_hang(obstacle, tmp_path, caplog):
    """Root may write anywhere, so folders are made impossible instead of read-only."""
    (tmp_path / "file").write_text("")
    folder = {"a_file": tmp_path / "file", "under_a_file": tmp_path / "file" / "deeper"}.get(
        obstacle, tmp_path
    )
    path = Cache(tmp_path, VERSIONS).path
    if obstacle == "a_folder_in_its_place":
        path.mkdir()
    elif obstacle.startswith("fifo"):
        os.mkfifo(path.with_suffix(Path(obstacle).suffix))
    cache = Cache(folder, VERSIONS)
    cache.put("a", A)
    cache.put("b", B)
    assert cache.get("a") == A
    assert [str(folder) in message for message in caplog.messages] == [True]


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, caplog):
    cache = Cache(tmp_path, VERSIONS)
    cache.put("k", A)

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.put("l", B)
    assert "no space left" in caplog.text
    assert cache.get("l") == B
    assert Cache(tmp_path, VERSIONS).get("k") == A
    assert not list(tmp_path.glob("*.tmp"))


def test_without_a_folder_choices_live_in_memory(caplog):
    cache = Cache(None, VERSIONS)
    cache.put("k", A)
    assert cache.get("k") == A
    assert not caplog.records


def test_versions_change_with_the_source(tmp_path):
    versions = module.versions_for("GPU")
    assert versions == module.versions_for("GPU")
    (tmp_path / "kernel.py").write_text("x = 1")
    before = module.source_hash.__wrapped__(tmp_path)
    (tmp_path / "kernel.py").write_text("x = 2")
    after = module.source_hash.__wrapped__(tmp_path)
    assert after != before
    assert len(before) == 12
