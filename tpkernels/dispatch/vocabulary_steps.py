"""The steps of embeddings and losses, and who computes them; `steps` has those of products.

They are bound by memory, and plain torch passes over the logits several times where a kernel does once: on a
GPU `auto` is Triton, untimed. float64 has no kernels: there `auto` is torch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.dispatch import steps
from tpkernels.kernels.operands import DTYPES


class VocabularySteps(Protocol):
    """T tokens, V columns or rows of this rank, H features. Ids are of the whole vocabulary.

    first_id: the id of the first row or column of this rank
    """

    def lookup(self, ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
        """(T, H): rows of the table, zeros for ids of other ranks."""

    def lookup_grad(self, dy: Tensor, ids: Tensor, rows: int, first_id: int, dtype: torch.dtype) -> Tensor:
        """(rows, H): the gradient of this rank's part of the table."""

    def softmax_statistics(self, logits: Tensor, target: Tensor, columns: int, first_id: int) -> Tensor:
        """(4, T): maximum, total, picked and summed of each row, of its first `columns`."""

    def cross_entropy_grad(
        self,
        logits: Tensor,
        target: Tensor,
        maximum: Tensor,
        total: Tensor,
        dloss: Tensor,
        columns: int,
        first_id: int,
        on_target: float,
        off_target: float,
        in_place: bool,
    ) -> Tensor:
        """(T, V): the gradient of the logits; in their memory if `in_place`."""


@cache
def _by(backend: str, device: torch.device, dtype: torch.dtype) -> VocabularySteps:
    if backend not in steps.BACKENDS:
        steps.steps_on(device)  # which says so
    fits = device.type == "cuda" and dtype in DTYPES
    # imported here: a CPU user need not have Triton
    if backend == "triton" or (backend == "auto" and fits and find_spec("triton") is not None):
        from tpkernels.dispatch import triton_vocabulary

        return triton_vocabulary
    from tpkernels.dispatch import torch_vocabulary

    return torch_vocabulary


def vocabulary_steps_on(tensor: Tensor) -> VocabularySteps:
    """Who computes on tensors like this one. An explicit choice never falls back silently."""
    return _by(steps.backend, tensor.device, tensor.dtype)
