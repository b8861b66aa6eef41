"""The projections to queries, keys and values of this rank's heads, with one all-gather of tokens for all.

R ranks, H query heads, G heads of keys and values (G divides H; each serves H / G query heads):

    R divides H             rank r has query heads r H/R, ...
    R divides G             and the G/R heads of keys and values that serve these
    G divides R, G < R      or the one that does; R/G ranks share it

In the last case weights are still sharded, not replicated: each rank computes a shard of the features of all
keys, shards are gathered, and each rank takes its head. In backward the gradients of ranks that share a head
are summed. With TP-invariance the same holds for its segments, see `ops/tensor_parallel/segment_heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.linear import ColumnParallelLinear
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region
from tpkernels.ops.tensor_parallel.segment_heads import segment_heads


class ParallelQKV(nn.Module):
    """The layers `query`, `key` and `value`, and this rank's heads of their outputs."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        column: Callable[[int, int], ColumnParallelLinear],
    ) -> None:
        """column: makes a column layer of (input_size, output_size) that does not gather its output"""
        super().__init__()
        self.head_size = head_size
        self.query = column(hidden_size, num_heads * head_size)
        self.key = column(hidden_size, num_kv_heads * head_size)
        self.value = column(hidden_size, num_kv_heads * head_size)
        self.world = self.query.world
        self.num_kv_heads = num_kv_heads

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each (tokens, batch, heads of this rank, head_size).

        With TP-invariance, if segments share heads of keys and values, these have a head for each segment.
        """
        query, key, value = columns_of(hidden, self.query, self.key, self.value)
        if self.num_kv_heads < self.world.segments * self.world.size:
            key, value = (segment_heads(x, self.world.group, self.num_kv_heads) for x in (key, value))
            own = query.shape[-1] // self.head_size
            return query.view(*query.shape[:-1], own, self.head_size), key, value
        if self.num_kv_heads < self.world.size:
            key, value = self._own_head(key), self._own_head(value)
        query, key, value = (
            x.view(*x.shape[:-1], x.shape[-1] // self.head_size, self.head_size) for x in (query, key, value)
        )
        return query, key, value

    def _own_head(self, shard: Tensor) -> Tensor:
        """Gather the features of all heads from the ranks' shards; return this rank's head."""
        features_first = shard.movedim(-1, 0).contiguous()
        heads = gather_from_sequence_region(features_first, self.world.group)
        own = self.world.rank * self.num_kv_heads // self.world.size
        one = heads[own * self.head_size :][: self.head_size].movedim(0, -1)
        return one.contiguous()  # for fused attention; and a view would keep all heads in memory


def columns_of(input_: Tensor, *layers: ColumnParallelLinear) -> Any:
    """Compute column layers that differ in their weights alone, with one gather of the input."""
    first = layers[0]
    first.require_features(input_, first.input_size, "every rank needs all of them")
    pairs = [layer.weight_and_main_grad() for layer in layers]
    return ops.column_linear(
        input_,
        [weight for weight, _ in pairs],
        [layer.bias for layer in layers],
        first.world.group,
        activation=first.activation,
        sequence_parallel=first.sequence_parallel,
        overlap=first.overlap,
        main_grad=[main_grad for _, main_grad in pairs],
        quantize=first.quantize,
    )
