"""`parallelize(..., quantize=)` of models of `transformers`, with LoRA of `peft` and without."""

from __future__ import annotations

import os

import pytest

from tests.interop import quantizing_cases as cases
from tests.interop.test_quantizing import check
from tpkernels import Recipe

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")

LLAMA = [f"self_attn.{each}_proj" for each in "qkvo"] + [
    f"mlp.{each}_proj" for each in ("gate", "up", "down")
]
MODELS = {
    "Llama": ("model.layers", LLAMA),
    "Llama of one key": ("model.layers", LLAMA),
    "GPT2": ("transformer.h", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_unsharded_model_with_the_same_products(kind, ranks2):
    layers, inside = MODELS[kind]
    names = sorted(f"{layers}.{number}.{name}" for number in range(2) for name in inside)
    for found in ranks2.run(cases.of_transformers, kind, Recipe.rowwise()):
        check(found, names)


def test_so_it_is_where_ranks_share_tokens(ranks2):
    names = sorted(f"model.layers.{number}.{name}" for number in range(2) for name in LLAMA)
    for found in ranks2.run(cases.of_transformers, "Llama", Recipe.rowwise(), True):
        check(found, names)


def test_experts_and_routers_are_not_in_fp8(ranks2):
    for found in ranks2.run(cases.mixture):
        assert found == sorted(f"model.layers.0.{name}" for name in LLAMA[:4])


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_is_beside_products_in_fp8(when, ranks2):
    pytest.importorskip("peft", reason="peft is not installed")
    from tests.interop.lora_cases import in_fp8_and_trained

    wrapped = [f"self_attn.{each}_proj" for each in "qvo"] + ["mlp.up_proj", "mlp.down_proj"]
    names = [f"{name}.base_layer" if name in wrapped else name for name in LLAMA]
    expected = sorted(
        f"base_model.model.model.layers.{number}.{name}" for number in range(2) for name in names
    )
    for names, losses, apart in ranks2.run(in_fp8_and_trained, when):
        assert names == expected
        assert losses[-1] < losses[0] - 0.05
        assert 1e-5 < apart < 0.02
