"""Attention whose heads the ranks do not divide is padded with zeros, and nothing shows them."""

import warnings
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from tpkernels import clip_grad_norm_, initialize_model_parallel, parallelize
from tpkernels.checkpoints.shards import shards_of
from tpkernels.interop.parallelize.default_plan import possible_plans
from tpkernels.interop.parallelize.plan import Tail

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"vocab_size": 61, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SPECIAL = {
    "Bert": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5": {"num_hidden_layers": 2, "d_kv": 8},
}
IDS = torch.arange(24).view(2, 12) * 5 % 61


def built(kind, heads, kv_heads):
    torch.manual_seed(1)
    said = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 8 * heads}
    config = getattr(transformers, f"{kind}Config")(**{**said, **SPECIAL.get(kind, {})})
    of = {"Bert": "BertLMHeadModel", "T5": "T5EncoderModel"}
    model = getattr(transformers, of.get(kind, f"{kind}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin as zeros, norms as ones
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.double().eval()


def trained(model, clip):
    """Logits, gradients and their norm, before a step that clips and decays weights."""
    output = model(input_ids=IDS, labels=IDS, use_cache=False)
    output.loss.backward()
    gradients = {id(p): p.grad.clone() for p in model.parameters()}
    norm = float(clip(model.parameters(), 0.1))
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1).step()
    return output.logits.detach(), gradients, norm


def assert_shards(split, full, of_split, of_full, rounding):
    """Tensors are the full ones' shards, and their padding is zero."""
    expected = {name: of_full[id(parameter)] for name, parameter in full.named_parameters()}
    for name, shard in shards_of(split).items():
        held = of_split[id(shard.tensor)].detach().clone()
        for chunk in shard.of(held).chunks():
            wanted = expected[name][chunk.where].detach()
            torch.testing.assert_close(chunk.view, wanted, rtol=1e-6, atol=rounding, msg=name)
            chunk.view.zero_()
        assert not held.any(), f"padding of {name}"


def padded(folder, kind, heads, kv_heads):
    """The split model trains and is saved as the unsharded one."""
    initialize_model_parallel(dist.get_world_size())
    full = built(kind, heads, kv_heads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        split = parallelize(deepcopy(full))
    assert [str(each.message) for each in said if "zeros among them" in str(each.message)] or dist.get_rank()
    split.save_pretrained(folder)
    saved = type(full).from_pretrained(folder, dtype=torch.float64)
    for name, each in saved.state_dict().items():
        assert torch.equal(each, full.state_dict()[name]), name
    again = parallelize(saved).state_dict()
    for name, each in split.state_dict().items():
        assert torch.equal(each, again[name]), name
    logits, gradients, norm = trained(split, clip_grad_norm_)
    expected = trained(full, torch.nn.utils.clip_grad_norm_)
    assert norm == pytest.approx(expected[2], rel=1e-6)
    torch.testing.assert_close(logits, expected[0], rtol=1e-6, atol=1e-9)
    rounding = 1e-7 if kind == "Qwen3" else 1e-9  # its norms compute in float32
    assert_shards(split, full, gradients, expected[1], rounding)
    after = [{id(p): p for p in model.parameters()} for model in (split, full)]
    assert_shards(split, full, *after, rounding)


@pytest.mark.parametrize(
    ("ranks", "kind", "heads", "kv_heads"),
    [
        (4, "Llama", 6, 6),
        (4, "Llama", 6, 3),  # as many of keys as fit the queries of a rank
        (4, "Llama", 6, 2),  # each of them on ranks of its own
        (2, "Llama", 9, 3),  # ranks compute one for each query
        (4, "Qwen2", 2, 1),  # biases; fewer heads than ranks
        (4, "Qwen3", 6, 2),  # norms of queries and keys
        (2, "Bert", 3, 3),  # by names; numbers of heads in attributes
    ],
)
def test_padded_heads_train_and_are_saved_as_the_unsharded_ones(
    ranks, kind, heads, kv_heads, request, tmp_path
):
    pool = request.getfixturevalue(f"ranks{ranks}")
    pool.run(padded, str(tmp_path), kind, heads, kv_heads)


LLAMA = "model.layers.0.self_attn.o_proj"
ALL = "every rank computes all of them"


@pytest.mark.parametrize(
    ("kind", "heads", "ranks", "row", "padded", "said"),
    [
        ("Llama", 6, 4, LLAMA, True, "its number of heads, 6: each computes 2, zeros among them: 1.33"),
        ("Llama", 1, 2, LLAMA, False, f"2 ranks do not divide its number of heads, 1: {ALL}: 1.99"),
        ("MiniCPM3", 1, 2, LLAMA, False, ALL),  # and all positions of keys
        ("GptOss", 6, 4, LLAMA, False, ALL),  # a number for each head
        ("T5", 6, 4, "encoder.block.1.layer.0.SelfAttention.o", False, ALL),  # biases of the layer before
    ],
)
def test_what_takes_fewer_flops_is_chosen_and_said(kind, heads, ranks, row, padded, said):
    with torch.device("meta"):
        choice = possible_plans(built(kind, heads, heads), ranks)[0]
    entry = choice.plan[row]
    assert (entry.kind, entry.padded) == (("row", 1) if padded else ("row_of_full", 0))
    assert said in choice.whole[0]
    assert not any(isinstance(each, Tail) for each in choice.plan.values())
