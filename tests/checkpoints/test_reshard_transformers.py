"""Models of transformers, with experts and with adapters of peft, move to the bit and write the same text.

Those with stacked experts are saved, and resume at another size.
"""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.checkpoints.test_dcp import assert_resumes_at_other_sizes
from tests.checkpoints.test_reshard import over, unequal
from tests.checkpoints.test_reshard_models import scrambled
from tests.interop.architectures import model_of
from tests.interop.refused import refused
from tests.interop.test_lora import unsharded, with_lora
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tests.test_docs import PROGRAMS, run_block
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


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@on_ranks(2)
def test_experts_of_transformers_resume_and_reshard_at_another_size(kind, tmp_path):
    make = partial(model_of, f"{kind}ForCausalLM")
    assert_resumes_at_other_sizes(make, tmp_path)
    alone, split = (parallelize(make(), over(ranks), verify=False) for ranks in (1, 2))
    for source, expected in ((split, alone), (alone, split)):
        target = scrambled(deepcopy(expected))
        reshard(source, to=target)
        assert unequal(target, expected) == []


def test_the_fine_tuning_page_runs_with_experts(tmp_path):
    (page,) = [block for block in PROGRAMS if block.page == "fine-tune.md"]
    run = run_block(replace(page, text=page.text.replace("Llama", "Mixtral")), tmp_path)
    assert run.returncode == 0, run.stderr


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
