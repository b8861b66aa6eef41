"""`comm/_ext.py` and what it loads: the right build is used, a wrong one never runs."""

import shutil

import pytest
import torch

from tpkernels.comm import _ext
from tpkernels.comm._ext import ExtensionState


def test_extension_is_loaded_and_says_what_it_was_built_for():
    assert _ext.extension().state is ExtensionState.LOADED
    assert torch.ops.tpkernels.built_with_torch().split(".")[:2] == torch.__version__.split(".")[:2]


def forge(tmp_path, content: bytes):
    path = tmp_path / "_C.so"
    path.write_bytes(content)
    return path


def test_extension_for_another_torch_is_refused_unread(tmp_path):
    found = _ext.load(forge(tmp_path, b"\x7fELF tpkernels built with torch 1.13.1\0"))
    assert found.state is ExtensionState.UNUSABLE
    assert f"built for torch 1.13.1, but torch {torch.__version__} runs; rebuild: pip install" in found.detail


def test_extension_for_another_patch_release_is_tried(tmp_path):
    patch = ".".join([*torch.__version__.split(".")[:2], "99"]).encode()
    found = _ext.load(forge(tmp_path, b"tpkernels built with torch " + patch))
    assert "rebuild" in found.detail
    assert "built for torch" not in found.detail  # it got as far as the loader, which refused the forgery


def test_damaged_extension_is_refused(tmp_path):
    found = _ext.load(forge(tmp_path, b"not a library"))
    assert found.state is ExtensionState.UNUSABLE
    assert "not ours or damaged" in found.detail


@pytest.fixture
def not_installed(monkeypatch, tmp_path):
    """An install without the extension, and an empty cache."""
    monkeypatch.setattr(_ext, "installed_library", lambda: None)
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))


def test_absent_extension_is_no_error(not_installed):
    found = _ext.extension.__wrapped__()
    assert found.state is ExtensionState.ABSENT
    assert "the first GradientBuckets builds it" in found.detail
    assert "pip install --no-build-isolation" in found.detail


def test_extension_of_the_first_use_is_found_again(not_installed):
    library = _ext.library_of_first_use()
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    assert f"{library} is not ours or damaged" in _ext.extension.__wrapped__().detail


def test_each_text_of_the_sources_has_its_own_library(not_installed, monkeypatch, tmp_path):
    first = _ext.library_of_first_use()
    assert torch.__version__ in first.parent.name
    assert first == _ext.library_of_first_use()
    changed = shutil.copytree(_ext.sources(), tmp_path / "changed")
    monkeypatch.setattr(_ext, "sources", lambda: changed)
    assert first == _ext.library_of_first_use()
    (changed / "turn.h").write_text("// another\n")
    assert first != _ext.library_of_first_use()
