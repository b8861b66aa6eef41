"""Converts full weights under Megatron-Core's names to weights of `tpkernels.GPT`, and back.

H query heads, G groups that share a head of keys and values, d features a head, F features of an MLP:

    linear_qkv   ((H/G + 2) G d, hidden)   for each group: its H/G query heads, its keys, its values
    linear_fc1   (2 F, hidden)             gate, then up; without a gate (F, hidden)

Shards of several tensor-parallel ranks must be merged first, by Megatron's own tools.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tpkernels.groups.sizes import split_vocabulary
from tpkernels.interop.renaming import Renaming, to_ours, to_theirs

_LAYER, _BLOCK = "decoder.layers.{i}", "blocks.{i}"
_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
# A norm in Transformer Engine's fused layers, and as a module of its own.
_FUSED = {
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_": f"{_BLOCK}.attention_norm.",
    f"{_LAYER}.mlp.linear_fc1.layer_norm_": f"{_BLOCK}.mlp_norm.",
}
_APART = {f"{_LAYER}.input_layernorm.": f"{_BLOCK}.attention_norm."}
_APART |= {f"{_LAYER}.pre_mlp_layernorm.": f"{_BLOCK}.mlp_norm."}


def join_qkv(query: Tensor, key: Tensor, value: Tensor, *, groups: int) -> Tensor:
    """Join weights (features, hidden), or biases (features,), to one tensor, group by group."""
    parts = [_by_group(part, groups) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def split_qkv(fused: Tensor, *, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a tensor that `join_qkv` returned."""
    if groups < 1 or heads % groups:
        raise ValueError(f"num_kv_heads: expected a divisor of num_heads {heads}, got {groups}")
    each = heads // groups
    by_group = _by_group(fused, groups * (each + 2)).unflatten(0, (groups, each + 2))
    query, key, value = (part.flatten(0, 2) for part in by_group.split([each, 1, 1], dim=1))
    return query, key, value


def from_megatron(
    theirs: Mapping[str, Tensor],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    vocab_size: int | None = None,
) -> dict[str, Tensor]:
    """Return a GPT's tensors, from those of a `GPTModel` with norms as modules or fused into the next layers.

    vocab_size: the rows of the tables without padding; None: they have no padding
    """
    found = {name: tensor for name, tensor in theirs.items() if not name.endswith("_extra_state")}
    for name in _TABLES:
        if name in found and vocab_size is not None:
            found[name] = _without_padding(name, found[name], vocab_size)
    gated = any(
        tensor.shape[0] == 2 * found[name.replace("linear_fc1", "linear_fc2")].shape[1]
        for name, tensor in found.items()
        if name.endswith("mlp.linear_fc1.weight")
    )
    return to_ours(found, _rules(num_heads, num_kv_heads or num_heads, gated, {**_FUSED, **_APART}))


def to_megatron(
    ours: Mapping[str, Tensor],
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    vocab_divisible_by: int = 1,
    fused_norms: bool = True,
) -> dict[str, Tensor]:
    """Return a `GPTModel`'s tensors, from a GPT's full ones.

    vocab_divisible_by: pad tables with zeros to a multiple of it: `make_vocab_size_divisible_by` x ranks
    fused_norms: norms are fused into the next layers, as with Transformer Engine; False: norms are modules
    """
    gated = any(name.endswith("mlp.gate.weight") for name in ours)
    norms = _FUSED if fused_norms else _APART
    theirs = to_theirs(ours, _rules(num_heads, num_kv_heads or num_heads, gated, norms))
    for name in _TABLES:
        if name in theirs:
            rows = theirs[name].shape[0]
            padded = split_vocabulary(rows, ranks=1, divisible_by=vocab_divisible_by).padded_size
            theirs[name] = torch.nn.functional.pad(theirs[name], (0, 0, 0, padded - rows))
    return theirs


def _rules(heads: int, groups: int, gated: bool, norms: Mapping[str, str]) -> list[Renaming]:
    rules = [
        Renaming("embedding.word_embeddings.weight", ("embedding.weight",)),
        Renaming("embedding.position_embeddings.weight", ("positions.weight",)),
        Renaming("output_layer.weight", ("head.weight",)),
    ]
    for kind in ("weight", "bias"):
        qkv = tuple(f"{_BLOCK}.attention.qkv.{part}.{kind}" for part in ("query", "key", "value"))
        rules.append(
            Renaming(
                f"{_LAYER}.self_attention.linear_qkv.{kind}",
                qkv,
                lambda fused: split_qkv(fused, heads=heads, groups=groups),
                lambda *parts: join_qkv(*parts, groups=groups),
            )
        )
        fc1 = f"{_LAYER}.mlp.linear_fc1.{kind}"
        up = f"{_BLOCK}.mlp.up.{kind}"
        rules.append(
            Renaming(fc1, (f"{_BLOCK}.mlp.gate.{kind}", up), lambda fused: fused.chunk(2), _stack)
            if gated
            else Renaming(fc1, (up,))
        )
        rules += [
            Renaming(f"{_LAYER}.self_attention.linear_proj.{kind}", (f"{_BLOCK}.attention.output.{kind}",)),
            Renaming(f"{_LAYER}.mlp.linear_fc2.{kind}", (f"{_BLOCK}.mlp.down.{kind}",)),
            Renaming(f"decoder.final_layernorm.{kind}", (f"norm.{kind}",)),
            *(Renaming(f"{theirs}{kind}", (f"{mine}{kind}",)) for theirs, mine in norms.items()),
        ]
    return rules


def _stack(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    if groups < 1 or tensor.shape[0] % groups:
        raise ValueError(
            f"expected features that {groups} heads or groups divide, got {tuple(tensor.shape)}; check "
            "num_heads and num_kv_heads"
        )
    return tensor.reshape(groups, -1, *tensor.shape[1:])


def _without_padding(name: str, table: Tensor, vocab_size: int) -> Tensor:
    if table.shape[0] < vocab_size:
        raise ValueError(f"'{name}': expected at least {vocab_size} rows, got {tuple(table.shape)}")
    return table[:vocab_size]
