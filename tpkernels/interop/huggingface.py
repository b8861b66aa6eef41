"""Converts weights of Llama and GPT-2 of `transformers` to weights of `tpkernels.GPT`, and back.

`transformers` need not be installed. Llama's weights are only renamed: both rotate feature i with feature
i + d/2. GPT-2's weights are transposed, and its queries, keys and values are one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpkernels.interop.parallelize.plan import gpt2_plan as gpt2_plan
from tpkernels.interop.parallelize.plan import llama_plan as llama_plan
from tpkernels.interop.renaming import Renaming, to_ours, to_theirs
from tpkernels.models.config import GPTConfig
from tpkernels.ops.activations import Activation

_HEAD = "lm_head.weight"
_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def _llama() -> list[Renaming]:
    of_layer = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.qkv.query",
        "self_attn.k_proj": "attention.qkv.key",
        "self_attn.v_proj": "attention.qkv.value",
        "self_attn.o_proj": "attention.output",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    named = {f"model.layers.{{i}}.{theirs}": f"blocks.{{i}}.{ours}" for theirs, ours in of_layer.items()}
    named |= {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    return [Renaming(f"{theirs}.weight", (f"{ours}.weight",)) for theirs, ours in named.items()]


def _gpt2() -> list[Renaming]:
    layer, block = "transformer.h.{i}", "blocks.{i}"
    rules = [
        Renaming("transformer.wte.weight", ("embedding.weight",)),
        Renaming("transformer.wpe.weight", ("positions.weight",)),
        Renaming(_HEAD, ("head.weight",)),
    ]
    for kind in ("weight", "bias"):
        norms = {f"{layer}.ln_1": f"{block}.attention_norm", f"{layer}.ln_2": f"{block}.mlp_norm"}
        norms["transformer.ln_f"] = "norm"
        linears = {
            f"{layer}.attn.c_proj": f"{block}.attention.output",
            f"{layer}.mlp.c_fc": f"{block}.mlp.up",
            f"{layer}.mlp.c_proj": f"{block}.mlp.down",
        }
        qkv = tuple(f"{block}.attention.qkv.{part}.{kind}" for part in ("query", "key", "value"))
        rules += [Renaming(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for theirs, ours in norms.items()]
        rules += [
            Renaming(f"{theirs}.{kind}", (f"{ours}.{kind}",), lambda weight: (weight.t(),), Tensor.t)
            for theirs, ours in linears.items()
        ]
        rules.append(Renaming(f"{layer}.attn.c_attn.{kind}", qkv, _split_conv, _join_conv))
    return rules


def _split_conv(fused: Tensor) -> tuple[Tensor, ...]:
    """(in, 3 out) or (3 out,) -> three of (out, in) or (out,)"""
    return fused.t().chunk(3)


def _join_conv(*parts: Tensor) -> Tensor:
    return torch.cat(parts).t()


def from_huggingface(theirs: Mapping[str, Tensor], *, tied: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a `LlamaForCausalLM` or `GPT2LMHeadModel` under a GPT's names; views if possible.

    tied: drop the head, because it is the embedding; a head that shares its memory is always dropped
    """
    prefix = "transformer." if any(name.endswith("wte.weight") for name in theirs) else "model."
    found = {
        name if name.startswith(prefix) or name == _HEAD else prefix + name: tensor  # of a model without head
        for name, tensor in theirs.items()
        if not name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))  # old buffers
    }
    ours = to_ours(found, _gpt2() if prefix == "transformer." else _llama())
    if "head.weight" in ours and (tied or _same_memory(ours["head.weight"], ours["embedding.weight"])):
        del ours["head.weight"]
    return ours


def to_huggingface(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a GPT's full tensors under the names of `LlamaForCausalLM`, or of `GPT2LMHeadModel`.

    Learnt positions make it a GPT-2. A head tied to the embedding is left out, as in their files.
    """
    return to_theirs(ours, _gpt2() if "positions.weight" in ours else _llama())


def gpt_config(theirs: Any) -> GPTConfig:
    """Return the GPTConfig of a `LlamaConfig` or `GPT2Config`, or of the content of its `config.json`.

    Raises for options that a GPT does not have, such as scaled rotary positions.
    """
    found: dict[str, Any] = dict(theirs if isinstance(theirs, Mapping) else theirs.to_dict())
    kind = found.get("model_type")
    if kind == "llama":
        return _llama_config(found)
    if kind == "gpt2":
        return _gpt2_config(found)
    raise ValueError(f"model_type: expected 'llama' or 'gpt2', got {kind!r}")


def _llama_config(found: dict[str, Any]) -> GPTConfig:
    # one dict since transformers 5, two attributes before
    rotary = found.get("rope_parameters") or found.get("rope_scaling") or {}
    head_size = found["hidden_size"] // found["num_attention_heads"]
    _require(rotary.get("rope_type", rotary.get("type", "default")), "default", "rope_type")
    _require(found.get("head_dim") or head_size, head_size, "head_dim")
    _require(found.get("hidden_act", "silu"), "silu", "hidden_act")
    for name in ("attention_bias", "mlp_bias"):
        _require(found.get(name, False), False, name)
    return GPTConfig(
        vocab_size=found["vocab_size"],
        hidden_size=found["hidden_size"],
        num_layers=found["num_hidden_layers"],
        num_heads=found["num_attention_heads"],
        num_kv_heads=found.get("num_key_value_heads"),
        ffn_hidden_size=found["intermediate_size"],
        rotary_base=rotary.get("rope_theta", found.get("rope_theta", 10_000.0)),
        activation="swiglu",
        norm="rms_norm",
        norm_eps=found.get("rms_norm_eps", 1e-6),
        bias=False,
        tied=found.get("tie_word_embeddings", False),
    )


def _gpt2_config(found: dict[str, Any]) -> GPTConfig:
    _require(found.get("scale_attn_weights", True), True, "scale_attn_weights")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _require(found.get(name, False), False, name)
    activation = found.get("activation_function", "gelu_new")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation_function: expected one of {', '.join(_ACTIVATIONS)}, got {activation!r}"
        )
    return GPTConfig(
        vocab_size=found["vocab_size"],
        hidden_size=found["n_embd"],
        num_layers=found["n_layer"],
        num_heads=found["n_head"],
        ffn_hidden_size=found.get("n_inner"),
        max_positions=found["n_positions"],
        activation=_ACTIVATIONS[activation],
        norm_eps=found.get("layer_norm_epsilon", 1e-5),
        tied=found.get("tie_word_embeddings", True),
    )


def _require(value: object, expected: object, name: str) -> None:
    if value != expected:
        raise ValueError(f"{name}: expected {expected!r}, the only value that a GPT supports, got {value!r}")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()
