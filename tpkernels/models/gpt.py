"""A decoder-only transformer over a tensor-parallel group, with the architectures of GPT-2 and of Llama.

Ids are (batch, tokens), the same on all tensor-parallel ranks. Inside, tokens are the first dimension, and
under sequence parallelism each rank has its shard of the tokens between the products.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.attention import ParallelDropout, Rotation
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.block import Recompute, TransformerBlock
from tpkernels.layers.initial import fill_shard, fill_with_nan
from tpkernels.layers.linear import VocabParallelEmbedding
from tpkernels.layers.norm import LayerNorm, RMSNorm
from tpkernels.layers.options import DEFAULT, LayerOptions, LinearOptions, Unpack, takes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.models.config import GPTConfig
from tpkernels.ops.quantize import Recipe, require_recipe
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region, scatter_to_sequence_region
from tpkernels.tp_invariance import given_or_default

INITIAL_SPREAD = (
    0.02  # standard deviation of weights; for weights that add to the residual times 1 / sqrt(2 layers)
)


class PositionEmbedding(ParallelModule):
    """A learnt vector for each position, the same on every rank."""

    weight: nn.Parameter

    def __init__(self, max_positions: int, hidden_size: int, options: LayerOptions) -> None:
        super().__init__(options.state, options.tp_invariant)
        self.sequence_parallel = options.sequence_parallel and self.world.size > 1
        self.is_gathered = bool(self.world.tp_invariant) and self.sequence_parallel
        marked = Attributes(sequence_parallel=self.sequence_parallel and not self.is_gathered)
        shape = max_positions, hidden_size
        self.add_parameter("weight", shape, marked, device=options.device, dtype=options.dtype)
        if options.perform_initialization:
            self.reset_parameters()
        else:
            fill_with_nan(self.weight)

    def reset_parameters(self) -> None:
        drawn = partial(nn.init.normal_, std=INITIAL_SPREAD)
        whole = self.weight.shape[0], self.weight.shape[1]
        fill_shard(self.weight, drawn, full=whole, dim=0, ranges=[range(whole[0])])

    def forward(self, tokens: int) -> Tensor:
        """Return the embeddings of all positions, or of this rank's tokens: (tokens, 1, hidden_size)."""
        if tokens > self.weight.shape[0]:
            raise ValueError(
                f"expected at most {self.weight.shape[0]} tokens, as many as positions, got {tokens}"
            )
        if self.is_gathered:  # backward sums the gradient of all tokens alike on every rank
            return scatter_to_sequence_region(self.weight[:tokens, None], self.world.group)
        first, count = 0, tokens
        if self.sequence_parallel:
            count = tokens // self.world.size
            first = self.world.rank * count
        return self.weight[first : first + count, None]


class GPT(nn.Module):
    """A decoder-only transformer: embedding, blocks, a norm, and a head with logits split over ranks.

    recompute: as in `TransformerBlock`
    quantize: compute the blocks' products in fp8, and the head's with `Recipe(..., head=True)`
    Other arguments as in `LayerOptions`.
    """

    quantize: Recipe | None = None

    @takes(LinearOptions)
    def __init__(
        self,
        config: GPTConfig,
        *,
        dropout: float = 0.0,
        recompute: Recompute = "none",
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
    ) -> None:
        super().__init__()
        options = replace(options, tp_invariant=given_or_default(options.tp_invariant))
        device = options.device or torch.get_default_device()
        require_recipe("GPT", options.quantize, device, options.tp_invariant or 0)
        self.config = config
        self.quantize = options.quantize
        sizes = config.vocab_size, config.hidden_size
        drawn = partial(nn.init.normal_, std=INITIAL_SPREAD)
        of_output = partial(nn.init.normal_, std=INITIAL_SPREAD / math.sqrt(2 * config.num_layers))
        self.embedding = VocabParallelEmbedding(*sizes, init_method=drawn, options=options)
        self.world = self.embedding.world
        self.sequence_parallel = self.embedding.sequence_parallel
        self.positions = (
            None
            if config.max_positions is None
            else PositionEmbedding(config.max_positions, config.hidden_size, options)
        )
        self.dropout = ParallelDropout(
            dropout, is_split=self.sequence_parallel, tp_invariant=options.tp_invariant
        )
        self.blocks = nn.ModuleList(
            TransformerBlock(
                config.hidden_size,
                config.num_heads,
                config.ffn_hidden_size,
                num_kv_heads=config.num_kv_heads,
                rotary=config.max_positions is None,
                rotary_base=config.rotary_base,
                activation=config.activation,
                norm=config.norm,
                norm_eps=config.norm_eps,
                bias=config.bias,
                dropout=dropout,
                attention_dropout=dropout,
                recompute=recompute,
                init_method=drawn,
                output_layer_init_method=of_output,
                options=options,
            )
            for _ in range(config.num_layers)
        )
        norm = RMSNorm if config.norm == "rms_norm" else LayerNorm
        of_norm = replace(options, sequence_parallel=self.sequence_parallel)
        self.norm = norm(config.hidden_size, config.norm_eps, options=of_norm)
        # the head is a table, too: padded, split and drawn like the embedding
        of_head = replace(options, sequence_parallel=False)
        self.head = (
            None if config.tied else VocabParallelEmbedding(*sizes, init_method=drawn, options=of_head)
        )

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, ignore_index: int = -100) -> Tensor:
        """Return the mean loss of the targets, or without targets all logits, (batch, tokens, vocab_size).

        ids: (batch, tokens)
        targets: (batch, tokens), the id after each token; targets equal to ignore_index do not count
        """
        hidden = self.hidden(ids)
        if targets is None:
            logits = ops.vocab_gather(
                self.logits(hidden), self.world.group, vocab_size=self.config.vocab_size
            )
            return logits.transpose(0, 1)
        if targets.shape != ids.shape:
            raise ValueError(f"targets: expected {tuple(ids.shape)} like ids, got {tuple(targets.shape)}")
        return ops.linear_cross_entropy(
            hidden,
            self._head_weight,
            targets.t().contiguous(),
            self.world.group,
            ignore_index=ignore_index,
            vocab_size=self.config.vocab_size,
            sequence_parallel=self.sequence_parallel,
            quantize=self._head_recipe,
            tp_invariant=self.world.tp_invariant,
        )

    def hidden(self, ids: Tensor) -> Tensor:
        """Compute the input of the head: (tokens, batch, hidden_size), or this rank's tokens."""
        if ids.ndim != 2:
            raise ValueError(f"ids: expected (batch, tokens), got {tuple(ids.shape)}")
        tokens = ids.shape[1]
        if self.sequence_parallel and tokens % self.world.size:
            raise ValueError(
                f"ids: expected a number of tokens that the {self.world.size} tensor-parallel ranks divide, "
                f"got {tokens}; pad to a multiple of {self.world.size}"
            )
        hidden = self.embedding(ids.t().contiguous())
        rotary = None
        if self.positions is not None:
            hidden = hidden + self.positions(tokens).to(hidden.dtype)
        elif len(self.blocks):
            first = self.blocks[0]
            assert isinstance(first, TransformerBlock)
            rotary = first.attention.rotation(tokens, hidden.dtype, hidden.device)  # once for all blocks
        return self._through_blocks(self.dropout(hidden), rotary)

    def _through_blocks(self, hidden: Tensor, rotary: Rotation | None) -> Tensor:
        """Compute all blocks and the norm; a block ends in the norm that follows, where it may."""
        normed: Tensor | None = None
        for block, following in zip(self.blocks, [*self.blocks[1:], self.norm], strict=True):
            given = {} if normed is None else {"normed": normed}
            norm = block.ends_in(following) if isinstance(block, TransformerBlock) else None
            if norm is None:
                hidden, normed = block(hidden, rotary=rotary, **given), None
            else:
                hidden, normed = block(hidden, rotary=rotary, norm=norm, **given)
        return self.norm(hidden) if normed is None else normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of all tokens: (tokens, batch, columns of this rank)."""
        logits: Tensor = ops.column_linear(
            hidden,
            self._head_weight,
            None,
            self.world.group,
            sequence_parallel=self.sequence_parallel,
            quantize=self._head_recipe,
            tp_invariant=self.world.tp_invariant,
        )
        return logits

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `ids` with `count` more ids in each row, drawn one by one; the same on all ranks.

        ids: (batch, tokens)
        temperature, top_k, top_p, generator: as in `ops.vocab_sample`

        Each id takes a forward over all ids before it: there is no cache of keys and values.
        """
        if not ids.shape[-1]:
            raise ValueError("ids: expected at least one token to continue from")
        ranks, group = self.world.size, self.world.group
        for _ in range(count):
            padding = (
                -ids.shape[1] % ranks if self.sequence_parallel else 0
            )  # after the tokens, which do not attend to it
            hidden = self.hidden(nn.functional.pad(ids, (0, padding)))
            if self.sequence_parallel:
                hidden = gather_from_sequence_region(hidden, group, tp_invariant=self.world.tp_invariant)
            last = hidden[ids.shape[1] - 1]
            logits = ops.column_linear(
                last,
                self._head_weight,
                None,
                group,
                quantize=self._head_recipe,
                tp_invariant=self.world.tp_invariant,
            )
            drawn = ops.vocab_sample(
                logits,
                group,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                vocab_size=self.config.vocab_size,
                generator=generator,
            )
            ids = torch.cat([ids, drawn[:, None]], 1)
        return ids

    @property
    def _head_recipe(self) -> Recipe | None:
        return self.quantize if self.quantize is not None and self.quantize.head else None

    def extra_repr(self) -> str:
        return "" if self.quantize is None else f"quantize={self.quantize}"

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight
