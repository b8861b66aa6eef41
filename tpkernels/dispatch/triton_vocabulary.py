"""Each step of embeddings and losses by our kernels. The contract is `vocabulary_steps.VocabularySteps`."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.kernels import cross_entropy, embedding


def lookup(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    return embedding.embedding_fwd(ids, weight, first_id=first_id)


def lookup_grad(dy: Tensor, ids: Tensor, rows: int, first_id: int, dtype: torch.dtype) -> Tensor:
    return embedding.embedding_bwd(dy, ids, rows=rows, first_id=first_id, dtype=dtype)


def softmax_statistics(logits: Tensor, target: Tensor, columns: int, first_id: int) -> Tensor:
    return cross_entropy.softmax_statistics(logits, target, columns=columns, first_id=first_id)


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
    return cross_entropy.cross_entropy_grad(
        logits,
        target,
        maximum,
        total,
        dloss,
        columns=columns,
        first_id=first_id,
        on_target=on_target,
        off_target=off_target,
        into=logits if in_place else None,
    )
