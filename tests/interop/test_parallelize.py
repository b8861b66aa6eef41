"""Models of torch's own layers compute the same when ranks share them, alone and inside FSDP2 and DDP."""

from __future__ import annotations

import os

import pytest

from tests.interop.split_cases import (
    as_citizens,
    data_parallel,
    huggingface_alike,
    like_parallelize_module,
    memory_of_parts,
    refuse,
    split_alike,
    toy,
)

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.mark.parametrize(("pool", "tensor"), [("ranks1", 1), ("ranks2", 2), ("ranks4", 4), ("ranks4", 2)])
def test_split_model_is_the_whole_one(pool, tensor, request):
    for wrong in request.getfixturevalue(pool).run(split_alike, tensor):
        assert wrong == []


def test_it_computes_what_torch_does(ranks2):
    assert ranks2.run(like_parallelize_module) == [[], []]


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_data_parallel_wrappers_take_it(wrapper, ranks4):
    assert ranks4.run(data_parallel, wrapper) == [[]] * 4


def test_it_compiles_and_rounds_like_the_whole_model(ranks2):
    assert ranks2.run(as_citizens, timeout=120) == [[], []]


def test_memory_of_the_whole_is_freed(ranks4):
    whole = sum(parameter.nbytes for parameter in toy().parameters())
    for held, reserved in ranks4.run(memory_of_parts):
        assert held == reserved
        assert held < whole / 2


def test_wrong_plans_are_refused_on_all_ranks_alike(ranks2):
    first, second = ranks2.run(refuse)
    assert first == second
    expected = [
        ("ValueError", "plan: expected at least one pattern"),
        ("ValueError", "'blocks.*.gates' fits no module; there are embed, blocks, blocks.0"),
        ("TypeError", "'blocks.0.norm': expected an nn.Linear for 'column', got LayerNorm"),
        ("ValueError", "'blocks.0.up' fits both 'blocks.*.up' and 'blocks.0.up'"),
        (
            "ValueError",
            "'blocks.*.up': expected one of column, row, head, embedding, partial, rep",
        ),
        ("ValueError", "expected a positive unit, and stacked > 1 for a column only"),
        ("TypeError", "'embed': expected an nn.Linear for 'head', got Embedding"),
        ("ValueError", "'a': expected out_features that 2 ranks x unit 1 x stacked 1 = 2 divides, got 7"),
        ("ValueError", "'a': expected in_features that 2 ranks x unit 1 x stacked 1 = 2 divides, got 5"),
        ("ValueError", "'b': expected an nn.Embedding without max_norm"),
        (
            "ValueError",
            "'blocks.0.out': expected in_features that 2 ranks x unit 16 x stacked 1 = 32 divides",
        ),
        ("ValueError", "'blocks.0.height': expected a number that 2 ranks divide, got None"),
        ("ValueError", "'head': expected a module without hooks or"),
        ("ValueError", "'head' shares a weight with 'embed', and must be split as that is"),
        ("TypeError", "'a': expected an nn.Linear for 'column', got ColumnLinear; it is split already"),
        ("TypeError", "'0.linear1': expected a module that its parent calls, but '0', an nn.Transformer"),
        ("ValueError", "'embed.weight': expected the same weights on all tensor-parallel ranks"),
        ("ValueError", "DistributedDataParallel has not wrapped, but it has wrapped 'module.embed.weight'"),
        (
            "ValueError",
            "DistributedDataParallel has not wrapped, but it has wrapped 'embed.weight', and",
        ),
        ("ValueError", "weights: expected 'check' or 'broadcast', got 'ignore'"),
        ("ValueError", "ranks disagree"),
        ("ValueError", "ranks disagree"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert kind == expected_kind, text
        assert part in text


SIZES = {
    "llama": {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "gpt2": {
        "vocab_size": 37,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 8,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
for sizes in SIZES.values():
    sizes |= {"bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("tensor", [2, 4])
def test_models_of_transformers(tensor, ranks4):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for wrong in ranks4.run(huggingface_alike, SIZES, tensor, timeout=150):
        assert wrong == []
