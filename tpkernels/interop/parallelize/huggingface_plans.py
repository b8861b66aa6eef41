"""How models of `transformers` are split by `parallelize`.

Their attention takes heads to be what is left of the features, `view(..., -1, head_dim)`, so that each rank
works on its own heads. Heads are not parted: ranks divide the heads of keys and values.
"""

from __future__ import annotations

from typing import Any

from tpkernels.interop.parallelize.plan import Divided, Plan, Split


def llama_plan(config: Any) -> Plan:
    """Of a `LlamaForCausalLM`; without "lm_head", of a `LlamaModel`.

    config: its LlamaConfig
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "*embed_tokens": "embedding",
        "*.self_attn.[qkv]_proj": Split("column", unit=head),
        "*.self_attn.o_proj": Split("row", unit=head),
        "*.mlp.gate_proj": "column",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
        "lm_head": "head",
    }


def gpt2_plan(config: Any) -> Plan:
    """Of a `GPT2LMHeadModel`; without "lm_head", of a `GPT2Model`.

    config: its GPT2Config
    """
    head = config.n_embd // config.n_head
    return {
        "*wte": "embedding",
        "*.attn": Divided("split_size"),
        "*.attn.c_attn": Split("column", unit=head, stacked=3),
        "*.attn.c_proj": Split("row", unit=head),
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
        "lm_head": "head",
    }
