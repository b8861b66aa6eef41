"""What `doctor` says of GPUs that are not here: what was tried on them, and what torch does wrong."""

import re

import pytest
import torch

from tpkernels.cli import probe
from tpkernels.cli.qualify_world import Check, Qualification, save_report, versions_for, versions_here
from tpkernels.comm.transports import select

GPU = "Test GPU 1"


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: GPU)
    monkeypatch.setattr(select, "requested_transport", "auto")
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path / "cache"))


def report(status, **versions):
    checks = [Check("kernels", "glu_fwd", status, "text"), Check("calls", "c10d", "right", "text")]
    return Qualification(versions_for(GPU), 8, 1, checks, "auto: symmetric (fastest)")


@pytest.mark.parametrize(
    ("status", "health", "said"),
    [
        ("", "note", "Test GPU 1 has not been tried with these versions: python -m tpkernels qualify.*"),
        ("right", "ok", r"Test GPU 1, on 8 ranks; auto: symmetric \(fastest\)"),
        ("wrong", "problem", "Test GPU 1 failed in kernels glu_fwd:.*"),
    ],
)
def test_a_gpu_is_told_with_what_came_of_trying_it(status, health, said):
    if status:
        save_report(report(status))
    (found,) = probe.probe_qualified()
    assert (found.health, found.name) == (health, "qualified")
    assert re.fullmatch(said, found.text)


def test_other_versions_have_not_been_tried(monkeypatch):
    save_report(report("right"))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    (found,) = probe.probe_qualified()
    assert found.health == "note"


def test_without_a_gpu_there_is_nothing_to_qualify(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe.probe_qualified() == probe.probe_symmetric() == []


BEFORE = "class StoreExchange {\n  size_t seq_id_ = 0;\n};\n"
AFTER = "class StoreExchange {\n  struct Entry { size_t seq_id; };\n  std::map<Store*, Entry> seq_ids_;\n};\n"


@pytest.fixture
def torch_with(monkeypatch, tmp_path):
    """A torch with this header; None: without."""

    def install(text, version="2.13.0"):
        header = tmp_path / "include" / probe.EXCHANGE
        header.parent.mkdir(parents=True, exist_ok=True)
        header.unlink(missing_ok=True)
        if text is not None:
            header.write_text(text)
        monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
        monkeypatch.setattr(torch, "__version__", version)

    return install


@pytest.mark.parametrize(
    ("text", "words"), [(BEFORE, "makes that of a larger one, opened later, hang"), (None, "may make")]
)
@pytest.mark.parametrize("transport", ["auto", "symmetric"])
def test_a_torch_that_counts_rendezvous_of_a_process_is_a_note_on_what_to_do(
    text, words, transport, torch_with, monkeypatch
):
    torch_with(text)
    monkeypatch.setattr(select, "requested_transport", transport)
    (found,) = probe.probe_symmetric()
    assert (found.health, found.name) == ("note", "symmetric")
    assert words in found.text
    assert "torch 2.13.0: " in found.text
    assert "open it for the larger one first" in found.text


def test_a_torch_that_counts_those_of_a_group_needs_no_note(torch_with):
    torch_with(AFTER, "2.15.0")
    assert probe.probe_symmetric() == []


@pytest.mark.parametrize("transport", ["c10d", "shared"])
def test_who_does_not_use_symmetric_memory_needs_no_note(transport, torch_with, monkeypatch):
    torch_with(BEFORE)
    monkeypatch.setattr(select, "requested_transport", transport)
    assert probe.probe_symmetric() == []


def test_the_installed_torch_has_the_header_that_is_looked_at():
    """If it moves, look for what tells the releases apart anew."""
    minor = tuple(map(int, torch.__version__.split(".")[:2]))
    if minor > (2, 13):
        pytest.skip(f"looked at in torch 2.13; this is {torch.__version__}")
    (found,) = probe.probe_symmetric()
    assert "makes that of a larger one" in found.text


NEWEST = probe.TESTED_TRITON[1]
NEWER = f"is newer than the newest tested, {NEWEST}: pip install 'triton<3.{int(NEWEST[2:]) + 1}'"


@pytest.mark.parametrize(
    ("version", "health", "said"),
    [
        ("3.5.1", "problem", "3.5.1 is too old: tpkernels needs 3.6 or newer"),
        ("3.6.0", "ok", "3.6.0"),
        ("3.7.1", "ok", "3.7.1"),
        ("3.8.0", "ok", "3.8.0"),
        ("3.20.0", "note", f"3.20.0 {NEWER}"),
        ("4.0", "note", f"4.0 {NEWER}"),
    ],
)
def test_a_triton_that_was_not_tried_is_told(version, health, said, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    found = next(one for one in probe.probe_triton() if one.name == "triton")
    assert (found.health, found.text) == (health, said)


def test_versions_here_are_those_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU)
    assert versions_here() == versions_for(GPU)
