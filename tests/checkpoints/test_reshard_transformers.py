"""Models of transformers, with experts and with adapters of peft, move to the bit and write the same text."""

from copy import deepcopy

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.checkpoints.test_reshard import over, unequal
from tests.checkpoints.test_reshard_models import scrambled
from tests.interop.refused import refused
from tests.interop.test_lora import unsharded, with_lora
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import parallelize, reshard


def text_of(model):
    return model.eval().generate(input_ids=IDS[:, :4], max_new_tokens=4, do_sample=False)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def on_meta(kind, state):
    with torch.device("meta"):
        model, plan = unsharded(kind)
    return parallelize(model, state, plan=plan)


@pytest.mark.parametrize("kind", ["Mixtral", "Llama"])
@on_ranks(2)
def test_a_model_of_transformers_goes_to_one_rank_and_back_in_place(kind):
    states = {tensor: over(tensor) for tensor in (1, 2)}
    whole, plan = unsharded(kind)
    expected = {tensor: parallelize(deepcopy(whole), states[tensor], plan=plan) for tensor in (1, 2)}
    model = deepcopy(expected[2])
    outputs = {tensor: (logits_of(each), text_of(each)) for tensor, each in ((1, whole), (2, model))}
    assert torch.equal(outputs[1][1], outputs[2][1])
    for tensor in (1, 2):
        other = on_meta(kind, states[tensor])
        reshard(model, to=other, free_source=True, bucket_bytes=512)
        assert unequal(other, expected[tensor]) == []
        logits, text = outputs[tensor]
        assert torch.equal(logits_of(other), logits)
        assert torch.equal(text_of(other), text)
        model = other


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
@on_ranks(2)
def test_adapters_of_peft_move_with_their_layers(kind):
    states = {tensor: over(tensor) for tensor in (1, 2)}
    whole = with_lora(kind, "never", second={"r": 2, "target_modules": ["q_proj", "o_proj"]})
    expected = {tensor: parallelize(deepcopy(whole), states[tensor]) for tensor in (1, 2)}
    model = deepcopy(expected[2])
    for tensor in (1, 2):
        other = scrambled(deepcopy(expected[tensor]))
        reshard(model, to=other)
        assert unequal(other, expected[tensor]) == []
        for adapter in ("default", "second"):
            for each in (other, expected[tensor]):
                each.set_adapter(adapter)
            assert torch.equal(logits_of(other), logits_of(expected[tensor]))
        assert torch.equal(text_of(other), text_of(expected[tensor]))
        model = other
    model.merge_adapter()
    assert refused("ValueError", "has an adapter of peft merged", reshard, model, to=deepcopy(expected[1]))
