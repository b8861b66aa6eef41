"""Megatron-Core's names and layouts, against the formula written out, and there and back."""

import pytest
import torch

from tests.interop.models import built
from tests.layers.worlds import posing
from tests.models.small import CONFIGS
from tpkernels.interop.megatron import from_megatron, join_qkv, split_qkv, to_megatron


def test_queries_keys_and_values_lie_group_by_group():
    heads, groups, size, hidden = 6, 2, 4, 5
    query, key, value = torch.randn(24, hidden), torch.randn(8, hidden), torch.randn(8, hidden)
    fused = join_qkv(query, key, value, groups=groups)
    rows = []
    for group in range(groups):
        for head in range(group * heads // groups, (group + 1) * heads // groups):
            rows += [query[head * size + i] for i in range(size)]
        rows += [key[group * size + i] for i in range(size)]
        rows += [value[group * size + i] for i in range(size)]
    assert torch.equal(fused, torch.stack(rows))
    for part, back in zip((query, key, value), split_qkv(fused, heads=heads, groups=groups), strict=True):
        assert torch.equal(part, back)
    biases = join_qkv(query[:, 0], key[:, 0], value[:, 0], groups=groups)
    assert torch.equal(biases, fused[:, 0])
    with pytest.raises(ValueError, match="expected a divisor of num_heads 6, got 4"):
        split_qkv(fused, heads=6, groups=4)
    with pytest.raises(ValueError, match=r"expected features that 7 heads or groups divide, got \(40, 5\)"):
        split_qkv(fused, heads=5, groups=1)


@pytest.mark.parametrize("fused_norms", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_there_and_back(kind, fused_norms):
    config = CONFIGS[kind]
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    with posing(0, 1):
        ours = {name: value.detach() for name, value in built(kind, 1).named_parameters()}
    theirs = to_megatron(ours, **heads, vocab_divisible_by=16, fused_norms=fused_norms)
    assert theirs["embedding.word_embeddings.weight"].shape == (48, 16)
    assert not theirs["embedding.word_embeddings.weight"][37:].any()
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    assert torch.equal(theirs[f"decoder.layers.1.{norm}"], ours["blocks.1.attention_norm.weight"])
    up = ours["blocks.0.mlp.up.weight"]
    gate = [ours["blocks.0.mlp.gate.weight"]] if kind == "llama" else []
    assert torch.equal(theirs["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([*gate, up]))
    theirs["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(0)
    back = from_megatron(theirs, **heads, vocab_size=37)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], value) for name, value in ours.items())


def test_names_of_megatron_core():
    with posing(0, 1):
        ours = {name: value.detach() for name, value in built("gpt2", 1).named_parameters()}
    layer = {name.removeprefix("decoder.layers.0.") for name in to_megatron(ours, num_heads=4)}
    assert {name for name in layer if not name.startswith("decoder.layers.1.")} == {
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_bias",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    }


def test_strange_names_are_named():
    with pytest.raises(ValueError, match=r"got also \['decoder.layers.0.mlp.router.weight'\]"):
        from_megatron({"decoder.layers.0.mlp.router.weight": torch.zeros(2)}, num_heads=2)
    with pytest.raises(ValueError, match=r"all parts of each, got also \['blocks.0.attention.qkv.query"):
        to_megatron({"blocks.0.attention.qkv.query.weight": torch.zeros(4, 2)}, num_heads=2)
    with pytest.raises(ValueError, match=r"expected at least 9 rows, got \(8, 2\)"):
        from_megatron({"output_layer.weight": torch.zeros(8, 2)}, num_heads=2, vocab_size=9)
