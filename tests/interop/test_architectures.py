"""Models of `transformers` on two ranks train as unsharded ones do, load, or are refused."""

from __future__ import annotations

import os

import pytest

from tests.interop.architecture_cases import loaded_apart, refusal, trained_apart

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "GPT2", "OPT"])
def test_adamw_follows_the_unsharded_model(kind, ranks2):
    for apart in ranks2.run(trained_apart, kind):
        assert apart < 1e-6


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("OPT without Divided", "'model.decoder.layers.0.self_attn' does not take this rank's features"),
        ("Olmo2", "'model.layers.0.self_attn.q_norm' does not take this rank's features"),
    ],
)
def test_wrong_plans_are_refused(kind, part, ranks2):
    for error, text in ranks2.run(refusal, kind):
        assert error == "ValueError"
        assert part in text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Gemma3", {}),
        ("GPT2", {}),
        ("OPT", {}),
    ],
)
def test_folders_load_into_models_from_the_meta_device(kind, options, ranks2, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    for apart in ranks2.run(loaded_apart, kind, str(tmp_path), options):
        assert apart < 1e-6
