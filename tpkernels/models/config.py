"""Sizes and options of a decoder-only transformer, and configurations of well-known models by name."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # sizes alone need no torch
    from tpkernels.ops.activations import Activation, Glu
    from tpkernels.ops.local.norm import NormKind


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes and options of a decoder-only transformer: GPT-2, Llama, and combinations of the two.

    num_kv_heads: heads of keys and values; num_heads if None
    ffn_hidden_size: 4 * hidden_size if None
    max_positions: the number of positions with a learnt embedding; None: positions are rotary
    tied: the head uses the embedding's table
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    max_positions: int | None = None
    rotary_base: float = 10_000.0
    activation: Activation | Glu = "gelu_tanh"
    norm: NormKind = "layer_norm"
    norm_eps: float = 1e-5
    bias: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        optional = ("num_kv_heads", "ffn_hidden_size", "max_positions")
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
        for name in ("bias", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if not (_is_number(self.norm_eps) and self.norm_eps >= 0):
            raise ValueError(f"norm_eps: expected a number of 0 or more, got {self.norm_eps!r}")
        if not (_is_number(self.rotary_base) and self.rotary_base > 0):
            raise ValueError(f"rotary_base: expected a number above 0, got {self.rotary_base!r}")

    def with_sizes(self, **sizes: Any) -> GPTConfig:
        """Return a copy with new values of some fields; raise with a list of fields if one is unknown."""
        known = [field.name for field in fields(self)]
        for name in sizes:
            if name not in known:
                raise ValueError(f"{name}: a model has no such size; it has {', '.join(known)}")
        return replace(self, **sizes)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _gpt2(hidden_size: int, num_layers: int, num_heads: int, max_positions: int = 1024) -> GPTConfig:
    return GPTConfig(
        vocab_size=50257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        max_positions=max_positions,
    )


def _llama3(hidden_size: int, num_layers: int, num_heads: int, ffn_hidden_size: int) -> GPTConfig:
    return GPTConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_hidden_size=ffn_hidden_size,
        rotary_base=500_000.0,
        activation="swiglu",
        norm="rms_norm",
        bias=False,
        tied=False,
    )


MODELS = {
    "gpt2-small": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt3-175b": _gpt2(12288, 96, 96, max_positions=2048),
    "mistral-7b": _llama3(4096, 32, 32, 14336).with_sizes(vocab_size=32768, rotary_base=1_000_000.0),  # v0.3
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
}


SMALL = GPTConfig(  # trains on English text in a minute on two cores
    vocab_size=256,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    activation="swiglu",
    norm="rms_norm",
    bias=False,
    tied=False,
)


def model_config(name: str, **sizes: Any) -> GPTConfig:
    """Return the configuration of a known model, with new values of some fields."""
    if name not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name].with_sizes(**sizes)
