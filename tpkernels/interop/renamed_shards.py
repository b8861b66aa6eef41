"""Shards of tensors under another library's names, as views that are blocks of our tensors.

Renaming row numbers in place of weights, by `to_huggingface` and `to_megatron`, shows which of our rows is
which of theirs. So each rule exists once, and no weight is gathered to be renamed. The import adds these
naming schemes to those of `reshard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.checkpoints.reshard import naming_schemes
from tpkernels.checkpoints.reshard import reshard as reshard
from tpkernels.checkpoints.reshard_plan import Renamed
from tpkernels.checkpoints.shards import Chunk, TensorShard, some_names
from tpkernels.interop.huggingface import to_huggingface
from tpkernels.interop.megatron import to_megatron
from tpkernels.models.config import GPTConfig

_MAY_BE_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # by Megatron


class _ConsecutiveRows(NamedTuple):
    """Rows of their tensor, or columns if it is transposed, that are consecutive rows of one of ours."""

    begin: int
    end: int
    name: str
    first: int  # row of ours


def under_huggingface_names(
    theirs: Mapping[str, TensorShard], ours: Mapping[str, tuple[int, ...]], config: GPTConfig | None
) -> Renamed:
    """Return shards of a model of `transformers` as views under a GPT's names; see `NamingScheme`."""
    numbered, owner = _numbered(ours)
    return _under_our_names("huggingface", to_huggingface(numbered), theirs, ours, owner)


def under_megatron_names(
    theirs: Mapping[str, TensorShard], ours: Mapping[str, tuple[int, ...]], config: GPTConfig | None
) -> Renamed:
    """Return shards of a model of Megatron-Core as views under a GPT's names; see `NamingScheme`."""
    numbered, owner = _numbered(ours)
    if config is None:
        raise ValueError(
            "names='megatron': expected a GPT to take the numbers of heads from, got tensors by name"
        )
    rows = to_megatron(
        numbered,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        fused_norms=not any("input_layernorm" in name for name in theirs),
    )
    return _under_our_names("megatron", rows, theirs, ours, owner)


def _under_our_names(
    names: str,
    rows: Mapping[str, Tensor],
    theirs: Mapping[str, TensorShard],
    ours: Mapping[str, tuple[int, ...]],
    owner: list[tuple[int, str]],
) -> Renamed:
    """Return their shards as views under our names; raise unless names and full shapes match.

    rows: their tensors, of the numbers of our rows instead of weights
    owner: the first number of each of our names
    """
    theirs = _without_aliases(theirs, rows)
    missing, surplus = [name for name in rows if name not in theirs], [n for n in theirs if n not in rows]
    if missing or surplus:
        raise ValueError(
            f"names={names!r}: `to` has also {some_names(surplus)}, and lacks {some_names(missing)}"
        )
    found = Renamed({}, [])
    for name, shard in theirs.items():
        is_turned = rows[name].ndim == 2 and not _is_by_row(rows[name])
        numbers = rows[name][0] if is_turned else rows[name].reshape(len(rows[name]), -1)[:, 0]
        runs = list(_runs(numbers, owner))
        dim = int(is_turned)
        _require_shape(name, shard, len(numbers), dim, ours[runs[0].name][1:])
        for chunk in shard.chunks():
            _add(found, chunk, runs, dim)
    return found


def _numbered(ours: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Tensor], list[tuple[int, str]]]:
    """Return the numbers of rows by name, in two columns for a weight, and the first number of each name."""
    numbered, owner, count = {}, [], 0
    for name, shape in ours.items():
        if not 1 <= len(shape) <= 2:
            raise ValueError(f"'{name}': expected a weight or a bias to be renamed, got shape {shape}")
        numbers = torch.arange(count, count + shape[0])
        numbered[name] = numbers if len(shape) == 1 else torch.stack([numbers, numbers], dim=1)
        owner.append((count, name))
        count += shape[0]
    return numbered, owner


def _without_aliases(
    theirs: Mapping[str, TensorShard], known: Mapping[str, object]
) -> dict[str, TensorShard]:
    """Drop second names of a known tensor's memory, such as a tied head."""
    held = {shard.local.data_ptr() for name, shard in theirs.items() if name in known}
    return {name: s for name, s in theirs.items() if name in known or s.local.data_ptr() not in held}


def _is_by_row(numbers: Tensor) -> bool:
    return numbers.shape[1] == 2 and torch.equal(numbers[:, 0], numbers[:, 1])


def _runs(numbers: Tensor, owner: list[tuple[int, str]]) -> Iterator[_ConsecutiveRows]:
    starts = torch.tensor([first for first, _ in owner])
    whose = torch.searchsorted(starts, numbers.contiguous(), right=True) - 1
    breaks = (numbers[1:] != numbers[:-1] + 1) | (whose[1:] != whose[:-1])
    bounds = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(numbers)]
    for begin, end in pairwise(bounds):
        first, name = owner[int(whose[begin])]
        yield _ConsecutiveRows(begin, end, name, int(numbers[begin]) - first)


def _require_shape(name: str, shard: TensorShard, rows: int, dim: int, rest: tuple[int, ...]) -> None:
    expected = (*rest, rows) if dim else (rows, *rest)
    fits = shard.shape == expected
    if name in _MAY_BE_PADDED:
        fits = shard.shape[1:] == rest and shard.shape[0] >= rows
    if not fits:
        raise ValueError(f"'{name}': expected {expected} in `to`, got {shard.shape}: full shapes")


def _add(found: Renamed, chunk: Chunk, runs: list[_ConsecutiveRows], dim: int) -> None:
    view, (first, last) = chunk.view, chunk.block[dim]
    rest = chunk.block[1 - dim : 2 - dim] if view.ndim == 2 else ()
    for run in runs:
        begin, end = max(first, run.begin), min(last, run.end)
        if begin < end:
            part = view.narrow(dim, begin - first, end - begin)
            rows = run.first + begin - run.begin, run.first + end - run.begin
            found.chunks.setdefault(run.name, []).append(Chunk(part.t() if dim else part, (rows, *rest)))
    begin = max(first, runs[-1].end)
    if begin < last:
        found.padding.append(view.narrow(dim, begin - first, last - begin))


naming_schemes.update(huggingface=under_huggingface_names, megatron=under_megatron_names)
