"""Each step of embeddings and losses by torch alone. The contract is `vocabulary_steps.VocabularySteps`."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.kernels.reference import (
    cross_entropy_grad_ref,
    embedding_bwd_ref,
    embedding_ref,
    softmax_statistics_ref,
)


def lookup(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    return embedding_ref(ids, weight, first_id)


def lookup_grad(dy: Tensor, ids: Tensor, rows: int, first_id: int, dtype: torch.dtype) -> Tensor:
    return embedding_bwd_ref(dy, ids, rows, first_id, dtype)


def softmax_statistics(logits: Tensor, target: Tensor, columns: int, first_id: int) -> Tensor:
    return softmax_statistics_ref(logits, target, columns, first_id)


def cross_entropy_grad(
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
    into = logits if in_place else None
    return cross_entropy_grad_ref(
        logits, target, maximum, total, dloss, columns, first_id, on_target, off_target, into
    )
