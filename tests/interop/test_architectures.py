"""Models of `transformers` on two ranks train as unsharded ones do, load, or are refused."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checks import error_of
from tests.interop.architecture_runs import ours
from tests.interop.architectures import IMAGE_TOWER, TEXT_TOWER, config_of
from tests.interop.models import needs_transformers
from tests.interop.refused import refused_alike
from tests.interop.torch_models import assert_gradients_alike, losses_of
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.checkpoints import safetensors
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.interop.huggingface import gpt2_plan, llama_plan
from tpkernels.interop.parallelize.plan import Divided, Split

pytestmark = needs_transformers

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 37, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"vocab_size": 37, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 16, "word_embed_proj_dim": 16, "dropout": 0.0}
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Olmo2")
OPT_PLAN: dict[str, Any] = {
    "*embed_tokens": "embedding",
    "*.self_attn.[qkv]_proj": Split("column", unit=4),
    "*.self_attn.out_proj": Split("row", unit=4),
    "*.fc1": "column",
    "*.fc2": "row",
    "lm_head": "head",
}


def built(kind: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model, the same on all ranks, and a plan."""
    import transformers

    torch.manual_seed(2)
    plan: dict[str, Any]
    if kind in LLAMA_LIKE:
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **NO_IDS, **options})
        plan = dict(llama_plan(config))
    elif kind == "Gemma3":  # whose table is a class of its own, and tied to the head: both stay
        config = transformers.Gemma3TextConfig(**SIZES, **NO_IDS, head_dim=4, **options)
        plan = {k: v for k, v in llama_plan(config).items() if k not in ("*embed_tokens", "lm_head")}
    elif kind == "GPT2":
        config = transformers.GPT2Config(**{**GPT2, **NO_IDS, **options})
        return transformers.GPT2LMHeadModel(config), dict(gpt2_plan(config))
    else:
        config = transformers.OPTConfig(**{**OPT, **NO_IDS, "pad_token_id": 1, **options})
        plan = OPT_PLAN | ({"*.self_attn": Divided("num_heads")} if kind == "OPT" else {})
        kind = "OPT"
    return getattr(transformers, f"{kind}ForCausalLM")(config), plan


def trained_alike(kind, options):
    """Losses and saved weights are the unsharded model's."""
    initialize_model_parallel(dist.get_world_size())
    model, plan = built(kind, **options)
    model = model.double()
    whole, split = deepcopy(model), parallelize(model, plan=plan)
    full = full_state_dict(split)
    for name, value in full.items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=0, abs=1e-6)
    check_replicas(split)


def refusal(kind, part):
    initialize_model_parallel(dist.get_world_size())
    model, plan = built(kind)
    refused_alike("ValueError", part, parallelize, model, plan=plan)


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [(kind, 2, {}) for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "GPT2", "OPT")]
    + [("Llama", 4, EIGHT_HEADS), ("GPT2", 4, {})],
)
def test_adamw_follows_the_unsharded_model(kind, ranks, options, request):
    request.getfixturevalue(f"ranks{ranks}").run(trained_alike, kind, options)


@pytest.mark.parametrize(
    ("kind", "ranks", "part"),
    [
        ("OPT without Divided", 2, "'model.decoder.layers.0.self_attn' does not take this rank's features"),
        ("Olmo2", 2, "'model.layers.0.self_attn.q_norm' does not take this rank's features"),
        ("Llama", 4, "k_proj': expected out_features that 4 ranks x unit 4"),
    ],
)
def test_wrong_plans_are_refused(kind, ranks, part, request):
    request.getfixturevalue(f"ranks{ranks}").run(refusal, kind, part)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        *((k, {}) for k in ("Llama", "Qwen3", "Gemma3", "GPT2", "OPT")),
    ],
)
@on_ranks(2)
def test_folders_load_into_models_from_the_meta_device(kind, options, tmp_path):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    initialize_model_parallel(2)
    whole, plan = built(kind, **options)
    if dist.get_rank() == 0:
        whole.save_pretrained(tmp_path)
    dist.barrier()
    with torch.device("meta"):
        split, _ = built(kind, **options)
    parallelize(split, plan=plan).to_empty(device="cpu")
    safetensors.load(tmp_path, split)
    torch.testing.assert_close(split(IDS).logits, whole(IDS).logits, rtol=0, atol=1e-6)


A_FEW = ["LlamaForCausalLM, one KV head", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "Phi3ForCausalLM"]
A_FEW += ["MixtralForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
A_FEW += ["GptOssForCausalLM", "Qwen3NextForCausalLM"]  # sinks of heads; a norm behind a linear attention


@pytest.mark.parametrize("name", A_FEW)
def test_parallelize_without_a_plan_is_right(name, ranks2):
    for outcome in ranks2.run(ours, name):
        assert (outcome.verdict, outcome.why) == ("right", "")
        assert outcome.losses[1] < outcome.losses[0] - 0.5
        assert outcome.held < 0.8


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_balancing_of_experts_leaves_padding_out(sequence_parallel):
    """The loss that balances them counts tokens, but no padding, of all ranks."""
    initialize_model_parallel(2)
    whole, _ = built("Mixtral", output_router_logits=True, router_aux_loss_coef=1.0)
    split = parallelize(deepcopy(whole), sequence_parallel=sequence_parallel)
    mask = torch.ones_like(IDS)
    mask[0, 3:] = mask[1, 6:] = 0
    labels = IDS.masked_fill(mask == 0, -100)
    found = [model(IDS, attention_mask=mask, labels=labels) for model in (split, whole)]
    assert found[1].aux_loss > 1
    for each in found:
        each.loss.backward()
    for name in ("loss", "aux_loss"):
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=0)
    assert_gradients_alike(split, whole, 1e-6)


WAVES = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
WAVES |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
PYRAMID = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_attention_heads": [2, 4], "sr_ratios": [2, 1]}
PYRAMID |= {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2}
QUERIES = TEXT_TOWER | {"encoder_hidden_size": 32, "cross_attention_frequency": 1}
BLIP = {"vision_config": IMAGE_TOWER, "qformer_config": QUERIES, "num_query_tokens": 4}
BLIP |= {"text_config": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **TEXT_TOWER}}
BLIP |= {"image_token_index": 7, "image_text_hidden_size": 32}
OF_TASKS: dict[str, Any] = {
    "BartForSequenceClassification": {},
    "BertForMultipleChoice": {},
    "GPT2ForSequenceClassification": {"pad_token_id": None},
    "Wav2Vec2ForCTC": WAVES,
    "SegformerForSemanticSegmentation": PYRAMID,
    "Blip2ForConditionalGeneration": BLIP,
    "InstructBlipForConditionalGeneration": BLIP,
    "BlipForConditionalGeneration": {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
    "EncoderDecoderModel": ("Bert", "Bert"),
    "VisionEncoderDecoderModel": ("ViT", "GPT2"),
}


def of_task(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(2)
    cls, said = getattr(transformers, name), OF_TASKS[name]
    if isinstance(said, tuple):
        configs = [config_of(getattr(transformers, f"{each}Config"), {}) for each in said]
        return cls(config=cls.config_class.from_encoder_decoder_configs(*configs))
    return cls(config_of(cls.config_class, said))


@pytest.mark.parametrize("name", OF_TASKS)
@on_ranks(2)
def test_inputs_are_made_up_for_models_of_tasks(name):
    """`parallelize` itself compares with the unsharded model; without inputs it would refuse, or warn."""
    initialize_model_parallel(2)
    model = of_task(name)
    before = sum(p.numel() for p in model.parameters())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        parallelize(model)
    assert [str(each.message) for each in told if "compared" in str(each.message)] == []
    assert sum(p.numel() for p in model.parameters()) < before


@on_ranks(2)
def test_weights_of_attention_are_not_given_away_in_shards():
    initialize_model_parallel(2)
    model, plan = built("Llama", attn_implementation="eager")
    parallelize(model, plan=plan)
    for each in (model, model.model):
        assert "output_attentions: expected False" in error_of(each, IDS, output_attentions=True)[1]
    assert model(IDS).logits.isfinite().all()
    whole, _ = built("Llama", attn_implementation="eager")
    parallelize(whole, plan={"*.up_proj": "column", "*.gate_proj": "column", "*.down_proj": "row"})
    assert whole(IDS, output_attentions=True).attentions[0].shape[1] == 4


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
