"""`comm/_ext.py` and what it loads: the right build is used, a wrong one never runs."""

import os

import pytest
import torch
from torch.library import opcheck

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


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_pack_lays_tensors_at_aligned_offsets(dtype):
    tensors = [
        torch.arange(3),
        torch.empty(0, 5),
        torch.ones(2, 4),
        torch.tensor(7),
        torch.arange(6).view(2, 3).T,
    ]
    tensors = [tensor.to(dtype) for tensor in tensors]
    packed = torch.ops.tpkernels.pack(tensors, 4)
    assert packed.dtype == dtype
    assert packed.tolist() == [0, 1, 2, 0, *[1] * 8, 7, 0, 0, 0, 0, 3, 1, 4, 2, 5, 0, 0]


@needs_extension
def test_pack_without_alignment_is_a_concatenation():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    expected = torch.cat([tensor.flatten() for tensor in tensors])
    assert torch.equal(torch.ops.tpkernels.pack(tensors, 1), expected)


@needs_extension
def test_pack_is_a_well_behaved_operator():
    tensors = [torch.randn(3, requires_grad=True), torch.randn(2, 5, requires_grad=True)]
    opcheck(torch.ops.tpkernels.pack.default, (tensors, 8))
    torch.autograd.gradcheck(
        lambda a, b: torch.ops.tpkernels.pack([a, b], 4),
        [tensor.detach().double().requires_grad_() for tensor in tensors],
    )
    assert torch.ops.tpkernels.pack([torch.empty(5, device="meta")], 8).shape == (8,)


@needs_extension
@pytest.mark.parametrize(
    ("tensors", "alignment", "words"),
    [
        ([], 4, "expected at least one tensor"),
        ([torch.ones(1)], 0, "expected a positive alignment, got 0"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int32)], 4, "one dtype, got Float and Int"),
        ([torch.ones(1), torch.ones(1, device="meta")], 4, "one device, got cpu and meta"),
    ],
    ids=["empty", "alignment", "dtypes", "devices"],
)
def test_pack_refuses_what_cannot_lie_in_one_buffer(tensors, alignment, words):
    with pytest.raises(ValueError, match=words):
        torch.ops.tpkernels.pack(tensors, alignment)
