"""The products that `tune --shapes` lists for layers and models, against those that a model computes."""

from functools import wraps
from unittest.mock import patch

import pytest
import torch

from tests.products import pairwise
from tpkernels import GPT, GPTConfig, initialize_model_parallel
from tpkernels.cli.tune import TUNED, SplitModel, model_calls, parsed_shapes
from tpkernels.dispatch import primitives
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates, tune_key
from tpkernels.dispatch.products import PRODUCTS


def test_shapes_and_models_are_mixed():
    assert parsed_shapes(
        "8192x4096x512,model:llama3-8b,tp:8,64x32x16,model:gpt2-xl,tokens:96,tp:2,model:mistral-7b"
    ) == {
        "8192x4096x512": (8192, 4096, 512),
        "model:llama3-8b,tp:8": SplitModel("llama3-8b", tensor=8),
        "64x32x16": (64, 32, 16),
        "model:gpt2-xl,tokens:96,tp:2": SplitModel("gpt2-xl", tensor=2, tokens=96),
        "model:mistral-7b": SplitModel("mistral-7b", tensor=1, tokens=8192),
    }


@pytest.mark.parametrize("name", TUNED)
def test_every_model_is_split_over_a_node_or_says_why_not(name):
    ranks = 8
    if name in ("gpt2-small", "gpt2-large", "gpt2-xl", "qwen2.5-7b"):
        with pytest.raises(ValueError, match="num_heads: expected a multiple of the 8 tensor-parallel ranks"):
            list(model_calls(SplitModel(name, ranks), torch.bfloat16, training=True))
        return
    calls = list(model_calls(SplitModel(name, ranks), torch.bfloat16, training=True))
    steps = {record.name for record, _ in calls}
    mlp = {"dgrad_act"} if name.startswith("gpt") else {"glu", "dglu"}
    assert steps == {"linear", "dgrad", "dgrad_pairs", "wgrad", "wgrad_accumulate_"} | mlp
    forward = list(model_calls(SplitModel(name, ranks), torch.bfloat16, training=False))
    assert {record.name for record, _ in forward} <= {"linear", "glu"}


def test_llama_asks_for_these():
    calls = model_calls(SplitModel("llama3-8b", 8), torch.bfloat16, training=False)
    found = [tune_key(record, *arguments) for record, arguments in calls]
    assert [(p.step, p.tokens, p.out_features, p.in_features) for p in found] == [
        ("linear", 8192, 512, 4096),
        ("linear", 8192, 128, 4096),
        ("linear", 8192, 4096, 512),
        ("linear", 8192, 4096, 1792),
        ("glu", 8192, 1792, 4096),
        ("linear", 2560, 16032, 4096),
        ("linear", 2048, 16032, 4096),
    ]


@pytest.mark.parametrize("ranks", [1, 8])
def test_choosing_for_a_model_fits_into_half_a_minute_a_shape(ranks):
    """By the average time that compiling took, 1.7 s; where it takes longer some stay untried."""
    for tokens in (512, 8192):
        for record, arguments in model_calls(SplitModel("llama3-8b", ranks, tokens), torch.bfloat16, True):
            found = candidates(record, tune_key(record, *arguments), TARGET_GPUS["h100"])
            assert 1.7 * sum(one.tile is not None for one in found) < 25, record.name


def test_biases_are_those_of_the_model():
    def biased(name, ranks):
        calls = model_calls(SplitModel(name, ranks), torch.bfloat16, training=False)
        keys = [tune_key(record, *arguments) for record, arguments in calls]
        return ["bias" in key.options for key in keys if key.step == "linear"]

    # queries, keys and values, output, down, up, chunks of the head: sums of ranks get their bias later
    assert biased("qwen2.5-7b", 1) == [True, True, False, False, False, False]
    assert biased("llama3-8b", 1) == [False, False, False, False, False, False]
    assert biased("gpt3-175b", 1) == [True, True, True, True, True, False, False]
    assert biased("gpt3-175b", 8) == [True, True, False, False, True, False]


SIZES = {"vocab_size": 96, "hidden_size": 64, "num_layers": 1, "num_heads": 4}
PLAIN = {"norm": "rms_norm", "bias": False, "tied": False}
GPTS = {
    "gated": GPTConfig(**SIZES, num_kv_heads=2, ffn_hidden_size=96, activation="swiglu", **PLAIN),
    "plain": GPTConfig(**SIZES, max_positions=160),
}


def keys_of_a_step(kind: str, tokens: int, fused: bool) -> list[str]:
    """Their keys, once each. Without overlap each product is of all tokens."""
    initialize_model_parallel(torch.distributed.get_world_size())
    options = {"sequence_parallel": True, "gradient_accumulation_fusion": fused, "overlap": False}
    model = GPT(GPTS[kind], dtype=torch.bfloat16, **options)
    if fused:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    ids = torch.arange(tokens).view(1, -1) % 96
    posed: list[str] = []
    real_into = primitives.into

    def seen(name, real):
        @wraps(real)
        def call(*args):
            posed.append(str(tune_key(PRODUCTS[name], *args)))
            return real(*args)

        return call

    def into(primitive, out, *args):
        name = primitive.__name__
        if name in PRODUCTS:
            posed.append(str(tune_key(PRODUCTS[name], *args, out=out)))
        real_into(primitive, out, *args)

    calls = {name: seen(name, getattr(primitives, name)) for name in PRODUCTS}
    with patch.multiple(primitives, into=into, **calls):
        model(ids, ids).backward()
    return sorted(set(posed))


@pairwise(kind=list(GPTS), tokens={"one_chunk": 64, "two_chunks": 160}, ranks=[1, 2])
def test_products_are_those_that_a_step_computes(ranks, tokens, kind, request, monkeypatch):
    """Of a model on real ranks, with weight gradients of its own and added to `main_grad`."""
    pool = request.getfixturevalue(f"ranks{ranks}")
    posed = [pool.run(keys_of_a_step, kind, tokens, fused) for fused in (False, True)]
    assert [other for one in posed for other in one if other != one[0]] == [], "all ranks alike"
    monkeypatch.setitem(TUNED, kind, GPTS[kind])
    calls = model_calls(SplitModel(kind, ranks, tokens), torch.bfloat16, training=True)
    listed = {str(tune_key(record, *arguments)) for record, arguments in calls}
    assert sorted(listed) == sorted({*posed[0][0], *posed[1][0]})
