"""Choices on disk: what survives, and what is ignored."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.dispatch.conftest import VERSIONS
from tpkernels.dispatch import cache as module
from tpkernels.dispatch.cache import Cache, Choice

A = Choice("triton/a", {"torch": 2.0, "triton/a": 1.0})
B = Choice("torch", {"torch": 1.0})


def test_choice_survives_the_process(tmp_path):
    Cache(tmp_path / "new" / "folder", VERSIONS).put("k", A)
    again = Cache(tmp_path / "new" / "folder", VERSIONS)
    assert again.get("k") == A
    assert again.get("other") is None
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "k.json"
    assert path.parent.name == "test-gpu-1_torch-2.13.0_triton-3.7.1_kernels-0123456789ab"


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_is_written_under_any_mask_is_read_again(mask, tmp_path):
    before = os.umask(mask)
    try:
        Cache(tmp_path / "ours", VERSIONS).put("k", A)
    finally:
        os.umask(before)
    assert Cache(tmp_path / "ours", VERSIONS).get("k") == A


def test_others_may_read_what_they_may_read_elsewhere(tmp_path):
    """A folder may be shared by users, say of a cluster that was tuned beforehand."""
    (tmp_path / "usual").write_text("")
    cache = Cache(tmp_path, VERSIONS)
    cache.put("k", A)
    assert cache.path_of("k").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_writers_lose_nothing_of_each_other(tmp_path):
    first, second = Cache(tmp_path, VERSIONS), Cache(tmp_path, VERSIONS)
    first.put("a", A)
    second.put("b", B)
    assert (second.get("a"), first.get("b")) == (A, B)
    second.put("a", B)  # `tune --again`
    first.put("c", A)
    assert Cache(tmp_path, VERSIONS).get("a") == B


@pytest.mark.parametrize("field", ["gpu", "torch", "triton", "kernels"])
def test_other_versions_have_a_file_of_their_own(field, tmp_path):
    Cache(tmp_path, VERSIONS).put("k", A)
    assert Cache(tmp_path, replace(VERSIONS, **{field: "other"})).get("k") is None


def write_40(folder):
    cache = Cache(Path(folder), VERSIONS)
    for i in range(40):
        cache.put("same", Choice("torch", {"torch": float(i)}))
        assert Cache(Path(folder), VERSIONS).get("same"), "never half a file"
        cache.put(f"{dist.get_rank()}-{i}", Choice("torch", {"torch": float(i)}))


def test_concurrent_processes_lose_nothing(tmp_path, ranks4):
    ranks4.run(write_40, str(tmp_path))
    written = {f"{rank}-{i}": Choice("torch", {"torch": float(i)}) for rank in range(4) for i in range(40)}
    final = Cache(tmp_path, VERSIONS)
    assert {key: final.get(key) for key in written} == written
    assert not list(tmp_path.rglob("*.tmp"))


VERSION_1 = {"format": 1, "versions": asdict(VERSIONS), "choices": {"k": {"name": "torch"}}}
GOOD = {"format": 2, "versions": asdict(VERSIONS), "key": "k", "choice": A.as_json()}
TEXT = json.dumps(GOOD)
BAD = {
    "empty": "",
    "cut_off": TEXT[: len(TEXT) // 2],
    "not_json": "choices: torch",
    "a_list": "[]",
    "format_1": json.dumps(VERSION_1),
    "other_format": json.dumps({**GOOD, "format": 3}),
    "other_versions": json.dumps({**GOOD, "versions": asdict(replace(VERSIONS, torch="2.12.0"))}),
    "other_key": json.dumps({**GOOD, "key": "l"}),
    "no_choice": json.dumps({**GOOD, "choice": {}}),
    "name_is_a_number": TEXT.replace('"triton/a",', "7,"),
    "time_is_a_word": TEXT.replace("2.0", '"fast"'),
    "time_is_too_large": TEXT.replace("2.0", "1" + 400 * "0"),
    "deeply_nested": "[" * 100_000,
    "no_text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_file_is_ignored_with_one_warning_and_replaced(content, tmp_path, caplog):
    Cache(tmp_path, VERSIONS).put("k", A)
    path = Cache(tmp_path, VERSIONS).path_of("k")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    cache = Cache(tmp_path, VERSIONS)
    assert [cache.get("k"), cache.get("k")] == [None, None]
    cache.put("k", B)
    assert [f"ignoring {path}" in message for message in caplog.messages] == [True]
    assert Cache(tmp_path, VERSIONS).get("k") == B


OLD = {
    "format_1": f"{VERSIONS.slug}.json",  # one file for all
    "another_torch": replace(VERSIONS, torch="2.12.0").slug,
    "another_triton": replace(VERSIONS, triton="3.6.0").slug,
    "other_kernels": replace(VERSIONS, kernels="ba9876543210").slug,
}


@pytest.mark.parametrize("old", OLD.values(), ids=OLD)
def test_caches_of_old_versions_are_refused_with_a_sentence(old, tmp_path, caplog):
    (tmp_path / old).touch()
    cache = Cache(tmp_path, VERSIONS)
    assert cache.get("k") is None
    (said,) = caplog.messages
    assert said.startswith(
        f"{tmp_path / old} does not count, as this is {VERSIONS.slug}: shapes are timed again"
    )
    cache.put("k", A)
    Cache(tmp_path, VERSIONS)
    assert len(caplog.messages) == 1, "until there are new ones"


def test_another_gpus_choices_are_no_old_versions(tmp_path, caplog):
    (tmp_path / replace(VERSIONS, gpu="Test GPU 10").slug).touch()
    Cache(tmp_path, VERSIONS)
    assert not caplog.records


@pytest.mark.parametrize("obstacle", ["a_file", "under_a_file", "a_folder_in_its_place", "a_fifo"])
def test_unwritable_folder_costs_one_warning_and_no_hang(obstacle, tmp_path, caplog):
    """Root may write anywhere, so folders are made impossible instead of read-only."""
    (tmp_path / "file").write_text("")
    folder = {"a_file": tmp_path / "file", "under_a_file": tmp_path / "file" / "deeper"}.get(
        obstacle, tmp_path
    )
    path = Cache(tmp_path, VERSIONS).path_of("a")
    path.parent.mkdir()
    if obstacle == "a_folder_in_its_place":
        path.mkdir()
    elif obstacle == "a_fifo":
        os.mkfifo(path)
    cache = Cache(folder, VERSIONS)
    assert cache.get("a") is None
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
    cache.put("k", B)
    assert "no space left" in caplog.text
    assert cache.get("k") == B
    assert Cache(tmp_path, VERSIONS).get("k") == A
    assert not list(tmp_path.rglob("*.tmp"))


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
