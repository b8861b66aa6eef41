"""Activations and gated units by name. Loads no torch; `activations` says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Activation = Literal["none", "gelu", "gelu_tanh", "silu", "relu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

Glu = Literal["swiglu", "geglu", "geglu_tanh"]
GATE_OF: Mapping[Glu, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
