"""The MLP of a transformer layer, as one op: up-projection, activation or gated unit, down-projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels import ops
from tpkernels.layers.init import InitMethod
from tpkernels.layers.linear import ColumnParallelLinear, RowParallelLinear, with_recipe
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.world import State
from tpkernels.ops.activations import ACTIVATIONS, GATE_OF, Activation, Glu
from tpkernels.ops.quantize import Recipe


class ParallelMLP(ParallelModule):
    """The MLP act(X Uᵀ + b) Dᵀ + c, or with a gated unit (f(X Gᵀ) * (X Uᵀ)) Dᵀ + c.

    activation: gelu_tanh, gelu, silu, relu or relu2; gated: swiglu, geglu or geglu_tanh
    bias: of both projections; with a gated unit of the down-projection only
    init_method: fills the full up-projection and gate; output_layer_init_method: the full down-projection, by
        default the same
    skip_bias_add: return the last bias instead of adding it
    sequence_parallel: X and the output are this rank's tokens (dimension 0); no effect on one rank
    Others as in `ColumnParallelLinear`.

    Gate and up are two weights, `gate.weight` and `up.weight`, so that full ones can be split for another
    number of ranks. The three layers only hold parameters: their `forward` is not called, and hooks on them
    do not run.
    """

    quantize: Recipe | None = None

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
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        overlap: bool = True,
        perform_initialization: bool = True,
        quantize: Recipe | None = None,
        state: State = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(state)
        if activation not in (*ACTIVATIONS, *GATE_OF):
            raise ValueError(
                f"ParallelMLP: expected an activation of {', '.join((*ACTIVATIONS, *GATE_OF))}; "
                f"got {activation!r}"
            )
        self.activation = activation
        self.skip_bias_add = skip_bias_add
        self.sequence_parallel = sequence_parallel and self.world.size > 1
        self.overlap = overlap
        self.quantize = quantize
        gated = activation in GATE_OF

        linear: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "perform_initialization": perform_initialization,
            "quantize": quantize,
            "state": state,
            "device": device,
            "dtype": dtype,
        }
        up: Callable[..., ColumnParallelLinear] = partial(
            ColumnParallelLinear, gather_output=False, init_method=init_method, **linear
        )
        self.up = up(hidden_size, ffn_hidden_size, bias=bias and not gated)
        self.gate = up(hidden_size, ffn_hidden_size, bias=False) if gated else None
        self.down = RowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            bias=bias,
            input_is_parallel=True,
            init_method=output_layer_init_method or init_method,
            skip_bias_add=skip_bias_add,
            **linear,
        )

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (output, output_bias), as `RowParallelLinear` does.

        input_: (tokens, ..., hidden_size), or this rank's tokens of dimension 0 if sequence_parallel
        output: like the input
        """
        group = self.world.group
        self.require_features(input_, self.up.input_size, "every rank needs all features")
        layers = [self.up, self.down] if self.gate is None else [self.up, self.gate, self.down]
        weights, main_grads = zip(*(layer.weight_and_main_grad() for layer in layers), strict=True)
        output = ops.parallel_mlp(
            input_,
            weights[0],
            self.up.bias,
            weights[-1],
            None if self.skip_bias_add else self.down.bias,
            group,
            activation=self.activation,
            w_gate_shard=None if self.gate is None else weights[1],
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
            main_grads=None if all(main_grad is None for main_grad in main_grads) else main_grads,
            quantize=self.quantize,
        )
        return output, self.down.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        said = f"activation={self.activation}, sequence_parallel={self.sequence_parallel}"
        return with_recipe(said, self.quantize)
