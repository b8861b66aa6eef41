"""Models of `transformers` are one graph under torch.compile, and train with tokens that ranks share."""

from __future__ import annotations

import os

import pytest

from tests.interop import whole_model_cases as cases

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("Llama", False), ("Qwen3", True), ("GPT2", False)])
def test_a_compiled_model_is_one_graph(kind, sequence_parallel, ranks2):
    for found in ranks2.run(cases.compiled_apart, kind, sequence_parallel):
        assert (found["graphs"], found["breaks"]) == (1, {})
        assert found["loss"] < 1e-7
        assert found["gradients"] < 1e-7


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Mixtral"])
def test_adamw_and_text_are_those_of_the_unsharded_model(kind, ranks2):
    attention, mlp = ("attn", "mlp") if kind == "GPT2" else ("self_attn", "mlp")
    mixture = kind == "Mixtral"
    for found in ranks2.run(cases.shared_apart, kind):
        assert found["losses"] < (1e-5 if mixture else 1e-6)
        assert found["text"]
        assert found["hidden states"][0] == "ValueError"
        assert "expected output_hidden_states=False" in found["hidden states"][1]
        assert set(found["columns"]) == {attention} if mixture else {attention, mlp}
        assert set(found["whole"]) == ({mlp} if mixture else set())


def test_dropouts_are_drawn_alike_or_refused(ranks2):
    for found in ranks2.run(cases.dropouts):
        assert found["GPT2"] == ()
        assert found["OPT"][0] == "ValueError"
        assert "'model.decoder.layers.0' draws random numbers for hidden states" in found["OPT"][1]
