"""What callers may ask of a model of `transformers` that ranks hold shards of: refused, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tpkernels.interop.parallelize.swaps import Work


def refuse_shards_of_heads(model: nn.Module, work: Work) -> None:
    """Before each call, if attentions are split by heads."""
    names = [swap.name.lower() for swap in work.swaps if swap.narrows_output]
    if any("attn" in name or "attention" in name for name in names):
        for module in model.modules():
            if hasattr(module, "main_input_name"):  # a model, in which `transformers` collects
                module.register_forward_pre_hook(_refuse_shards, with_kwargs=True)


def refuse_hidden_states(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    """Before a model's forward, if ranks share tokens between its layers."""
    if _is_asked(module, kwargs, "output_hidden_states"):
        raise ValueError(
            "sequence_parallel: expected output_hidden_states=False, for between layers each rank has its "
            "shard of the tokens; parallelize the model without sequence_parallel"
        )


def _refuse_shards(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    if _is_asked(module, kwargs, "output_attentions"):
        raise ValueError(
            "output_attentions: expected False, for each tensor-parallel rank has those of its own heads "
            "only. Ask the model for them before parallelize"
        )
    if any(keys.requires_grad for keys in _keys(kwargs.get("past_key_values"))):
        raise ValueError(
            "past_key_values: expected keys without gradients, got those of peft's prefix tuning, say, which "
            "have all heads where each tensor-parallel rank has its own. Use prompt tuning, or LoRA"
        )


def _is_asked(module: nn.Module, kwargs: Mapping[str, Any], option: str) -> bool:
    asked = kwargs.get(option)
    return bool(getattr(getattr(module, "config", None), option, False) if asked is None else asked)


def _keys(cache: Any) -> Iterator[Tensor]:
    """Of each layer of a cache, that of a decoder's own attention if it has two."""
    for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
        if isinstance(keys := getattr(layer, "keys", None), Tensor):
            yield keys
