"""Shards of tensors under another library's names, as views that are blocks of our tensors.

Renaming row numbers in place of weights, by `to_huggingface` and `to_megatron`, shows which of our rows is
which of theirs. So each rule exists once, and no weight is gathered to be renamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tpkernels.checkpoints.shards import Chunk, TensorShard
from tpkernels.interop.huggingface import to_huggingface
from tpkernels.interop.megatron import to_megatron

NamingScheme = Literal["own", "huggingface", "megatron"]
_MAY_BE_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")  # by Megatron


class Heads(NamedTuple):
    """Numbers of heads, on which Megatron's fused weights depend; shapes do not show them."""

    query: int
    key: int


class Renamed(NamedTuple):
    """Shards under our names.

    chunks: by our name
    padding: views of their shards that no row of ours fills
    """

    chunks: dict[str, list[Chunk]]
    padding: list[Tensor]


class _ConsecutiveRows(NamedTuple):
    """Rows of their tensor, or columns if it is transposed, that are consecutive rows of one of ours."""

    begin: int
    end: int
    name: str
    first: int  # row of ours


def under_our_names(
    theirs: Mapping[str, TensorShard],
    ours: Mapping[str, tuple[int, ...]],
    names: NamingScheme,
    heads: Heads | None,
) -> Renamed:
    """Return their shards as views under our names; raise unless names and full shapes match.

    ours: full shapes by name, of all ranks
    """
    numbered, owner = _numbered(ours)
    rows = _renamed(numbered, theirs, names, heads)
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


def some_names(names: Sequence[str], most: int = 4) -> str:
    """Format some of the names, for errors."""
    if not names:
        return "nothing"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{list(names[:most])}{more}"


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


def _renamed(
    numbered: Mapping[str, Tensor],
    theirs: Mapping[str, TensorShard],
    names: NamingScheme,
    heads: Heads | None,
) -> dict[str, Tensor]:
    if names == "huggingface":
        return to_huggingface(numbered)
    if heads is None:
        raise ValueError(
            "names='megatron': expected a GPT to take the numbers of heads from, got tensors by name"
        )
    return to_megatron(
        numbered,
        num_heads=heads.query,
        num_kv_heads=heads.key,
        fused_norms=not any("input_layernorm" in name for name in theirs),
    )


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
    where = chunk.where[dim]
    for run in runs:
        begin, end = max(where.start, run.begin), min(where.stop, run.end)
        if begin < end:
            view = chunk.view.narrow(dim, begin - where.start, end - begin)
            rows = slice(run.first + begin - run.begin, run.first + end - run.begin)
            rest = chunk.where[1 - dim : 2 - dim] if chunk.view.ndim == 2 else ()
            found.chunks.setdefault(run.name, []).append(Chunk(view.t() if dim else view, (rows, *rest)))
    begin = max(where.start, runs[-1].end)
    if begin < where.stop:
        found.padding.append(chunk.view.narrow(dim, begin - where.start, where.stop - begin))
