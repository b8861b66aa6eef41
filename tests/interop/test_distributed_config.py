"""`parallelize` understands the plans of `transformers`: `tp_plan`, and `DistributedConfig`."""

import os
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.interop.architectures import VOCABULARY, model_of
from tests.interop.models import needs_transformers
from tests.interop.refused import refused_alike
from tests.on_ranks import on_ranks
from tpkernels import initialize_model_parallel, parallelize

pytestmark = needs_transformers

LLAMA, TOKENS = "LlamaForCausalLM", torch.arange(16).view(2, 8) * 7 % (VOCABULARY - 3) + 3
GATE = "model.layers.*.mlp.gate_proj"


def distributed(**fields):
    return import_module("transformers.distributed").DistributedConfig(**fields)


def in_config(model, found):
    model.config.distributed_config = found


REQUESTS = {
    "auto": lambda model: "auto",
    "size": lambda model: distributed(tp_size=2),
    "size and auto": lambda model: distributed(tp_size=2, tp_plan="auto"),
    "one style": lambda model: distributed(tp_size=2, tp_plan={GATE: "colwise"}),
    "the model's styles": lambda model: dict(model.tp_plan),
    "in the config": lambda model: in_config(model, distributed(tp_size=2)),
    "as a dict in the config": lambda model: in_config(model, distributed(tp_size=2).to_dict()),
}


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS)
def test_requests_split_as_the_models_own_plan(request_of, ranks2):
    ranks2.run(split_alike, [*REQUESTS.values()].index(request_of))


def split_alike(number):
    initialize_model_parallel(2)
    model, expected = model_of(LLAMA), parallelize(model_of(LLAMA))
    parallelize(model, plan=[*REQUESTS.values()][number](model))
    found = [(name, type(module)) for name, module in model.named_modules()]
    assert found == [(name, type(module)) for name, module in expected.named_modules()]
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@on_ranks(2)
def test_styles_override_the_models_own_plan():
    initialize_model_parallel(2)
    model, expected = model_of(LLAMA), model_of(LLAMA)(TOKENS).logits
    parallelize(model, plan=distributed(tp_size=2, tp_plan={"lm_head": "replicate"}))
    assert type(model.lm_head) is nn.Linear
    assert model.model.layers[0].mlp.up_proj.weight.shape == (24, 32)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-6)


@on_ranks(2)
def test_models_with_a_config_of_ranks_are_saved(tmp_path):
    """With it, `save_pretrained` waits for all ranks; of which one alone calls it here."""
    initialize_model_parallel(2)
    model, asked = model_of(LLAMA), distributed(tp_size=2)
    model.config.distributed_config = asked
    expected = model(TOKENS).logits
    parallelize(model).save_pretrained(tmp_path)
    assert model.config.distributed_config is asked
    torch.testing.assert_close(type(model_of(LLAMA)).from_pretrained(tmp_path)(TOKENS).logits, expected)


REFUSED = {
    "ranks": ({"tp_size": 4}, "expected tp_size=2, the size of the tensor-parallel group, got 4"),
    "no plan": ({"tp_size": 2, "tp_plan": {}}, "tp_plan={} splits nothing; leave it out"),
    "stages": ({"tp_size": 2, "pp_size": 2}, "pp_size=2 is not what parallelize does: pipeline stages"),
    "fsdp": ({"tp_size": 2, "fsdp_size": 2}, "fsdp_size=2 is not what parallelize does: apply fully_shard"),
    "experts": (
        {"tp_size": 2, "ep_size": 2},
        "ep_size=2 is not what parallelize does: every rank has a shard",
    ),
    "tokens": (
        {"tp_size": 2, "enable_sequence_parallel": True},
        "pass sequence_parallel=True to parallelize",
    ),
    "pattern": ({"tp_size": 2, "tp_plan": {"model.gate": "colwise"}}, "fits no module or parameter"),
    "style": ({"tp_size": 2, "tp_plan": {GATE: "colwise", "lm_head": "up"}}, "expected a style among"),
    "wrong": (
        {"tp_size": 2, "tp_plan": {GATE: "replicate"}},
        "'model.layers.0.mlp' does not take this rank's",
    ),
}


@on_ranks(2)
def test_requests_that_cannot_be_fulfilled_are_refused():
    initialize_model_parallel(2)
    for fields, text in REFUSED.values():
        refused_alike("ValueError", text, parallelize, model_of(LLAMA), plan=distributed(**fields))
    refused_alike("TypeError", "expected a plan, 'auto', a", parallelize, model_of(LLAMA), plan="colwise")


@on_ranks(2)
def test_models_that_transformers_has_split_are_refused(tmp_path):
    initialize_model_parallel(2)
    model = model_of(LLAMA)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()
    with patch.dict(os.environ, RANK=str(dist.get_rank()), LOCAL_RANK="0", WORLD_SIZE="2"):
        split = type(model).from_pretrained(tmp_path, distributed_config=distributed(tp_size=2))
    refused_alike("ValueError", "got one that transformers has split", parallelize, split)
