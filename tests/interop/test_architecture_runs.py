"""A few of the models of docs/models-supported.md, and what the comparison makes of models split wrongly."""

from __future__ import annotations

import os

import pytest
from torch import nn

from tests.interop.architecture_runs import ours
from tpkernels import parallelize

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")

A_FEW = [
    "LlamaForCausalLM, one KV head",
    "Qwen3ForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "GPT2LMHeadModel",
    "T5ForConditionalGeneration",
]


@pytest.mark.parametrize("name", A_FEW)
def test_parallelize_without_a_plan_is_right(name, ranks2):
    for outcome in ranks2.run(ours, name):
        assert (outcome.verdict, outcome.why) == ("right", "")
        assert outcome.losses[1] < outcome.losses[0] - 0.5
        assert outcome.held < 0.8


def without_sums(model: nn.Module) -> nn.Module:
    """Gradients of norms of heads stay partial."""
    for module in parallelize(model).modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module._forward_pre_hooks.clear()
    return model


def with_a_wrong_bias(model: nn.Module) -> nn.Module:
    bias = parallelize(model).get_parameter("model.layers.1.mlp.down_proj.bias")
    bias.data.mul_(2)
    return model


def with_large_gradients(model: nn.Module) -> nn.Module:
    """Which AdamW does not show."""
    weight = parallelize(model).get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.register_hook(lambda gradient: 2 * gradient)
    return model


def unsplittable(model: nn.Module) -> nn.Module:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("name", "split", "verdict"),
    [
        ("Qwen3ForCausalLM", without_sums, "fails"),  # clip_grad_norm_ sees that ranks differ
        ("LlamaForCausalLM, biases", with_a_wrong_bias, "wrong"),
        ("LlamaForCausalLM, biases", with_large_gradients, "wrong"),
        ("LlamaForCausalLM, biases", unsplittable, "refused"),
    ],
)
def test_models_split_wrongly_are_not_called_right(name, split, verdict, ranks2):
    assert [outcome.verdict for outcome in ranks2.run(ours, name, split)] == [verdict] * 2
