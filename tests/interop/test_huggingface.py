"""Models of `transformers` and ours compute the same with the same weights, whichever way they came."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.interop.models import built, needs_transformers
from tests.layers.worlds import posing
from tests.models.small import CONFIGS, IDS
from tpkernels import GPT, initialize_model_parallel
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.interop import huggingface, safetensors


def logits_of_folder(folder):
    """Of a model that ranks load from what `save_pretrained` wrote."""
    initialize_model_parallel(dist.get_world_size())
    config = huggingface.gpt_config(json.loads(Path(folder, "config.json").read_text()))
    model = GPT(config, sequence_parallel=True)
    load_full_state_dict(model, huggingface.from_huggingface(safetensors.read(folder)))
    return model(IDS).detach()


def write_folder(folder, kind):
    initialize_model_parallel(dist.get_world_size())
    model = built(kind, 7)
    whole = huggingface.to_huggingface(full_state_dict(model))
    safetensors.write(Path(folder, "model.safetensors"), whole)
    return model(IDS).detach()


NO_IDS = {"bos_token_id": None, "eos_token_id": None}
LLAMA = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, **NO_IDS}
GPT2 = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **NO_IDS}
KINDS = ["llama", "gpt2"]


def theirs(kind, **options):
    """A tiny model with random weights, biases among them."""
    import transformers

    torch.manual_seed(5)
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **options))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@needs_transformers
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_ours_computes_what_theirs_does_and_back(kind, tied):
    model = theirs(kind, tie_word_embeddings=tied)
    expected = model(IDS).logits
    with posing(0, 1):
        config = huggingface.gpt_config(model.config)
        ours = GPT(config)
        load_full_state_dict(ours, huggingface.from_huggingface(model.state_dict()))
        torch.testing.assert_close(ours(IDS), expected, rtol=0, atol=1e-5)
        back = huggingface.to_huggingface(full_state_dict(ours))
    assert config.tied == tied
    other = theirs(kind, tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    missing, unexpected = other.load_state_dict(back, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    torch.testing.assert_close(other(IDS).logits, expected, rtol=0, atol=0)


@needs_transformers
@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("gpt2", 2), ("llama", 4)])
def test_ranks_load_their_folder(kind, ranks, request, tmp_path):  # at 4 ranks share heads of keys
    pytest.importorskip("safetensors")
    model = theirs(kind)
    model.save_pretrained(tmp_path)
    for logits in request.getfixturevalue(f"ranks{ranks}").run(logits_of_folder, str(tmp_path)):
        torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=1e-5)


@needs_transformers
@pytest.mark.parametrize("kind", KINDS)
def test_they_load_what_ranks_wrote(kind, ranks2, tmp_path):
    pytest.importorskip("safetensors")
    theirs(kind).config.save_pretrained(tmp_path)
    (logits, again) = ranks2.run(write_folder, str(tmp_path), kind)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(model.eval()(IDS).logits, logits, rtol=0, atol=1e-5)
    assert torch.equal(logits, again)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind):
    with posing(0, 1):
        ours = {name: value.detach() for name, value in built(kind, 1).named_parameters()}
    there = huggingface.to_huggingface(ours)
    back = huggingface.from_huggingface(there)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], value) for name, value in ours.items())
    if kind == "gpt2":
        fused = there["transformer.h.1.attn.c_attn.weight"]
        assert torch.equal(fused[:, 16:32], ours["blocks.1.attention.qkv.key.weight"].t())
        headless = {name.removeprefix("transformer."): value for name, value in there.items()}
        old = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
        assert huggingface.from_huggingface({**headless, **old}).keys() == ours.keys()
        copied = {**there, "lm_head.weight": ours["embedding.weight"].clone()}
        assert "head.weight" in huggingface.from_huggingface(copied)
        assert "head.weight" not in huggingface.from_huggingface(copied, tied=True)


def test_nothing_stays_nothing():
    assert huggingface.to_huggingface({}) == {}  # ranks but the first


def test_configs_of_older_and_newer_files():
    old = {"model_type": "llama", **LLAMA, "rope_theta": 5e5, "rope_scaling": None}
    assert huggingface.gpt_config(old) == CONFIGS["llama"].with_sizes(rotary_base=5e5)
    new = {"model_type": "llama", **LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert huggingface.gpt_config(new) == huggingface.gpt_config(old)
    assert huggingface.gpt_config({"model_type": "gpt2", **GPT2}) == CONFIGS["gpt2"]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"model_type": "bert"}, "model_type: expected 'llama' or 'gpt2', got 'bert'"),
        ({"model_type": "llama", **LLAMA, "attention_bias": True}, "attention_bias: expected False"),
        ({"model_type": "llama", **LLAMA, "head_dim": 8}, "head_dim: expected 4"),
        ({"model_type": "llama", **LLAMA, "rope_scaling": {"type": "linear"}}, "rope_type: expected 'def"),
        (
            {"model_type": "llama", **LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type: expected 'default', the only value that a GPT supports, got 'llama3'",
        ),
        ({"model_type": "gpt2", **GPT2, "activation_function": "tanh"}, "activation_function: expected one"),
        ({"model_type": "gpt2", **GPT2, "add_cross_attention": True}, "add_cross_attention: expected False"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_what_a_gpt_cannot_do_is_named(theirs, text):
    with pytest.raises(ValueError, match=text):
        huggingface.gpt_config(theirs)


def test_strange_names_are_named():
    with pytest.raises(ValueError, match=r"got also \['model.layers.0.mlp.router.weight'\]"):
        huggingface.from_huggingface({"model.layers.0.mlp.router.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"got also \['extra'\]"):
        huggingface.to_huggingface({"extra": torch.zeros(2)})
