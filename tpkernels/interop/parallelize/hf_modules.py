"""Layers that take the place of torch's: called as those are, with this rank's part of their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State
from tpkernels.topology.shard import shard_size
from tpkernels.topology.vocabulary import split_vocabulary

# Dynamo cannot trace transfers: its graph ends before this one.
_gather = torch.compiler.disable(ops.vocab_gather)


class ColumnLinear(ColumnParallelLinear):
    """Called like nn.Linear; returns this rank's features."""

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_)[0]


class RowLinear(RowParallelLinear):
    """Called like nn.Linear, with this rank's features."""

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_)[0]


class ColumnConv1D(ParallelModule):
    """Called like the Conv1D of `transformers`, a linear layer; returns this rank's features.

    The weight lies as it does there, (in_features, out_features / R), so that checkpoints fit it.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, in_features: int, out_features: int, *, stride: int, state: State) -> None:
        """The weights are left for the caller to set."""
        super().__init__(state)
        self.in_features = in_features
        own = shard_size(out_features, self.world.size, "out_features", stride)
        columns, split = Attributes(True, 1, stride), Attributes(True, 0, stride)
        self.add_parameter("weight", (in_features, own), columns, device="meta", dtype=None)
        self.add_parameter("bias", (own,), split, device="meta", dtype=None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features / R)"""
        self.require_features(x, self.in_features, "every rank needs all of them")
        features: Tensor = ops.column_linear(x, self.weight.t(), self.bias, self.world.group)
        return features


class RowConv1D(ParallelModule):
    """Called like the Conv1D of `transformers`, with this rank's features; the weight as it lies there."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, in_features: int, out_features: int, *, state: State) -> None:
        """The weights are left for the caller to set."""
        super().__init__(state)
        self.own_features = shard_size(in_features, self.world.size, "in_features")
        rows = Attributes(True, 0)
        self.add_parameter("weight", (self.own_features, out_features), rows, device="meta", dtype=None)
        self.add_parameter("bias", (out_features,), Attributes(), device="meta", dtype=None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features / R) -> (..., out_features)"""
        self.require_features(x, self.own_features, "it takes this rank's features")
        return ops.row_linear(x, self.weight.t(), self.bias, self.world.group)


class HeadLinear(ParallelModule):
    """Called like nn.Linear; returns all features, which ranks need not divide: padding is cut off."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        state: State,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """The weights are left for the caller to set."""
        super().__init__(state)
        self.in_features = in_features
        self.out_features = out_features
        self.split = split_vocabulary(out_features, ranks=self.world.size)
        marked = Attributes(tensor_model_parallel=True, partition_dim=0)
        rows = self.split.shard_size
        self.add_parameter("weight", (rows, in_features), marked, device=device, dtype=dtype)
        if bias:
            self.add_parameter("bias", (rows,), marked, device=device, dtype=dtype)
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)"""
        self.require_features(input_, self.in_features, "every rank needs all of them")
        group = self.world.group
        features = ops.column_linear(input_, self.weight, self.bias, group)
        output: Tensor = _gather(features, group, vocab_size=self.out_features)
        return output

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.world}"
