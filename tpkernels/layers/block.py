"""A transformer layer: attention and an MLP, each with a norm before it and a residual around it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tpkernels.layers.attention import ParallelAttention, ParallelDropout, Rotation
from tpkernels.layers.checkpoint import checkpoint
from tpkernels.layers.init import InitMethod
from tpkernels.layers.mlp import ParallelMLP
from tpkernels.layers.norm import LayerNorm, RMSNorm
from tpkernels.layers.world import State
from tpkernels.ops.activations import Activation, Glu
from tpkernels.ops.quantize import Recipe

Norm = Literal["layer_norm", "rms_norm"]
Recompute = Literal["none", "selective", "full"]

_NORMS: dict[Norm, type[LayerNorm] | type[RMSNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class TransformerBlock(nn.Module):
    """A transformer layer with norms before its branches: h = x + attention(norm(x)), y = h + mlp(norm(h)).

    ffn_hidden_size: by default four times hidden_size
    norm: layer_norm or rms_norm, with `norm_eps`
    dropout: probability for both branches, in training; attention_dropout: for attention weights
    recompute: what backward computes again: "none"; "selective": softmax(Q Kᵀ) V; "full": the layer
    Others as in ParallelAttention and ParallelMLP. GPT-2's layer has rotary=False; Llama's has rotary=True,
    "swiglu", "rms_norm" and bias=False.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int | None = None,
        *,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        rotary: bool = True,
        rotary_base: float = 10_000.0,
        causal: bool = True,
        activation: Activation | Glu = "gelu_tanh",
        norm: Norm = "layer_norm",
        norm_eps: float = 1e-5,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        recompute: Recompute = "none",
        init_method: InitMethod = nn.init.xavier_normal_,
        output_layer_init_method: InitMethod | None = None,
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        overlap: bool = True,
        quantize: Recipe | None = None,
        state: State = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ValueError(f"norm: expected {' or '.join(_NORMS)}, got {norm!r}")
        if recompute not in ("none", "selective", "full"):
            raise ValueError(f"recompute: expected none, selective or full, got {recompute!r}")
        self.recompute = recompute
        shared: dict[str, Any] = {
            "bias": bias,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "sequence_parallel": sequence_parallel,
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "overlap": overlap,
            "quantize": quantize,
            "state": state,
            "device": device,
            "dtype": dtype,
        }
        self.attention = ParallelAttention(
            hidden_size,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rotary=rotary,
            rotary_base=rotary_base,
            causal=causal,
            dropout=attention_dropout,
            recompute=recompute == "selective",
            **shared,
        )
        self.mlp = ParallelMLP(
            hidden_size, ffn_hidden_size or 4 * hidden_size, activation=activation, **shared
        )
        is_split = sequence_parallel and self.mlp.world.size > 1
        normed = partial(
            _NORMS[norm],
            hidden_size,
            norm_eps,
            sequence_parallel=is_split,
            state=state,
            device=device,
            dtype=dtype,
        )
        self.attention_norm, self.mlp_norm = normed(), normed()
        self.dropout = ParallelDropout(dropout, is_split=is_split)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, *, rotary: Rotation | None = None
    ) -> Tensor:
        """Compute the layer. hidden, attention_mask, rotary: as in `ParallelAttention`"""
        if self.recompute == "full" and self.training:
            recomputed: Tensor = checkpoint(self._compute, hidden, attention_mask, rotary)
            return recomputed
        return self._compute(hidden, attention_mask, rotary)

    def _compute(self, hidden: Tensor, mask: Tensor | None, rotary: Rotation | None) -> Tensor:
        attended, _ = self.attention(self.attention_norm(hidden), mask, rotary=rotary)
        hidden = hidden + self.dropout(attended)
        mixed, _ = self.mlp(self.mlp_norm(hidden))
        result: Tensor = hidden + self.dropout(mixed)
        return result
