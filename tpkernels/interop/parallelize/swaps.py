"""What a plan does to a model on this rank: modules that are replaced, and numbers that are divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.interop.parallelize.hf_modules import (
    ColumnConv1D,
    ColumnLinear,
    HeadLinear,
    RowConv1D,
    RowLinear,
)
from tpkernels.interop.parallelize.plan import Divided, Kept, Match, Plan, Split, matches
from tpkernels.layers.embedding import VocabParallelEmbedding
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld
from tpkernels.topology.shard import pieces_of
from tpkernels.topology.vocabulary import split_vocabulary


@dataclass(frozen=True)
class Work:
    """All that a plan does to one model.

    divisions: module, attribute, and this rank's part of the number in it
    kept: whether gradients of the parameters in a module are partial sums, where the plan says so
    """

    swaps: list[Swap]
    divisions: list[tuple[nn.Module, str, int]]
    kept: dict[nn.Module, bool]


def planned(model: nn.Module, plan: Plan, world: TensorWorld) -> Work:
    """Nothing is changed yet; a plan that does not fit is an error that names the module."""
    found = matches(model, plan)
    swaps = [_swap(match, world) for match in found if isinstance(match.entry, Split)]
    divisions = [_division(match, world.size) for match in found if isinstance(match.entry, Divided)]
    kept = {match.module: match.entry.partial for match in found if isinstance(match.entry, Kept)}
    _require_tied_alike(model, swaps)
    _require_called(model, swaps)
    return Work(swaps, divisions, kept)


@dataclass(frozen=True)
class Swap:
    """A module to be replaced.

    dim: of the weight as (out_features, in_features), that is split
    pieces: of that dimension, this rank's
    rows: of the shard, padding included
    """

    name: str
    old: nn.Module
    kind: str
    stacked: int
    dim: int
    pieces: tuple[range, ...]
    rows: int

    @property
    def features(self) -> int:
        """Of the unsharded weight, along the dimension that is split."""
        return _weight(self.old).shape[self.dim]

    def held(self, short: str, tensor: Tensor) -> Tensor:
        """What this rank holds of the old weight or bias, or of its gradient."""
        if short == "weight":
            return _oriented(self.old, self.part(_oriented(self.old, tensor), self.dim))
        return tensor.clone() if self.kind == "row" else self.part(tensor, 0)

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """What this rank holds of a weight or a bias, in memory of its own."""
        own = torch.cat([tensor.narrow(dim, piece.start, len(piece)) for piece in self.pieces], dim)
        missing = self.rows - own.shape[dim]
        return F.pad(own, (*[0, 0] * (own.ndim - 1 - dim), 0, missing)) if missing else own


def _swap(match: Match, world: TensorWorld) -> Swap:
    """What is to be done, or an error that names the module."""
    name, old, entry = match.name, match.module, match.entry
    assert isinstance(entry, Split)
    is_table = entry.kind == "embedding"
    expected = "an nn.Embedding" if is_table else "an nn.Linear"
    fits = {
        "embedding": type(old) is nn.Embedding,
        "head": type(old) is nn.Linear,
        "column": _is_linear(old),
        "row": _is_linear(old),
    }
    if not fits[entry.kind]:
        advice = "; it is split already" if isinstance(old, ParallelModule) else ""
        raise TypeError(f"'{name}': expected {expected} for {entry.kind!r}, got {type(old).__name__}{advice}")
    if isinstance(old, nn.Embedding) and (old.max_norm is not None or old.scale_grad_by_freq or old.sparse):
        raise ValueError(
            f"'{name}': expected an nn.Embedding without max_norm, scale_grad_by_freq and sparse, got {old}"
        )
    hooks = old._forward_hooks or old._forward_pre_hooks or old._backward_hooks or old._backward_pre_hooks
    if hooks or "forward" in vars(old):
        raise ValueError(
            f"'{name}': expected a module without hooks or a forward of its own; add them after parallelize"
        )
    strange = [n for n, p in old.named_parameters() if type(p) is not nn.Parameter]
    if strange:
        raise TypeError(
            f"'{name}.{strange[0]}': expected a plain parameter, got {type(getattr(old, strange[0]))}"
        )
    shape = _weight(old).shape
    dim = 1 if entry.kind == "row" else 0
    if entry.kind in ("head", "embedding"):
        split = split_vocabulary(shape[0], ranks=world.size)
        return Swap(name, old, entry.kind, 1, dim, (split.ids_of(world.rank),), split.shard_size)
    step = world.size * entry.unit * entry.stacked
    if shape[dim] % step:
        sizes = f"{world.size} ranks x unit {entry.unit} x stacked {entry.stacked}"
        raise ValueError(
            f"'{name}': expected {('out', 'in')[dim]}_features that {sizes} = {step} divides, got "
            f"{shape[dim]}"
        )
    pieces = pieces_of(world.rank, size=shape[dim], ranks=world.size, stride=entry.stacked)
    return Swap(name, old, entry.kind, entry.stacked, dim, pieces, shape[dim] // world.size)


def _division(match: Match, ranks: int) -> tuple[nn.Module, str, int]:
    assert isinstance(match.entry, Divided)
    attribute = match.entry.attribute
    number = getattr(match.module, attribute, None)
    if type(number) is not int or number % ranks:
        raise ValueError(
            f"'{match.name}.{attribute}': expected a number that {ranks} ranks divide, got {number!r}"
        )
    return match.module, attribute, number // ranks


def _require_tied_alike(model: nn.Module, swaps: list[Swap]) -> None:
    """Modules that share a weight are split alike, all of them."""
    how = {swap.old: (swap.dim, swap.pieces, _is_transposed(swap.old)) for swap in swaps}
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    for shared in owners.values():
        split = [(name, module) for name, module in shared if module in how]
        for name, module in shared:
            if split and how.get(module) != how[split[0][1]]:
                raise ValueError(
                    f"'{name}' shares a weight with '{split[0][0]}', and must be split as that is; give the "
                    "plan a pattern for both"
                )


def _require_called(model: nn.Module, swaps: list[Swap]) -> None:
    """torch's encoder layer reads its layers' weights in eval mode, and would take a part for the whole."""
    for name, parent in model.named_modules():
        if isinstance(parent, nn.TransformerEncoderLayer):
            for swap in swaps:
                if any(module is swap.old for module in parent.modules()):
                    raise TypeError(
                        f"'{swap.name}': expected a module that its parent calls, but '{name}', an "
                        "nn.TransformerEncoderLayer, reads its weight; it cannot be split"
                    )


@torch.no_grad()
def carry_out(model: nn.Module, work: Work, state: State) -> None:
    """Do it, in place."""
    for module, attribute, number in work.divisions:
        setattr(module, attribute, number)
    made: dict[int, nn.Parameter] = {}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for short, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, short))
    for swap in work.swaps:
        new = _BUILD[swap.kind](swap, state)
        for short, old in swap.old._parameters.items():
            if old is not None:
                held = nn.Parameter(swap.held(short, old).contiguous(), requires_grad=old.requires_grad)
                setattr(new, short, made.setdefault(id(old), held))
        new.train(swap.old.training)
        for parent, short in places[swap.old]:
            parent._modules[short] = new


def _column(swap: Swap, state: State) -> nn.Module:
    out_features, in_features = _weight(swap.old).shape
    if _is_transposed(swap.old):
        return ColumnConv1D(in_features, out_features, stride=swap.stacked, state=state)
    return ColumnLinear(
        in_features,
        out_features,
        bias=_has_bias(swap.old),
        gather_output=False,
        stride=swap.stacked,
        state=state,
        device="meta",
    )


def _row(swap: Swap, state: State) -> nn.Module:
    out_features, in_features = _weight(swap.old).shape
    if _is_transposed(swap.old):
        return RowConv1D(in_features, out_features, state=state)
    bias = _has_bias(swap.old)
    return RowLinear(in_features, out_features, bias=bias, input_is_parallel=True, state=state, device="meta")


def _head(swap: Swap, state: State) -> nn.Module:
    out_features, in_features = _weight(swap.old).shape
    bias = _has_bias(swap.old)
    return HeadLinear(in_features, out_features, bias=bias, state=state, device="meta", dtype=None)


def _embedding(swap: Swap, state: State) -> nn.Module:
    assert isinstance(swap.old, nn.Embedding)
    rows, features = swap.old.weight.shape
    padding = swap.old.padding_idx
    return VocabParallelEmbedding(rows, features, padding_idx=padding, state=state, device="meta")


_BUILD: dict[str, Callable[[Swap, State], nn.Module]] = {
    "column": _column,
    "row": _row,
    "head": _head,
    "embedding": _embedding,
}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's linear layer in `transformers`: its weight is (in_features, out_features)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Conv1d)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return _oriented(module, weight)


def _oriented(module: nn.Module, weight: Tensor) -> Tensor:
    return weight.t() if _is_transposed(module) else weight


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None
