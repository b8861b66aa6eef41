"""A Llama of torch's own modules, split by torch's own tensor parallelism: what ours is timed against.

Tokens are the first dimension, as in our model, so that torch gathers and scatters without a copy, too. The
plan is the one that PyTorch's tutorial on tensor parallelism recommends: sequence parallelism between the
products, a loss that never gathers the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpkernels import GPTConfig
from tpkernels.layers.attention import Rotation, rotate, rotation


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.head_size = width // heads
        features = (config.num_kv_heads or heads) * self.head_size
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, features, bias=False)
        self.value = nn.Linear(width, features, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        heads = (*hidden.shape[:2], -1, self.head_size)
        query, key = rotate(self.query(hidden).view(heads), by), rotate(self.key(hidden).view(heads), by)
        value = self.value(hidden).view(heads)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.output(mixed.permute(2, 0, 1, 3).flatten(2))
        return output


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.ffn_hidden_size or 4 * width
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return down


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, by: Rotation) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), by)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class PlainLlama(nn.Module):
    """Sizes of a GPTConfig with rotary positions, SwiGLU, RMSNorm, no biases, and a head of its own."""

    def __init__(self, config: GPTConfig, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.by = rotation(tokens, config.hidden_size // config.num_heads, config.rotary_base)

    def forward(self, ids: Tensor) -> Tensor:
        """(tokens, batch) -> (tokens, batch, vocab_size)"""
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden, self.by)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def take(self, whole: Mapping[str, Tensor]) -> None:
        """Go on from the weights of our model, by its names."""
        self.load_state_dict({name.replace(".qkv", ""): tensor for name, tensor in whole.items()})


def split_by_torch(model: PlainLlama, mesh: DeviceMesh) -> None:
    """In place; the logits stay a DTensor whose columns are split, for `loss_parallel`."""
    of_tokens, whole = Shard(0), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=of_tokens),
            "norm": SequenceParallel(sequence_dim=0),
            "head": ColwiseParallel(
                input_layouts=of_tokens, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan(sequence_parallel=True))


def block_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Of a Block, whose tokens are split between products, or are not."""
    between = Shard(0) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        plan |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel(sequence_dim=0))
    return plan
