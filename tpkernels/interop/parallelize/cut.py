"""One rank's shard of a dimension and of a module, and dropout of split features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels.layers.world import TensorWorld
from tpkernels.topology.sizes import HeadSplit, stacked_ranges


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
