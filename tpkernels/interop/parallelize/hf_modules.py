"""Modules of a split model: layers that replace others, and kept modules that hold this rank's shards.

Layers that replace `nn.Linear`, `nn.Embedding` and `Conv1D`, the linear layer of GPT-2 in `transformers`, are
called alike; their parameters are on the meta device until the caller sets them. A kept module gets a new
class, derived from its own and from ours: its parameters keep their marks, and it computes as before, on
shards. A `Cut` is one rank's shard of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tpkernels import ops
from tpkernels.groups.sizes import HeadSplit, VocabularySplit, stacked_ranges
from tpkernels.interop.parallelize.tokens import Tokens, precomputed_output
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.linear import VocabParallelEmbedding, with_recipe
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel.mappings import copy_to_region, reduce_from_region, scatter_to_region


@dataclass(frozen=True)
class Cut:
    """This rank's ranges along one dimension.

    size: the shard's size, padding included
    full: the dimension's size
    stride: the number of weights that are concatenated along it
    """

    dim: int
    ranges: tuple[range, ...]
    size: int
    full: int
    stride: int = 1

    @staticmethod
    def along(dim: int, stacks: tuple[int, ...], world: TensorWorld) -> Cut:
        """Return the cut for this rank's shard of each concatenated weight."""
        full = sum(stacks)
        ranges = stacked_ranges(world.rank, stacks, world.size)
        return Cut(dim, ranges, full // world.size, full, stride=len(stacks))

    def of(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard, padded, in new memory."""
        dim = self.dim % tensor.ndim
        own = torch.cat([tensor.narrow(dim, each.start, len(each)) for each in self.ranges], dim)
        missing = self.size - own.shape[dim]
        return F.pad(own, (*[0, 0] * (own.ndim - 1 - dim), 0, missing)) if missing else own


def stacks_of(size: int, stacked: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the weights that are concatenated along a dimension.

    stacked: the number of equal weights, or the size of each
    """
    if isinstance(stacked, tuple):
        return stacked
    return (size // stacked,) * stacked


@dataclass(frozen=True)
class ModuleChange:
    """A module with split parameters: replaced, or kept with shards in it (`parameters`, `table`).

    kind: a kind of `Split`, shared_heads, parameters or table
    cuts: this rank's cut of each parameter; None: the full parameter
    features: this rank's features of the output, for a column, or of the input, for a row
    stacks: sizes of the concatenated weights, if they differ
    reads: the output features that this rank computes, for shared heads
    split: how features, or rows of a vocabulary, are padded if ranks do not divide them
    """

    name: str
    old: nn.Module
    kind: str
    cuts: Mapping[str, Cut | None]
    features: Cut | None = None
    stacks: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    summed: bool = False
    split: HeadSplit | VocabularySplit | None = None

    @property
    def marks(self) -> dict[str, Attributes]:
        """Megatron's attributes of each parameter."""
        return {
            short: Attributes() if cut is None else Attributes(True, cut.dim, cut.stride)
            for short, cut in self.cuts.items()
        }

    def shard_of(self, short: str, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a parameter, or of its gradient, in new memory."""
        cut = self.cuts.get(short)
        return tensor.clone() if cut is None else cut.of(tensor)

    @property
    def narrows_output(self) -> bool:
        """Whether the module returns this rank's features only."""
        return self.kind in ("column", "shared_heads")

    def own_output(self, output: Tensor) -> Tensor:
        """Return this rank's layer's output, given the module's full `output`."""
        if self.kind == "shared_heads":
            return output.index_select(-1, torch.tensor(self.reads, device=output.device))
        if self.kind == "column" and self.features is not None:
            return self.features.of(output)
        return output


class SplitDropout(nn.Dropout):
    """Dropout of features split over ranks in the last dimension.

    features: this rank's cut
    """

    def __init__(self, p: float, features: Cut) -> None:
        super().__init__(p)
        self.features = features

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        mask = F.dropout(input.new_ones(*input.shape[:-1], self.features.full), self.p)
        return input * self.features.of(mask)


def split_module(change: ModuleChange, state: State) -> nn.Module:
    """Return the layer that replaces a module on this rank, or the kept module; the caller sets shards."""
    kind, old = change.kind, change.old
    if kind in ("parameters", "table"):
        return _adopt(change, state)
    if isinstance(old, nn.Embedding):
        if kind == "column":
            return ColumnEmbedding(change, state)
        sizes, padding = (old.num_embeddings, old.embedding_dim), old.padding_idx
        return VocabParallelEmbedding(*sizes, padding_idx=padding, state=state, device="meta")
    return LINEAR[kind](change, state)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of `transformers`, whose weight is (in_features, out_features)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Conv1d)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or of a derived class that computes the same.

    A derived module is called with small and with large numbers, because it might clamp them; on the meta
    device a copy with small weights is called.
    """
    if type(module) is nn.Linear or not isinstance(module, nn.Linear) or isinstance(module, ParallelModule):
        return type(module) is nn.Linear
    more = module._buffers or module._modules or set(module._parameters) != {"weight", "bias"}
    if more or not module.weight.is_floating_point():
        return False
    with torch.no_grad():
        if module.weight.is_meta:
            module = _with_numbers(module)
        weight = module.weight
        x = torch.arange(2 * weight.shape[1], device=weight.device).view(2, -1).cos()
        x = (x * torch.tensor([[1.0], [1000.0]], device=weight.device)).to(weight.dtype)
        found, expected = module(x), F.linear(x, weight, module.bias)
    rounding = 1e-2 if weight.element_size() < 4 else 1e-5  # relative to the largest of a row
    bound = rounding * expected.abs().amax(1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= bound).all())


def _with_numbers(module: nn.Linear) -> nn.Linear:
    """Return a linear layer of the same class with a weight of (3, 5) on the CPU."""
    made = copy(module)
    shapes = {"weight": (3, 5), "bias": (3,)}
    made._parameters = {
        short: p
        if p is None
        else nn.Parameter(torch.arange(prod(shapes[short])).sin().view(shapes[short]).to(p.dtype))
        for short, p in module._parameters.items()
    }
    vars(made).update(in_features=5, out_features=3)
    return made


def oriented_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out_features, in_features) of a module's weight; of an embedding (ids, features)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


class SplitLayer(ParallelModule):
    """Base class of layers that replace `nn.Linear`, `Conv1D` and `nn.Embedding`.

    split, stacks, reads: as in `ModuleChange`
    is_conv1d: the weight keeps Conv1D's layout, (in_features, out_features), so that checkpoints fit
    tokens: under sequence parallelism, the tokens of the model
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    tokens: Tokens | None = None
    quantize: Recipe | None = None

    def __init__(self, change: ModuleChange, state: State) -> None:
        super().__init__(state)
        self.out_features, self.in_features = oriented_shape(change.old)
        self.is_conv1d = is_conv1d(change.old)
        self.split, self.stacks, self.reads = change.split, change.stacks, change.reads
        for short in ("weight", "bias"):
            shape = (0,) if short in change.cuts else None
            self.add_parameter(short, shape, change.marks.get(short, Attributes()), device="meta")

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in nn.Linear's layout."""
        return self.weight.t() if self.is_conv1d else self.weight, self.bias

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., in_features) -> (..., rows of the weight)"""
        self.require_features(x, self.in_features, "every rank needs all of them")
        y: Tensor = ops.column_linear(
            x, weight, bias, self.world.group, quantize=self.quantize, tp_invariant=0
        )
        return y

    def extra_repr(self) -> str:
        said = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.world}"
        if isinstance(self.split, HeadSplit):
            said += f", padded from {self.split.size} features"
        return with_recipe(said, self.quantize)


class ColumnLinear(SplitLayer):
    """Takes all features, returns this rank's: `compute_columns` computes it if it gathers tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features / R)"""
        if self.tokens is not None:
            return precomputed_output(self)
        return self.columns(x, *self.weight_and_bias())


class HeadLinear(SplitLayer):
    """Its output features are split and gathered; their number need not be a multiple of the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        features = self.columns(x, *self.weight_and_bias())
        return ops.vocab_gather(features, self.world.group, vocab_size=self.out_features)


class SharedHeadsLinear(SplitLayer):
    """Has a replicated weight, and returns the features that this rank's queries read."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., features of the heads that are read)"""
        group, reads = self.world.group, torch.tensor(self.reads, device=x.device)
        weight = copy_to_region(self.weight, group).index_select(0, reads)
        bias = None if self.bias is None else copy_to_region(self.bias, group).index_select(0, reads)
        return self.columns(x, weight, bias)


class RowLinear(SplitLayer):
    """Takes this rank's features, returns all.

    Padding enters no product, and its gradients are zero, in this layer and in the layers before it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features / R) -> (..., out_features)"""
        weight, bias = self.weight_and_bias()
        own = weight.shape[1]
        self.require_features(x, own, "it takes this rank's features")
        if isinstance(self.split, HeadSplit) and (real := len(self.split.features_of(self.world.rank))) < own:
            x = F.pad(x[..., :real], (0, own - real))
        if self.tokens is not None:
            return self.tokens.row_linear(x, weight, bias, self.quantize)
        return ops.row_linear(x, weight, bias, self.world.group, quantize=self.quantize, tp_invariant=0)


class RowOfFullLinear(RowLinear):
    """Takes all features, uses this rank's, returns all."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        return super().forward(scatter_to_region(x, self.world.group))


LINEAR: dict[str, type[SplitLayer]] = {
    "column": ColumnLinear,
    "head": HeadLinear,
    "shared_heads": SharedHeadsLinear,
    "row": RowLinear,
    "row_of_full": RowOfFullLinear,
}


class ColumnEmbedding(SplitLayer):
    """An nn.Embedding that returns this rank's features of each row."""

    def __init__(self, change: ModuleChange, state: State) -> None:
        super().__init__(change, state)
        self.padding_idx = change.old.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx)  # type: ignore[arg-type]


def _adopt(change: ModuleChange, state: State) -> nn.Module:
    """Change a kept module's class to hold shards of its parameters, which the caller sets.

    A table's own forward calls ours; that of other modules is called by ours.
    """
    module = change.old
    own: Any = type(module)
    ours = SummedModule if change.summed else ParallelModule
    bases = (own, SplitTable) if change.kind == "table" else (ours, own)
    module.__class__ = _derived(own.__name__, *bases)
    assert isinstance(module, ParallelModule)
    module.adopt(state, change.marks)
    if isinstance(module, SplitTable):
        module.split = change.split
    if isinstance(module, SummedModule):
        module.added_once = tuple(name for name, cut in change.cuts.items() if cut is None)
    return module


class SummedModule(ParallelModule):
    """A module, such as experts, that takes full features and sums the ranks' partial outputs."""

    added_once: tuple[str, ...]

    def forward(self, *args: Any, **named: Any) -> Any:  # those of the module's own class
        args, named = self._moved(copy_to_region, (args, named))
        with self._biases_of_first_rank():
            partial = super().forward(*args, **named)
        return self._moved(reduce_from_region, partial)

    def _moved(self, move: Callable[[Tensor, Any], Tensor], values: Any) -> Any:
        """Apply `move` to each floating-point tensor in the values."""
        group = self.world.group
        return tree_map(
            lambda x: move(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x, values
        )

    @contextmanager
    def _biases_of_first_rank(self) -> Iterator[None]:
        """Zero biases on all ranks but the first inside the block; all ranks get the first's gradients."""
        try:
            for name in self.added_once:
                parameter = getattr(self, name)
                bias = copy_to_region(parameter, self.world.group)
                own = bias if self.world.rank == 0 else torch.zeros_like(bias) * bias
                object.__setattr__(self, name, own)  # an attribute of that name hides the parameter
            yield
        finally:
            for name in self.added_once:
                vars(self).pop(name, None)


class SplitTable(ParallelModule, nn.Embedding):
    """The base of a class derived from nn.Embedding: looks up rows that are split over ranks."""

    split: HeadSplit | VocabularySplit | None

    def forward(self, input: Tensor) -> Tensor:
        return ops.vocab_embedding(
            input,
            self.weight,
            self.world.group,
            padding_idx=self.padding_idx,
            vocab_size=self.num_embeddings,
        )


@cache
def _derived(name: str, *bases: Any) -> type[Any]:
    return type(f"Split{name}", bases, {})
