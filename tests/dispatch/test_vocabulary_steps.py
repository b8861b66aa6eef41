"""Who computes embeddings and losses."""

from types import SimpleNamespace

import pytest
import torch

from tpkernels.dispatch import steps, torch_vocabulary, triton_vocabulary, vocabulary_steps
from tpkernels.dispatch.vocabulary_steps import vocabulary_steps_on


def tensor_on(device: str, dtype: torch.dtype):
    return SimpleNamespace(device=torch.device(device), dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "expected"),
    [
        ("auto", "cpu", torch.float32, torch_vocabulary),
        ("auto", "meta", torch.float32, torch_vocabulary),
        ("auto", "cuda", torch.bfloat16, triton_vocabulary),
        ("auto", "cuda", torch.float64, torch_vocabulary),
        ("torch", "cuda", torch.bfloat16, torch_vocabulary),
        ("triton", "cpu", torch.float64, triton_vocabulary),  # which refuses it, instead of falling back
    ],
)
def test_vocabulary_is_computed_by(backend, device, dtype, expected, monkeypatch):
    monkeypatch.setattr(steps, "backend", backend)
    assert vocabulary_steps_on(tensor_on(device, dtype)) is expected


def test_gpu_without_triton_is_served_by_torch(monkeypatch):
    monkeypatch.setattr(steps, "backend", "auto")
    monkeypatch.setattr(vocabulary_steps, "find_spec", lambda name: None)
    monkeypatch.setattr(vocabulary_steps, "_by", vocabulary_steps._by.__wrapped__)  # with Triton it is known
    assert vocabulary_steps_on(tensor_on("cuda", torch.bfloat16)) is torch_vocabulary


def test_unknown_backend_of_a_vocabulary_is_refused(monkeypatch):
    monkeypatch.setattr(steps, "backend", "cuda")
    with pytest.raises(ValueError, match="TPKERNELS_BACKEND is 'cuda'; expected one of auto, torch, triton"):
        vocabulary_steps_on(torch.ones(2))


def test_both_compute_the_same():
    logits, target = torch.randn(5, 40), torch.tensor([3, -1, 17, 60, 8])
    weight, dy = torch.randn(40, 12), torch.randn(5, 12)
    maximum, total, *_ = torch_vocabulary.softmax_statistics(logits, target, 37, 0)
    arguments = {
        "lookup": (target, weight, 5),
        "lookup_grad": (dy, target, 40, 5, torch.float32),
        "softmax_statistics": (logits, target, 37, 5),
        "cross_entropy_grad": (logits, target, maximum, total + 1, torch.ones(5), 37, 5, 0.9, 0.01, False),
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, given in arguments.items():
        given = [value.to(device) if isinstance(value, torch.Tensor) else value for value in given]
        ours, theirs = (getattr(by, name)(*given) for by in (triton_vocabulary, torch_vocabulary))
        torch.testing.assert_close(ours, theirs)
