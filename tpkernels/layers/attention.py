"""Self-attention with heads split over the tensor-parallel ranks, its rotary positions and its dropout.

One all-gather of tokens serves the projections to queries, keys and values of this rank's heads.

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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.groups.random import get_rng_tracker
from tpkernels.groups.sizes import head_size_of, require_heads
from tpkernels.layers.batches import compare_inputs
from tpkernels.layers.checkpoint import checkpoint
from tpkernels.layers.initial import InitMethod
from tpkernels.layers.linear import ColumnParallelLinear, RowParallelLinear
from tpkernels.layers.options import DEFAULT, LayerOptions, LinearOptions, Unpack, takes
from tpkernels.layers.world import tensor_world
from tpkernels.ops.tensor_parallel.mappings import copy_to_region, gather_from_sequence_region
from tpkernels.ops.tensor_parallel.segment_heads import segment_heads
from tpkernels.tp_invariance import given_or_default


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
        layers = self.query, self.key, self.value  # which differ in their weights alone
        first = self.query
        first.require_features(hidden, first.input_size, "every rank needs all of them")
        weights, main_grads = zip(*[layer.weight_and_main_grad() for layer in layers], strict=True)
        query, key, value = ops.column_linear(
            hidden,
            weights,
            [layer.bias for layer in layers],
            self.world.group,
            sequence_parallel=first.sequence_parallel,
            overlap=first.overlap,
            main_grad=main_grads,
            quantize=first.quantize,
            tp_invariant=self.world.tp_invariant,
        )
        if self.num_kv_heads < (segments := self.world.tp_invariant):
            group = self.world.group
            key, value = (
                segment_heads(x, group, self.num_kv_heads, tp_invariant=segments) for x in (key, value)
            )
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
        heads = gather_from_sequence_region(features_first, self.world.group, tp_invariant=0)
        own = self.world.rank * self.num_kv_heads // self.world.size
        one = heads[own * self.head_size :][: self.head_size].movedim(0, -1)
        return one.contiguous()  # for fused attention; and a view would keep all heads in memory


class ParallelAttention(nn.Module):
    """Self-attention softmax(Q Kᵀ / √d) V and its projections; each rank computes its shard of the heads.

    num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads; there may be
        fewer than ranks
    head_size: by default hidden_size / num_heads
    rotary: rotate queries and keys by their positions
    causal: a token attends to itself and those before it
    dropout: probability for attention weights, in training; each rank draws for its own heads
    recompute: save queries, keys and values only, and compute attention again in backward
    output_layer_init_method: fills the full output weight; by default init_method
    Others as in RowParallelLinear and `LayerOptions`. Attention itself is never computed in fp8.
    """

    @takes(LinearOptions)
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        rotary: bool = True,
        rotary_base: float = 10_000.0,
        causal: bool = True,
        dropout: float = 0.0,
        recompute: bool = False,
        bias: bool = True,
        init_method: InitMethod = nn.init.xavier_normal_,
        output_layer_init_method: InitMethod | None = None,
        skip_bias_add: bool = False,
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size_of(hidden_size, num_heads, head_size, rotary=rotary)
        world = tensor_world(options.state, options.tp_invariant)
        require_heads(num_heads, num_kv_heads, self.head_size, world.size)
        if segments := world.segments:
            require_heads(
                num_heads, num_kv_heads, self.head_size, world.tp_invariant, "segments of TP-invariance"
            )
        self.segments = segments
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.rotary_base = rotary_base if rotary else None
        self.causal = causal
        self.dropout = require_dropout("dropout", dropout, world.tp_invariant)
        self.recompute = recompute
        column = partial(
            ColumnParallelLinear, bias=bias, gather_output=False, init_method=init_method, options=options
        )
        self.qkv = ParallelQKV(hidden_size, num_heads, num_kv_heads, self.head_size, column)
        self.output = RowParallelLinear(
            num_heads * self.head_size,
            hidden_size,
            bias,
            input_is_parallel=True,
            init_method=output_layer_init_method or init_method,
            skip_bias_add=skip_bias_add,
            options=options,
        )
        shards = ("hidden", "residual") if self.output.sequence_parallel else ()
        compare_inputs(self, world, shards=shards)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary: Rotation | None = None,
        residual: Tensor | None = None,
        norm: ops.Norm | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias), or with residual and norm what `RowParallelLinear` does.

        hidden: (tokens, batch, hidden_size), or this rank's tokens if sequence_parallel
        attention_mask: broadcastable to (batch, heads, tokens, tokens): boolean, True where a token may
            attend, or numbers that are added to the scores; combined with `causal`
        rotary: the rotation of the tokens' positions, by default 0, 1, ...
            Mask and rotation are replicated. Their gradients, if required, are summed over all heads
        output, residual: like hidden
        """
        if hidden.ndim != 3:
            raise ValueError(
                f"ParallelAttention: expected hidden (tokens, batch, hidden_size), got {tuple(hidden.shape)}"
            )
        mask = None if attention_mask is None else self._own_heads(self._of_all_heads(attention_mask))
        query, key, value = self.qkv(hidden)
        if self.rotary_base is not None:
            rotary = rotary or self.rotation(query.shape[0], query.dtype, query.device)
            rotary = Rotation(*map(self._of_all_heads, rotary))
            query, key = rotate(query, rotary), rotate(key, rotary)
        attend = partial(checkpoint, self._attend) if self.recompute and self.training else self._attend
        added = {} if residual is None and norm is None else {"residual": residual, "norm": norm}
        output, output_bias = self.output(attend(query, key, value, mask), **added)
        return output, output_bias

    def _of_all_heads(self, given: Tensor) -> Tensor:
        """Return a replicated tensor; if it requires gradients, backward all-reduces its gradient."""
        is_learnt = given.requires_grad and torch.is_grad_enabled()
        if not is_learnt:
            return given
        world = self.qkv.world
        return copy_to_region(given, world.group, tp_invariant=world.tp_invariant)

    def _own_heads(self, mask: Tensor) -> Tensor:
        """This rank's heads of a mask with an entry per head; any other mask as it is."""
        heads = mask.shape[-3] if mask.ndim > 2 else 1
        if heads not in (1, self.num_heads):
            raise ValueError(
                f"attention_mask: expected a mask broadcastable to (batch, {self.num_heads} heads, tokens, "
                f"tokens), got {tuple(mask.shape)}"
            )
        world = self.qkv.world
        return mask if heads == 1 else mask.chunk(world.size, -3)[world.rank]

    def rotation(self, tokens: int, dtype: torch.dtype, device: torch.device) -> Rotation:
        """Return the rotation of positions 0 to `tokens` - 1, which all layers of a model may share."""
        assert self.rotary_base is not None, "attention without rotary positions"
        wide = torch.promote_types(dtype, torch.float32)
        return rotation(tokens, self.head_size, self.rotary_base, dtype=wide, device=device)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention of this rank's heads; return (tokens, batch, features of these heads)."""
        tokens = query.shape[0]
        if mask is not None and self.causal:
            mask = _and_before(mask, tokens)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if not self.segments:
            return self._mixed(query, key, value, mask).permute(2, 0, 1, 3).flatten(2)
        count = self.segments  # one call a segment: libraries may choose an algorithm by the number of heads
        heads = [[part.contiguous() for part in x.chunk(count, 1)] for x in (query, key, value)]
        by_head = mask is not None and mask.ndim > 2 and mask.shape[-3] > 1
        masks = mask.chunk(count, -3) if mask is not None and by_head else [mask] * count
        mixed = torch.cat(list(map(self._mixed, *heads, masks)), 1)
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention of some heads; all tensors are (batch, heads, tokens, features of a head)."""
        with own_stream(self._drops and self.qkv.world.size > 1):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self.dropout if self._drops else 0.0,
                is_causal=self.causal and mask is None,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    @property
    def _drops(self) -> bool:
        return self.training and self.dropout > 0


def _and_before(mask: Tensor, tokens: int) -> Tensor:
    """Combine `mask` with the causal mask."""
    before = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
    return mask & before if mask.dtype == torch.bool else mask.masked_fill(~before, -torch.inf)


class Rotation(NamedTuple):
    """Cosine and sine of the angles of rotary positions: (positions, head_size / 2)."""

    cos: Tensor
    sin: Tensor


def rotation(
    positions: int | Tensor,
    head_size: int,
    base: float = 10_000.0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Rotation:
    """Cosine and sine of angles t / base^(2i / head_size), for positions t and pairs i of features.

    positions: a tensor of positions, or their number n for 0, ..., n - 1

    Computed in float64: in float32, angles of late positions are off in the fourth digit.
    """
    if isinstance(positions, int):
        positions = torch.arange(positions, device=device)
    pairs = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[:, None] * base ** (-pairs / head_size)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate features i and i + head_size / 2 of each head, as in Llama, in the dtype of the rotation.

    x, result: (positions, batch, heads, head_size)
    """
    expected = x.shape[0], x.shape[-1] // 2
    if any(tuple(part.shape) != expected for part in rotation):
        raise ValueError(
            f"rotary: expected the rotation of {expected[0]} positions and {expected[1]} pairs of features, "
            f"got {tuple(rotation.cos.shape)}"
        )
    cos, sin = (part[:, None, None, :] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def own_stream(is_split: bool) -> AbstractContextManager[None]:
    """Draw from this rank's own random stream if is_split, else from the stream that all ranks share."""
    return get_rng_tracker().fork() if is_split else nullcontext()


class ParallelDropout(nn.Module):
    """Dropout: in training, zeroes each element with probability `p`, and scales the others by 1 / (1 - p).

    is_split: True: the input is a shard, and each rank draws its own numbers; False: all ranks draw the same
    tp_invariant: as in `LayerOptions`
    """

    def __init__(self, p: float, *, is_split: bool, tp_invariant: int | None = None) -> None:
        super().__init__()
        self.p = require_dropout("p", p, given_or_default(tp_invariant))
        self.is_split = is_split

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        with own_stream(self.is_split):
            return F.dropout(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, is_split={self.is_split}"


def require_dropout(name: str, p: float, segments: int) -> float:
    """Return a probability; raise unless it is one, and 0 with segments of TP-invariance."""
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: expected a probability from 0 to 1, got {p}")
    if p and segments:
        raise ValueError(
            f"dropout: expected 0 with TP-invariance, got {p}: each rank draws for its own shard, so the "
            "dropped elements depend on the number of ranks; set dropout to 0"
        )
    return p
