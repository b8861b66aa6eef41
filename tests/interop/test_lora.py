"""LoRA of peft on shards is LoRA of the unsharded model, before and after parallelize."""

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import transformers
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from tests.checks import error_of
from tests.on_ranks import on_ranks
from tests.ranks import RankFailure
from tests.test_docs import ROOT, blocks_of, run_on_ranks
from tpkernels import Recipe, check_replicas, clip_grad_norm_, initialize_model_parallel, parallelize
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.interop import dcp, huggingface
from tpkernels.interop.peft import on_shards, save_full_weights

SIZES = {"vocab_size": 37, "bos_token_id": None, "eos_token_id": None}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OWN = {"Llama": {"num_key_value_heads": 4}, "Gemma": {"num_key_value_heads": 1}}
OWN |= {"Mixtral": {"num_local_experts": 4}, "GPT2": {**GPT2, "attn_pdrop": 0.0}}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "Llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "GPT2": ["c_attn", "c_proj", "c_fc"],
    "Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "Mixtral": ATTENTION,
}
IDS = torch.arange(24).view(2, 12) * 5 % 37
WHEN = ("before", "after")


def unsharded(kind):
    """The model and its plan, or None for the one that `parallelize` takes."""
    torch.manual_seed(1)
    sizes = SIZES | OWN.get(kind, {}) if kind == "GPT2" else SIZES | LLAMA | OWN.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    plan = {"Llama": huggingface.llama_plan, "GPT2": huggingface.gpt2_plan}.get(kind, lambda _: None)(config)
    return model if kind == "Mixtral" else model.double(), plan  # experts know float32 at most


def options(kind, **more):
    said = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "fan_in_fan_out": kind == "GPT2"}
    return LoraConfig(
        **{**said, "target_modules": TARGETS.get(kind, [*ATTENTION, "up_proj", "down_proj"]), **more}
    )


def in_fp8_and_trained(when):
    """What is in fp8; losses, and how far these are from those without, relative to them."""
    initialize_model_parallel(dist.get_world_size())
    found = []
    for recipe in (Recipe.rowwise(), None):
        model = with_lora("Llama", when, {"quantize": recipe}, torch.float32)
        named = sorted(n for n, m in model.named_modules() if getattr(m, "quantize", None) is not None)
        found.append((named, steps(model)))
    (named, losses), (_, expected) = found
    apart = max(abs(ours - other) / other for ours, other in zip(losses, expected, strict=True))
    return named, losses, apart


def with_lora(kind, when, split=None, dtype=None, reentrant=None, second=None, **more):
    """when: before or after parallelize, or never; split: options of that; more, second: of LoRA

    reentrant: which activation checkpointing there is; None: none
    """
    model, plan = unsharded(kind)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model, split = model.to(dtype), {"plan": plan, **(split or {})}
    of_shards = on_shards if when == "after" else lambda config: config
    if when == "after":
        model = parallelize(model, **split)
    torch.manual_seed(2 + dist.get_rank() * (when == "after"))  # the first rank's are taken
    lora = get_peft_model(model, of_shards(options(kind, **more)), autocast_adapter_dtype=False)
    if second:
        lora.add_adapter("second", of_shards(options(kind, **second)), autocast_adapter_dtype=False)
    if when == "after":
        save_full_weights(lora)
    return parallelize(lora, **split) if when == "before" else lora


def loss_of(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def steps(model, count=5):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    torch.manual_seed(5)  # of dropout
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(kind, when, split, more):
    """Losses, and weights on rank 0, are the unsharded model's; all factors are trained."""
    initialize_model_parallel(dist.get_world_size())
    model, alone = with_lora(kind, when, split, **more), with_lora(kind, "never", **more)
    factor = next(module for name, module in model.named_modules() if name.endswith("lora_B.default"))
    calls = []
    factor.register_forward_hook(lambda *_: calls.append(1))
    if when == "after":  # drawn where the unsharded model had its weights drawn already
        _draw_alike(model, alone)
    expected, losses = steps(alone), steps(model)
    assert len(calls) == (10 if "reentrant" in more else 5)
    check_replicas(model)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.02
    assert losses == pytest.approx(expected, rel=0, abs=2e-6 if kind == "Mixtral" else 1e-9)
    if kind != "Mixtral":  # whose experts know float32 at most
        for name, found in full_state_dict(model).items():
            torch.testing.assert_close(found, alone.state_dict()[name], rtol=0, atol=1e-9, msg=name)
    layers = {"GPT2": 4, "Llama": 5, "Phi3": 4, "Mixtral": 4}.get(kind, 6)
    factors = sum("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    assert factors == 2 * 2 * layers


def _draw_alike(model, alone):
    """Before any step the factors are the first rank's draws, which the unsharded model draws, too."""
    full = [full_state_dict(model)]
    dist.broadcast_object_list(full)
    theirs = alone.state_dict()
    for name, tensor in full[0].items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@on_ranks(2)
def test_factors_are_merged_into_shards(kind, when):
    initialize_model_parallel(2)
    model = with_lora(kind, when)
    before = model(input_ids=IDS).logits.detach()
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=IDS).logits, before)
    model.merge_adapter()
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    torch.testing.assert_close(plain(input_ids=IDS).logits, before, rtol=0, atol=1e-12)
    assert not any("lora" in type(module).__module__ for module in plain.modules())


@pytest.mark.parametrize("when", WHEN)
@on_ranks(2)
def test_an_adapter_is_saved_whole_and_read_anywhere(when, tmp_path):
    initialize_model_parallel(2)
    model = with_lora("Llama", when, modules_to_save=["norm", "lm_head"])
    steps(model, 2)
    logits = model(input_ids=IDS).logits.detach()
    model.save_pretrained(tmp_path)
    base, plan = unsharded("Llama")
    alone = PeftModel.from_pretrained(deepcopy(base), tmp_path, autocast_adapter_dtype=False)
    split = parallelize(PeftModel.from_pretrained(base, tmp_path, autocast_adapter_dtype=False), plan=plan)
    for other in (alone, split):
        torch.testing.assert_close(other(input_ids=IDS).logits, logits, rtol=0, atol=1e-12)


@on_ranks(2)
def test_shards_of_adapters_are_not_saved_unnoticed(tmp_path):
    initialize_model_parallel(2)
    model, plan = unsharded("Llama")
    lora = get_peft_model(parallelize(model, plan=plan), on_shards(options("Llama")))
    with pytest.raises(RuntimeError, match=r"call tpkernels.interop.peft.save_full_weights\(model\) after"):
        lora.save_pretrained(tmp_path / str(dist.get_rank()))
    save_full_weights(lora)
    for _ in range(2):
        lora.save_pretrained(tmp_path / "full")


@on_ranks(2)
def test_copies_of_split_layers_are_not_saved_unnoticed(tmp_path):
    """Where no adapter is on a split layer, and so peft alone makes the model."""
    initialize_model_parallel(2)
    model, plan = unsharded("Llama")
    kept = {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]}
    tables = {name: plan[name] for name in ("*embed_tokens", "lm_head")}
    lora = get_peft_model(parallelize(model, plan=tables), options("Llama", **kept))
    with pytest.raises(RuntimeError, match=r"which peft would save as the whole layer; call .*save_full"):
        lora.save_pretrained(tmp_path / str(dist.get_rank()))
    with pytest.raises(RuntimeError, match=r"embed_tokens.modules_to_save.default' is this rank's shard"):
        lora.state_dict()
    dcp.save(tmp_path / "dcp", lora)
    save_full_weights(lora)
    lora.save_pretrained(tmp_path / "full")
    lora.load_state_dict(lora.state_dict())
    alone = PeftModel.from_pretrained(unsharded("Llama")[0], tmp_path / "full", autocast_adapter_dtype=False)
    torch.testing.assert_close(alone(input_ids=IDS).logits, lora(input_ids=IDS).logits, rtol=0, atol=1e-12)


SECOND = {"r": 2, "target_modules": ["k_proj", "o_proj"], "bias": "all"}
BOTH = ("", "second/")
SAVED = {  # how save_pretrained is called, folders and files
    "all": ({}, BOTH, "adapter_model.safetensors"),
    "pickled": ({"safe_serialization": False}, BOTH, "adapter_model.bin"),
    "second": ({"selected_adapters": ["second"]}, ("second/",), "adapter_model.safetensors"),
}


@pytest.mark.parametrize("when", WHEN)
@on_ranks(2)
def test_adapters_are_saved_as_by_the_unsharded_model(when, tmp_path):
    initialize_model_parallel(2)
    kept = {"modules_to_save": ["norm", "lm_head"]}
    model, alone = (with_lora("Llama", each, second=SECOND, **kept) for each in (when, "never"))
    full = full_state_dict(model)
    if dist.get_rank() == 0:
        alone.load_state_dict(full)
    for name, (said, folders, weights) in SAVED.items():
        model.save_pretrained(tmp_path / "split" / name, **said)
        if dist.get_rank() == 0:
            alone.save_pretrained(tmp_path / "full" / name, **said)
            ours, theirs = (_files(tmp_path / of / name) for of in ("split", "full"))
            assert {*ours} == {f"{at}{name}" for at in folders for name in ("adapter_config.json", weights)}
            assert ours == theirs, name


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("adapter_*")}


@pytest.mark.parametrize("when", WHEN)
@on_ranks(2)
def test_checkpoints_hold_adapters(when, tmp_path):
    initialize_model_parallel(2)
    model, again = with_lora("Llama", when), with_lora("Llama", when)
    steps(model, 2)
    dcp.save(tmp_path / "saved", model)
    dcp.load(tmp_path / "saved", again)
    assert torch.equal(model(input_ids=IDS).logits, again(input_ids=IDS).logits)


@on_ranks(2)
def test_the_norm_is_the_unsharded_models():
    initialize_model_parallel(2)
    model, alone = with_lora("Llama", "before"), with_lora("Llama", "never")
    loss_of(model).backward()
    loss_of(alone).backward()
    ours = clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("when", WHEN)
@on_ranks(2)
def test_what_would_be_wrong_on_shards_is_refused(when):
    initialize_model_parallel(2)
    model, plan = unsharded("Llama")
    initial = {"path_initial_model_for_weight_conversion": "initial"}
    refused = {
        "expected None, because it loads full factors": partial(
            with_lora("Llama", when).save_pretrained, "nowhere", **initial
        ),
        "expected plain LoRA, got Dora": partial(with_lora, "Llama", when, use_dora=True),
    }
    on_table = partial(with_lora, "Llama", when, target_modules=["q_proj", "embed_tokens"])
    if when == "before":
        other = get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
        merged = with_lora("Llama", "never")
        merged.merge_adapter()
        refused["expected no LoRA on an embedding whose rows are split"] = on_table
        refused["expected LoRA, or no adapter, got Linear of peft"] = partial(parallelize, other, plan=plan)
        refused["expected LoRA that is not merged"] = partial(parallelize, merged, plan=plan)
    else:
        split = parallelize(model, plan=plan)
        pissa = partial(with_lora, "Llama", when, init_lora_weights="pissa")
        refused["got VocabParallelEmbedding"] = on_table
        refused["expected init_lora_weights True, False or 'gaussian', got 'pissa'"] = pissa
        refused["got HeadLinear"] = partial(with_lora, "Llama", when, target_modules=["lm_head"])
        refused["is not supported"] = partial(get_peft_model, split, options("Llama"))
    for part, call in refused.items():
        assert part in error_of(call)[1]


PAGE = "lora.md"
LAYER = "base_model.model.model.layers.0.self_attn"


def test_the_program_of_the_page_runs(tmp_path):
    (block,) = [b for b in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if b.language == "py"]
    program = tmp_path / "program.py"
    program.write_text(block.text)
    ran = run_on_ranks(2, program)
    assert ran.returncode == 0, ran.stderr
    written = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written


@pytest.mark.parametrize(
    ("when", "kind", "split", "more"),
    [
        *((when, kind, {}, {}) for when in WHEN for kind in ("Qwen3", "Mixtral")),
        *((when, kind, {}, {"lora_dropout": 0.1}) for when in WHEN for kind in ("Llama", "GPT2")),
        *(("before", "Qwen3", {}, {"lora_dropout": 0.1, "reentrant": kind}) for kind in (True, False)),
        *(("before", kind, {}, {}) for kind in ("Phi3", "Gemma")),
        ("before", "Qwen3", {"sequence_parallel": True}, {"lora_dropout": 0.1}),
    ],
)
def test_five_steps_are_those_of_the_unsharded_model(when, kind, split, more, ranks2):
    ranks2.run(trained, kind, when, split, more)


@pytest.mark.parametrize(
    ("kind", "sharing", "said"),
    [
        ("Phi3", False, "whose stacked weights have one size"),
        ("Gemma", False, "got SharedHeadsLinear"),
        ("Qwen3", True, "expected a layer without sequence_parallel"),
    ],
)
def test_lora_after_on_other_layers_is_refused(kind, sharing, said, ranks2):
    with pytest.raises(RankFailure, match=said):
        ranks2.run(trained, kind, "after", {"sequence_parallel": sharing}, {})


@on_ranks(2)
def test_an_adapter_that_is_not_active_costs_no_split():
    """What is split, and what each adapter computes once it is active."""
    initialize_model_parallel(2)
    second = options("Llama", target_modules=["k_proj", "down_proj"])
    models = [with_lora("Qwen3", "never") for _ in range(2)]
    for model in models:
        torch.manual_seed(4)
        model.add_adapter("second", second, autocast_adapter_dtype=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        parallelize(models[0])
    assert type(models[0].get_submodule(f"{LAYER}.k_proj.base_layer")).__name__ == "ColumnLinear"
    assert models[0].active_adapters == ["default"]
    for name in ("default", "second"):
        for model in models:
            model.set_adapter(name)
        split, alone = (model(input_ids=IDS).logits for model in models)
        torch.testing.assert_close(split, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
@on_ranks(2)
def test_virtual_tokens_are_right_and_virtual_keys_are_refused(kind):
    initialize_model_parallel(2)
    said = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    said |= {"encoder_hidden_size": 8} if kind is PromptEncoderConfig else {}
    gradients = []
    for split in (False, True):
        model, plan = unsharded("Llama")
        torch.manual_seed(2)
        tuned = get_peft_model(model, kind(**said), autocast_adapter_dtype=False).double()
        if split:
            parallelize(tuned, plan=plan)
        if split and kind is PrefixTuningConfig:
            assert "Use prompt tuning, or LoRA" in error_of(loss_of, tuned)[1]
            return
        loss_of(tuned).backward()
        gradients.append({name: p.grad for name, p in tuned.named_parameters() if p.requires_grad})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
