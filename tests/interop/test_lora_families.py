"""LoRA on models of several families, split without a plan."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.interop.lora_family_cases import family_difference
from tests.ranks import RankFailure


@pytest.mark.parametrize("family", ["Qwen3", "Phi3", "Gemma", "Mixtral"])
def test_lora_before_is_the_unsharded_model_s(family, ranks2):
    assert max(ranks2.run(family_difference, family, "before")) < 2e-6


def test_lora_before_with_sequence_parallel_is_the_unsharded_model_s(ranks2):
    assert max(ranks2.run(family_difference, "Qwen3", "before", True)) < 2e-6


@pytest.mark.parametrize("family", ["Qwen3", "Mixtral"])
def test_lora_after_is_the_unsharded_model_s(family, ranks2):
    assert max(ranks2.run(family_difference, family, "after")) < 2e-6


@pytest.mark.parametrize(
    ("family", "sharing", "said"),
    [
        ("Phi3", False, "whose stacked weights have one size"),
        ("Gemma", False, "got SharedHeadsLinear"),
        ("Qwen3", True, "expected a layer without sequence_parallel"),
    ],
)
def test_lora_after_on_other_layers_is_refused(family, sharing, said, ranks2):
    with pytest.raises(RankFailure, match=said):
        ranks2.run(family_difference, family, "after", sharing)
