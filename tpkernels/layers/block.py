"""A transformer layer: attention and an MLP, each with a norm before it and a residual around it.

The MLP is one op: up-projection, activation or gated unit, down-projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.attention import ParallelAttention, ParallelDropout, Rotation
from tpkernels.layers.batches import compare_inputs
from tpkernels.layers.checkpoint import checkpoint
from tpkernels.layers.initial import InitMethod
from tpkernels.layers.linear import ColumnParallelLinear, RowParallelLinear, added_to, with_recipe
from tpkernels.layers.norm import LayerNorm, RMSNorm, is_bare, norm_for_op
from tpkernels.layers.options import DEFAULT, LayerOptions, LinearOptions, Unpack, takes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.ops.activations import ACTIVATIONS, GATE_OF, Activation, Glu
from tpkernels.ops.local.norm import NormKind
from tpkernels.ops.quantize import Recipe


class ParallelMLP(ParallelModule):
    """The MLP act(X Uᵀ + b) Dᵀ + c, or with a gated unit (f(X Gᵀ) * (X Uᵀ)) Dᵀ + c.

    activation: gelu_tanh, gelu, silu, relu or relu2; gated: swiglu, geglu or geglu_tanh
    bias: of both projections; with a gated unit of the down-projection only
    init_method: fills the full up-projection and gate; output_layer_init_method: the full down-projection, by
        default the same
    skip_bias_add: return the last bias instead of adding it
    sequence_parallel: X and the output are this rank's tokens (dimension 0)
    Others as in `LayerOptions`.

    Gate and up are two weights, `gate.weight` and `up.weight`, so that full ones can be split for another
    number of ranks. The three layers only hold parameters: their `forward` is not called, and hooks on them
    do not run.
    """

    quantize: Recipe | None = None

    @takes(LinearOptions)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: Activation | Glu = "gelu_tanh",
        bias: bool = True,
        init_method: InitMethod = nn.init.xavier_normal_,
        output_layer_init_method: InitMethod | None = None,
        skip_bias_add: bool = False,
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
    ) -> None:
        super().__init__(options.state, options.tp_invariant)
        if activation not in (*ACTIVATIONS, *GATE_OF):
            raise ValueError(
                f"ParallelMLP: expected an activation of {', '.join((*ACTIVATIONS, *GATE_OF))}; "
                f"got {activation!r}"
            )
        self.activation = activation
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = options.sequence_parallel and self.world.size > 1
        self.gradient_accumulation_fusion = options.gradient_accumulation_fusion
        self.overlap = options.overlap
        self.quantize = options.quantize
        gated = activation in GATE_OF
        up = partial(
            ColumnParallelLinear,
            hidden_size,
            ffn_hidden_size,
            gather_output=False,
            init_method=init_method,
            options=options,
        )
        self.up = up(bias=bias and not gated)
        self.gate = up(bias=False) if gated else None
        self.down = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            bias=bias,
            input_is_parallel=True,
            init_method=output_layer_init_method or init_method,
            skip_bias_add=skip_bias_add,
            options=options,
        )
        if not self.sequence_parallel:
            compare_inputs(self, self.world, until_activations=True)

    def forward(
        self, input_: Tensor, *, residual: Tensor | None = None, norm: ops.Norm | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias), or with residual and norm what `RowParallelLinear` does.

        input_: (tokens, ..., hidden_size), or this rank's tokens of dimension 0 if sequence_parallel
        output, residual: like the input
        """
        added = {} if residual is None and norm is None else added_to(self, residual, norm)
        up, gate, down = self.up, self.gate, self.down
        if input_.ndim < 1 or input_.shape[-1] != up.input_size:
            self.require_features(input_, up.input_size, "every rank needs all features")
        layers = [up, down] if gate is None else [up, gate, down]
        weights: Sequence[Tensor] = [layer.weight for layer in layers]
        main_grads: Sequence[Tensor | None] | None = None
        if self.gradient_accumulation_fusion:
            weights, main_grads = zip(*(layer.weight_and_main_grad() for layer in layers), strict=True)
        output = ops.parallel_mlp(
            input_,
            weights[0],
            up.bias,
            weights[-1],
            None if self.skip_bias_add else down.bias,
            self.world.group,
            activation=self.activation,
            w_gate_shard=None if gate is None else weights[1],
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
            main_grads=main_grads,
            quantize=self.quantize,
            tp_invariant=self.world.tp_invariant,
            **added,
        )
        return output if added else (output, down.bias if self.skip_bias_add else None)

    def extra_repr(self) -> str:
        said = f"activation={self.activation}, sequence_parallel={self.sequence_parallel}"
        return with_recipe(said, self.quantize)


Recompute = Literal["none", "selective", "full"]

_NORMS: dict[NormKind, type[LayerNorm] | type[RMSNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class TransformerBlock(nn.Module):
    """A transformer layer with norms before its branches: h = x + attention(norm(x)), y = h + mlp(norm(h)).

    ffn_hidden_size: by default four times hidden_size
    norm: layer_norm or rms_norm, with `norm_eps`
    dropout: probability for both branches, in training; attention_dropout: for attention weights
    recompute: what backward computes again: "none"; "selective": softmax(Q Kᵀ) V; "full": the layer
    Others as in ParallelAttention, ParallelMLP and `LayerOptions`. GPT-2's layer has rotary=False; Llama's
    has rotary=True, "swiglu", "rms_norm" and bias=False.
    """

    @takes(LinearOptions)
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
        norm: NormKind = "layer_norm",
        norm_eps: float = 1e-5,
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        recompute: Recompute = "none",
        init_method: InitMethod = nn.init.xavier_normal_,
        output_layer_init_method: InitMethod | None = None,
        options: LayerOptions = DEFAULT,
        **_: Unpack[LinearOptions],
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
            "options": options,
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
        is_split = options.sequence_parallel and self.mlp.world.size > 1
        of_norms = replace(options, sequence_parallel=is_split)
        normed = partial(_NORMS[norm], hidden_size, norm_eps, options=of_norms)
        self.attention_norm, self.mlp_norm = normed(), normed()
        self.dropout = ParallelDropout(dropout, is_split=is_split, tp_invariant=options.tp_invariant)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary: Rotation | None = None,
        normed: Tensor | None = None,
        norm: ops.Norm | None = None,
    ) -> Any:
        """Compute the layer. hidden, attention_mask, rotary: as in `ParallelAttention`

        normed: what `attention_norm` returns, if the layer before has computed it
        norm: of the layer that follows, by `ends_in`; then return the output and what that norm returns
        """
        if self.recompute == "full" and self.training:
            return checkpoint(self._compute, hidden, attention_mask, rotary, normed, norm)
        return self._compute(hidden, attention_mask, rotary, normed, norm)

    def _compute(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        rotary: Rotation | None,
        normed: Tensor | None,
        norm: ops.Norm | None,
    ) -> Any:
        normed = self.attention_norm(hidden) if normed is None else normed
        own = self._norm_behind(self.attention, self.mlp_norm)
        if own is not None:
            hidden, normed = self.attention(normed, mask, rotary=rotary, residual=hidden, norm=own)
        else:
            attended, _ = self.attention(normed, mask, rotary=rotary)
            hidden = hidden + self.dropout(attended)
            normed = self.mlp_norm(hidden)
        if norm is not None:
            return self.mlp(normed, residual=hidden, norm=norm)
        mixed, _ = self.mlp(normed)
        return hidden + self.dropout(mixed)

    def ends_in(self, following: nn.Module) -> ops.Norm | None:
        """Return the norm of `following`, which begins with it, if this layer may compute it; else None.

        With recompute="full" backward would keep what it returns as well.
        """
        layers = self, following if isinstance(following, TransformerBlock) else self
        if self.recompute == "full" or any(type(one) is not TransformerBlock for one in layers):
            return None
        norm = following.attention_norm if isinstance(following, TransformerBlock) else following
        return self._norm_behind(self.mlp, norm) if all(map(is_bare, layers)) else None

    def _norm_behind(self, branch: nn.Module, norm: nn.Module) -> ops.Norm | None:
        """Return a norm as the branch before it takes it; None if it is to be called.

        A branch is to return its output if that is dropped from, or if hooks see it.
        """
        last: Any = branch.output if type(branch) is ParallelAttention else branch
        if type(last) not in (RowParallelLinear, ParallelMLP) or last.skip_bias_add:
            return None
        if not (is_bare(branch, called=True) and is_bare(last, called=True) and is_bare(self.dropout)):
            return None
        if type(self.dropout) is not ParallelDropout or (self.training and self.dropout.p):
            return None
        invariant = last.world.tp_invariant
        return norm_for_op(norm, sequence_parallel=last.sequence_parallel, tp_invariant=invariant)
