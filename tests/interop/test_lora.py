"""LoRA of peft on shards is LoRA of the unsharded model, before and after parallelize."""

import copy
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import transformers
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from tests.blocks import blocks_of
from tests.checks import error_of
from tests.ranks import RankFailure
from tests.test_docs import ROOT, run_on_two_ranks
from tpkernels import Recipe, check_replicas, clip_grad_norm_, initialize_model_parallel, parallelize
from tpkernels.interop import dcp, huggingface
from tpkernels.interop.full_state_dict import full_state_dict
from tpkernels.interop.peft import on_shards, save_adapter

SIZES = {"vocab_size": 37, "bos_token_id": None, "eos_token_id": None}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 4}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
IDS = torch.arange(24).view(2, 12) * 5 % 37


def unsharded(kind):
    """The model and its plan."""
    torch.manual_seed(1)
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, **LLAMA)
        return transformers.LlamaForCausalLM(config).double(), huggingface.llama_plan(config)
    config = transformers.GPT2Config(**SIZES, **GPT2, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config).double(), huggingface.gpt2_plan(config)


def options(kind, **more):
    said = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[kind], "init_lora_weights": False}
    return LoraConfig(**{**said, "fan_in_fan_out": kind == "gpt2", **more})


def in_fp8_and_trained(when):
    """What is in fp8; losses, and how far these are from those without, relative to them."""
    initialize_model_parallel(dist.get_world_size())
    found = []
    for recipe in (Recipe.rowwise(), None):
        model, plan = unsharded("llama")
        model.float()
        if when == "after":
            model = parallelize(model, plan=plan, quantize=recipe)
            torch.manual_seed(2)
            model = get_peft_model(model, on_shards(options("llama")))
        else:
            torch.manual_seed(2)
            lora = get_peft_model(model, options("llama"))
            model = parallelize(lora, plan=plan, quantize=recipe)
        named = sorted(n for n, m in model.named_modules() if getattr(m, "quantize", None) is not None)
        found.append((named, steps(model)))
    (named, losses), (_, expected) = found
    apart = max(abs(ours - other) / other for ours, other in zip(losses, expected, strict=True))
    return named, losses, apart


def with_lora(kind, when, **more):
    """when: before or after parallelize, or never"""
    model, plan = unsharded(kind)
    if when == "after":
        model = parallelize(model, plan=plan)
        torch.manual_seed(2 + dist.get_rank())  # the first rank's are taken
        return get_peft_model(model, on_shards(options(kind, **more)), autocast_adapter_dtype=False)
    torch.manual_seed(2)
    lora = get_peft_model(model, options(kind, **more), autocast_adapter_dtype=False)
    return parallelize(lora, plan=plan) if when == "before" else lora


def loss_of(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def steps(model, count=5):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(kind, when):
    """Losses; how far weights are from the unsharded model's on rank 0; how many factors there are."""
    initialize_model_parallel(dist.get_world_size())
    model, alone = with_lora(kind, when), with_lora(kind, "never")
    if when == "after":  # drawn where the unsharded model had its weights drawn already
        _draw_alike(model, alone)
    expected, losses = steps(alone), steps(model)
    check_replicas(model)
    full = full_state_dict(model)
    theirs = alone.state_dict()
    apart = [float((full[name] - theirs[name]).abs().max()) for name in full]
    apart += [abs(ours - own) for ours, own in zip(losses, expected, strict=True)]
    assert losses[-1] < losses[0] - 0.05
    return losses, max(apart), sum("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def _draw_alike(model, alone):
    """Before any step the factors are the first rank's draws, which the unsharded model draws, too."""
    full = [full_state_dict(model)]
    dist.broadcast_object_list(full)
    theirs = alone.state_dict()
    wrong = [name for name, tensor in full[0].items() if not torch.equal(tensor, theirs[name])]
    assert not wrong, wrong


def merged(kind, when):
    """Classes of layers after `merge_and_unload`, and how far logits are from before."""
    initialize_model_parallel(dist.get_world_size())
    model = with_lora(kind, when)
    before = model(input_ids=IDS).logits.detach()
    with model.disable_adapter():
        assert not torch.allclose(model(input_ids=IDS).logits, before)
    model.merge_adapter()
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    apart = float((plain(input_ids=IDS).logits - before).abs().max())
    return sorted(
        {type(module).__name__ for module in plain.modules() if "lora" in type(module).__module__}
    ), apart


def saved(folder, when):
    """Logits; how far are those of the unsharded model, and of a split one, that read the adapter."""
    initialize_model_parallel(dist.get_world_size())
    model = with_lora("llama", when, modules_to_save=["norm", "lm_head"])
    steps(model, 2)
    logits = model(input_ids=IDS).logits.detach()
    save_adapter(model, folder)
    dist.barrier()
    base, plan = unsharded("llama")
    alone = PeftModel.from_pretrained(copy.deepcopy(base), folder, autocast_adapter_dtype=False)
    split = parallelize(PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False), plan=plan)
    return tuple(float((m(input_ids=IDS).logits - logits).abs().max()) for m in (alone, split))


def checkpointed(folder, when):
    initialize_model_parallel(dist.get_world_size())
    model, again = with_lora("llama", when), with_lora("llama", when)
    steps(model, 2)
    dcp.save(folder, model)
    dcp.load(folder, again)
    return float((model(input_ids=IDS).logits - again(input_ids=IDS).logits).abs().max())


def clipped():
    initialize_model_parallel(dist.get_world_size())
    model, alone = with_lora("llama", "before"), with_lora("llama", "never")
    loss_of(model).backward()
    loss_of(alone).backward()
    ours = clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    return float(ours), float(theirs)


def refusals(when):
    """By what is said, all that is said."""
    initialize_model_parallel(dist.get_world_size())
    model, plan = unsharded("llama")
    refused = {
        "expected lora_dropout=0.0, got 0.1": partial(with_lora, "llama", when, lora_dropout=0.1),
        "expected plain LoRA, got Dora": partial(with_lora, "llama", when, use_dora=True),
    }
    on_table = partial(with_lora, "llama", when, target_modules=["q_proj", "embed_tokens"])
    if when == "before":
        other = get_peft_model(model, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
        merged = with_lora("llama", "never")
        merged.merge_adapter()
        refused["expected no LoRA on an embedding whose rows are split"] = on_table
        refused["expected LoRA, or no adapter, got Linear of peft"] = partial(parallelize, other, plan=plan)
        refused["expected LoRA that is not merged"] = partial(parallelize, merged, plan=plan)
    else:
        split = parallelize(model, plan=plan)
        pissa = partial(with_lora, "llama", when, init_lora_weights="pissa")
        refused["got VocabParallelEmbedding"] = on_table
        refused["expected init_lora_weights True, False or 'gaussian', got 'pissa'"] = pissa
        refused["got HeadLinear"] = partial(with_lora, "llama", when, target_modules=["lm_head"])
        refused["is not supported"] = partial(get_peft_model, split, options("llama"))
    return {part: error_of(call)[1] for part, call in refused.items()}


PAGE = "lora.md"
WHEN = ("before", "after")


def test_the_program_of_the_page_runs(tmp_path):
    (block,) = [b for b in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if b.language == "py"]
    program = tmp_path / "program.py"
    program.write_text(block.text)
    ran = run_on_two_ranks(program, tmp_path)
    assert ran.returncode == 0, ran.stderr
    written = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= written


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_five_steps_are_those_of_the_unsharded_model(kind, when, ranks2):
    for losses, apart, factors in ranks2.run(trained, kind, when):
        assert apart < 1e-9
        assert len(losses) == 5
        assert factors == 2 * 2 * (5 if kind == "llama" else 4)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_factors_are_merged_into_shards(kind, when, ranks2):
    for left, apart in ranks2.run(merged, kind, when):
        assert left == []
        assert apart < 1e-12


@pytest.mark.parametrize("when", WHEN)
def test_an_adapter_is_saved_whole_and_read_anywhere(when, ranks2, tmp_path):
    for alone, split in ranks2.run(saved, str(tmp_path), when):
        assert alone < 1e-12
        assert split < 1e-12


@pytest.mark.parametrize("when", WHEN)
def test_checkpoints_hold_adapters(when, ranks2, tmp_path):
    assert ranks2.run(checkpointed, str(tmp_path / "saved"), when) == [0.0] * 2


def test_the_norm_is_the_unsharded_model_s(ranks2):
    for ours, theirs in ranks2.run(clipped):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("when", WHEN)
def test_what_would_be_wrong_on_shards_is_refused(when, ranks2):
    for said in ranks2.run(refusals, when):
        assert [part for part, text in said.items() if part not in text] == []


FAMILY = {
    **SIZES,
    **LLAMA,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": None,
}
OWN = {"Gemma": {"num_key_value_heads": 1}, "Mixtral": {"num_local_experts": 4}}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILY_TARGETS = {"Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "Mixtral": ATTENTION}


def family_difference(family, when, sequence_parallel=False):
    """Largest difference of losses over five AdamW steps from the unsharded LoRA model's."""
    initialize_model_parallel(2)
    config = getattr(transformers, f"{family}Config")(**FAMILY | OWN.get(family, {}))
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model if family == "Mixtral" else model.double()  # experts are multiplied in float32 at most
    targets = FAMILY_TARGETS.get(family, [*ATTENTION, "up_proj", "down_proj"])
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
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
    ours, theirs = steps(model), steps(alone)
    check_replicas(model)
    assert theirs[-1] < theirs[0] - 0.02
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


BEFORE = [("Qwen3", True), *((family, False) for family in ("Qwen3", "Phi3", "Gemma", "Mixtral"))]


@pytest.mark.parametrize(
    ("when", "family", "sharing"),
    [*(("before", *each) for each in BEFORE), ("after", "Qwen3", False), ("after", "Mixtral", False)],
)
def test_lora_of_a_family_is_the_unsharded_model_s(when, family, sharing, ranks2):
    assert max(ranks2.run(family_difference, family, when, sharing)) < 2e-6


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
