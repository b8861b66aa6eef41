"""Modules of a split model: layers that replace others, and kept modules that hold this rank's shards.

Layers that replace `nn.Linear`, `nn.Embedding` and `Conv1D`, the linear layer of GPT-2 in `transformers`, are
called alike; their parameters are on the meta device until the caller sets them. A kept module gets a new
class, derived from its own and from ours: its parameters keep their marks, and it computes as before, on
shards. A `Cut` is one rank's shard of a dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tpkernels import ops
from tpkernels.groups.sizes import HeadSplit, VocabularySplit, shard_size, split_vocabulary, stacked_ranges
from tpkernels.interop.parallelize.tokens import Tokens, precomputed_output
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    with_recipe,
)
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State, TensorWorld
from tpkernels.ops.quantize import Recipe
from tpkernels.ops.tensor_parallel.mappings import copy_to_region, reduce_from_region, scatter_to_region


@dataclass(frozen=True)
class Cut:
    """This rank's ranges along one dimension.

    size: the shard's size, padding included
    full: the dimension's size
    """

    dim: int
    ranges: tuple[range, ...]
    size: int
    full: int

    @staticmethod
    def along(dim: int, stacks: tuple[int, ...], world: TensorWorld) -> Cut:
        """Return the cut for this rank's shard of each concatenated weight."""
        full = sum(stacks)
        return Cut(dim, stacked_ranges(world.rank, stacks, world.size), full // world.size, full)

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
    reads: the output features that this rank computes, for shared heads
    split: how features are padded if ranks do not divide them
    """

    name: str
    old: nn.Module
    kind: str
    cuts: Mapping[str, Cut | None]
    features: Cut | None = None
    stacks: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    summed: bool = False
    split: HeadSplit | None = None

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
    if kind == "parameters":
        return _adopt_parameters(change, state)
    if kind == "table":
        return _adopt_table(old, state)
    out_features, in_features = oriented_shape(old)
    bias = old._parameters.get("bias") is not None
    if isinstance(old, nn.Embedding):
        if kind == "column":
            return ColumnEmbedding(old, state=state)
        padding = old.padding_idx
        return VocabParallelEmbedding(
            out_features, in_features, padding_idx=padding, state=state, device="meta"
        )
    if kind == "head":
        return HeadLinear(in_features, out_features, bias=bias, state=state)
    if kind == "shared_heads":
        return SharedHeadsLinear(in_features, out_features, change.reads, bias=bias, state=state)
    if kind == "column":
        if is_conv1d(old):
            return ColumnConv1D(in_features, out_features, stacks=change.stacks, state=state)
        return ColumnLinear(
            in_features, out_features, change.stacks, bias=bias, split=change.split, state=state
        )
    if kind == "row_of_full":
        return RowOfFullLinear(in_features, out_features, bias=bias, state=state)
    if is_conv1d(old):
        return RowConv1D(in_features, out_features, state=state)
    return RowLinear(in_features, out_features, bias=bias, split=change.split, state=state)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of `transformers`, whose weight is (in_features, out_features)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not isinstance(module, nn.Conv1d)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or of a derived class that computes the same.

    A derived module is called with small and with large numbers, because it might clamp them.
    """
    if type(module) is nn.Linear or not isinstance(module, nn.Linear) or isinstance(module, ParallelModule):
        return type(module) is nn.Linear
    weight = module.weight
    more = module._buffers or module._modules or set(module._parameters) != {"weight", "bias"}
    if more or weight.is_meta or not weight.is_floating_point():
        return False
    with torch.no_grad():
        x = torch.arange(2 * module.in_features, device=weight.device).view(2, -1).cos()
        x = (x * torch.tensor([[1.0], [1000.0]], device=weight.device)).to(weight.dtype)
        found, expected = module(x), F.linear(x, weight, module.bias)
    rounding = 1e-2 if weight.element_size() < 4 else 1e-5  # relative to the largest of a row
    bound = rounding * expected.abs().amax(1, keepdim=True)
    return found.shape == expected.shape and bool(((found - expected).abs() <= bound).all())


def oriented_shape(module: nn.Module) -> tuple[int, int]:
    """Return (out_features, in_features) of a module's weight; of an embedding (ids, features)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


class ColumnLinear(ColumnParallelLinear):
    """A column-parallel nn.Linear: takes all features, returns this rank's.

    stacks: sizes of the weights that are concatenated in this one
    split: how features are padded with zeros if ranks do not divide them
    """

    tokens: Tokens | None = None  # if set, `Columns` computes this layer when it gathers tokens

    def __init__(
        self,
        in_features: int,
        out_features: int,
        stacks: tuple[int, ...],
        *,
        bias: bool,
        split: HeadSplit | None,
        state: State,
    ) -> None:
        sizes = uneven(stacks)
        super().__init__(
            in_features,
            out_features if split is None else split.shard_size * split.ranks,
            bias=bias,
            gather_output=False,
            stride=1 if sizes else len(stacks),
            state=state,
            device="meta",
        )
        self.stacks = sizes
        self.split = split
        for parameter in self.parameters(recurse=False):
            vars(parameter)["partition_stride"] = len(stacks)

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_)[0] if self.tokens is None else precomputed_output(self)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in nn.Linear's layout."""
        assert self.weight is not None
        return self.weight, self.bias

    def extra_repr(self) -> str:
        return with_padding(super().extra_repr(), self.split)


class RowLinear(RowParallelLinear):
    """A row-parallel nn.Linear: takes this rank's features, returns all.

    split: how features are padded if ranks do not divide them: padding enters no product, and its gradients
        are zero, in this layer and in the layers before it
    """

    tokens: Tokens | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        split: HeadSplit | None = None,
        state: State,
    ) -> None:
        padded = in_features if split is None else split.shard_size * split.ranks
        super().__init__(padded, out_features, bias=bias, input_is_parallel=True, state=state, device="meta")
        self.split = split

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        if self.split is not None:
            own = len(self.split.features_of(self.world.rank))
            if own < self.split.shard_size:
                input_ = F.pad(input_[..., :own], (0, self.split.shard_size - own))
        if self.tokens is not None:
            assert self.weight is not None
            return self.tokens.row_linear(input_, self.weight, self.bias, self.quantize)
        return super().forward(input_)[0]

    def extra_repr(self) -> str:
        return with_padding(super().extra_repr(), self.split)


def with_padding(said: str, split: HeadSplit | None) -> str:
    """Append the number of features before padding to a layer's `extra_repr`."""
    return said if split is None else f"{said}, padded from {split.size} features"


class RowOfFullLinear(RowLinear):
    """A row-parallel nn.Linear that is called with all features and takes this rank's."""

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(scatter_to_region(input_, self.world.group))


class SharedHeadsLinear(ParallelModule):
    """An nn.Linear with a replicated weight that returns the features that this rank's queries read.

    reads: these features
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    quantize: Recipe | None = None

    def __init__(
        self, in_features: int, out_features: int, reads: tuple[int, ...], *, bias: bool, state: State
    ) -> None:
        super().__init__(state)
        self.in_features = in_features
        self.out_features = out_features
        self.reads = reads
        self.add_parameter("weight", (out_features, in_features), Attributes(), device="meta")
        self.add_parameter("bias", (out_features,) if bias else None, Attributes(), device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., features of the heads that are read)"""
        self.require_features(x, self.in_features, "every rank needs all of them")
        group = self.world.group
        reads = torch.tensor(self.reads, device=x.device)
        weight = copy_to_region(self.weight, group).index_select(0, reads)
        bias = None if self.bias is None else copy_to_region(self.bias, group).index_select(0, reads)
        return ops.column_linear(x, weight, bias, group, quantize=self.quantize)

    def extra_repr(self) -> str:
        said = f"{self.in_features}, {self.out_features}, {self.world} computes {len(self.reads)}"
        return with_recipe(said, self.quantize)


class ColumnEmbedding(ParallelModule):
    """An nn.Embedding that returns this rank's features of each row."""

    weight: nn.Parameter

    def __init__(self, old: nn.Embedding, *, state: State) -> None:
        super().__init__(state)
        self.padding_idx = old.padding_idx
        own = shard_size(old.embedding_dim, self.world.size, "embedding_dim")
        split = Attributes(tensor_model_parallel=True, partition_dim=1)
        self.add_parameter("weight", (old.num_embeddings, own), split, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, self.padding_idx)


def uneven(stacks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes if they differ; equal sizes need a stride only: see `checkpoints.shards`."""
    return stacks if len(set(stacks)) > 1 else ()


class ColumnConv1D(ParallelModule):
    """A column-parallel Conv1D: takes all features, returns this rank's.

    The weight keeps Conv1D's layout, (in_features, out_features / R), so that checkpoints fit.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    tokens: Tokens | None = None
    quantize: Recipe | None = None

    def __init__(self, in_features: int, out_features: int, *, stacks: tuple[int, ...], state: State) -> None:
        super().__init__(state)
        self.in_features = in_features
        self.stacks = uneven(stacks)
        own = shard_size(out_features, self.world.size, "out_features")
        columns, split = Attributes(True, 1, len(stacks)), Attributes(True, 0, len(stacks))
        self.add_parameter("weight", (in_features, own), columns, device="meta")
        self.add_parameter("bias", (own,), split, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features / R)"""
        self.require_features(x, self.in_features, "every rank needs all of them")
        if self.tokens is not None:
            return precomputed_output(self)
        weight, bias = self.weight_and_bias()
        features: Tensor = ops.column_linear(x, weight, bias, self.world.group, quantize=self.quantize)
        return features

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in nn.Linear's layout."""
        return self.weight.t(), self.bias

    def extra_repr(self) -> str:
        return with_recipe(f"{self.in_features}, {self.world}", self.quantize)


class RowConv1D(ParallelModule):
    """A row-parallel Conv1D: takes this rank's features; its weight is (in_features / R, out_features)."""

    weight: nn.Parameter
    bias: nn.Parameter
    tokens: Tokens | None = None
    quantize: Recipe | None = None

    def __init__(self, in_features: int, out_features: int, *, state: State) -> None:
        super().__init__(state)
        self.own_features = shard_size(in_features, self.world.size, "in_features")
        rows = Attributes(True, 0)
        self.add_parameter("weight", (self.own_features, out_features), rows, device="meta")
        self.add_parameter("bias", (out_features,), Attributes(), device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features / R) -> (..., out_features)"""
        self.require_features(x, self.own_features, "it takes this rank's features")
        if self.tokens is not None:
            return self.tokens.row_linear(x, self.weight.t(), self.bias, self.quantize)
        return ops.row_linear(x, self.weight.t(), self.bias, self.world.group, quantize=self.quantize)

    def extra_repr(self) -> str:
        return with_recipe(f"{self.own_features}, {self.world}", self.quantize)


class HeadLinear(ParallelModule):
    """An nn.Linear with split, gathered output features; their number need not be a multiple of the ranks."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    quantize: Recipe | None = None

    def __init__(self, in_features: int, out_features: int, *, bias: bool, state: State) -> None:
        super().__init__(state)
        self.in_features = in_features
        self.out_features = out_features
        self.split = split_vocabulary(out_features, ranks=self.world.size)
        marked = Attributes(tensor_model_parallel=True, partition_dim=0)
        rows = self.split.shard_size
        self.add_parameter("weight", (rows, in_features), marked, device="meta")
        self.add_parameter("bias", (rows,) if bias else None, marked, device="meta")

    def forward(self, input_: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        self.require_features(input_, self.in_features, "every rank needs all of them")
        group = self.world.group
        features = ops.column_linear(input_, self.weight, self.bias, group, quantize=self.quantize)
        return ops.vocab_gather(features, group, vocab_size=self.out_features)

    def extra_repr(self) -> str:
        said = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.world}"
        return with_recipe(said, self.quantize)


def _adopt_parameters(change: ModuleChange, state: State) -> nn.Module:
    """Change a module's class to hold shards of its parameters, which the caller sets; return the module.

    A cut of None is a bias that is added once for all ranks.
    """
    module, split = change.old, {name: cut for name, cut in change.cuts.items() if cut is not None}
    once = tuple(name for name in change.cuts if name not in split)
    marks = {
        name: Attributes(tensor_model_parallel=True, partition_dim=cut.dim, partition_stride=stride)
        for (name, cut), stride in zip(split.items(), change.stacks, strict=True)
    }
    own: Any = type(module)
    module.__class__ = _derived(own.__name__, SummedModule if change.summed else ParallelModule, own)
    assert isinstance(module, ParallelModule)
    module.adopt(state, marks | {name: Attributes() for name in once})
    if isinstance(module, SummedModule):
        module.added_once = once
    return module


def _adopt_table(module: nn.Module, state: State) -> nn.Module:
    """Change the class of a derived embedding to hold a shard of its rows, which the caller sets."""
    assert isinstance(module, nn.Embedding)
    own: Any = type(module)
    module.__class__ = _derived(own.__name__, own, SplitTable)  # its forward calls ours
    assert isinstance(module, SplitTable)
    module.adopt(state, {"weight": Attributes(tensor_model_parallel=True, partition_dim=0)})
    module.split = split_vocabulary(module.num_embeddings, ranks=module.world.size)
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

    split: VocabularySplit

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
