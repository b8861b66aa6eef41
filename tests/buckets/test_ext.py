"""`comm/_ext.py` and what it loads: the right build is used, a wrong one never runs."""

import os

import pytest
import torch

from tpkernels.comm import _ext
from tpkernels.comm._ext import Extension, ExtensionState

BUILT = _ext.extension()
needs_extension = pytest.mark.skipif(
    BUILT.state is ExtensionState.ABSENT and os.environ.get("TPKERNELS_REQUIRE_EXT") != "1",
    reason=f"C++ extension: {BUILT.detail}",
)


@needs_extension
def test_extension_is_loaded_and_says_what_it_was_built_for():
    assert BUILT.state is ExtensionState.LOADED, BUILT.detail
    assert torch.ops.tpkernels.built_with_torch().split(".")[:2] == torch.__version__.split(".")[:2]
    assert _ext.available()


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


def test_unusable_extension_is_an_import_error(monkeypatch):
    monkeypatch.setattr(_ext, "extension", lambda: Extension(ExtensionState.UNUSABLE, "built for another"))
    with pytest.raises(ImportError, match="unusable: built for another"):
        _ext.available()


def test_absent_extension_is_no_error(monkeypatch):
    monkeypatch.setattr(_ext, "find_spec", lambda name: None)
    found = _ext.extension.__wrapped__()
    assert found.state is ExtensionState.ABSENT
    assert "pip install --no-build-isolation" in found.detail
    monkeypatch.setattr(_ext, "extension", lambda: found)
    assert not _ext.available()
