"""LoRA on models of several families, split without a plan."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from tests.interop.test_lora import IDS
from tests.ranks import RankFailure
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.interop.peft import on_shards

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")


SIZES = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Phi3": {},
    "Gemma": {"num_key_value_heads": 1},
    "Mixtral": {"num_local_experts": 4},
}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["up_proj", "down_proj"]
TARGETS = {"Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "Mixtral": ATTENTION}


def family_difference(family: str, when: str, sequence_parallel: bool = False) -> float:
    """Largest difference of losses over five AdamW steps from the unsharded LoRA model's."""
    initialize_model_parallel(2)
    config = getattr(transformers, f"{family}Config")(**SIZES | OWN[family])
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model if family == "Mixtral" else model.double()  # experts are multiplied in float32 at most
    lora = LoraConfig(r=4, target_modules=TARGETS.get(family, ATTENTION + MLP), init_lora_weights=False)
    alone = copy.deepcopy(model)
    if when == "after":
        model = parallelize(model, sequence_parallel=sequence_parallel)
    torch.manual_seed(2)
    config = on_shards(copy.deepcopy(lora)) if when == "after" else lora
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    if when == "before":
        model = parallelize(model, sequence_parallel=sequence_parallel)
    torch.manual_seed(2)
    alone = get_peft_model(alone, lora, autocast_adapter_dtype=False)
    ours, theirs = losses(model), losses(alone)
    check_replicas(model)
    assert theirs[-1] < theirs[0] - 0.02
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


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
