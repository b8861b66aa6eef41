"""Which parameters Muon is for."""

from __future__ import annotations

from torch import nn

from tpkernels.topology.shard import VocabularySplit


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of hidden layers, for Muon, and all other parameters, for AdamW; frozen ones in neither.

    Others are vectors, tensors of more dimensions, what modules called ...Embedding... own, and heads: those
    with a sharded vocabulary, and what `transformers` calls output embeddings. A plain nn.Linear that is the
    head of a model without `get_output_embeddings` is not recognised: move it.
    """
    tables: set[nn.Parameter] = set()
    for module in model.modules():
        is_table = isinstance(getattr(module, "split", None), VocabularySplit)
        if is_table or "Embedding" in type(module).__name__:
            tables.update(module.parameters(recurse=False))
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            tables.update(head.parameters(recurse=False))
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():  # tied ones once
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and parameter not in tables else others).append(parameter)
    return matrices, others
