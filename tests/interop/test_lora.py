"""LoRA of peft on shards is LoRA of the unsharded model, before and after parallelize."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from tests.blocks import blocks_of
from tests.interop.lora_cases import checkpointed, clipped, merged, refusals, saved, trained
from tests.test_docs import ROOT, run_on_two_ranks

PAGE = "lora.md"
WHEN = ("before", "after")


def test_the_program_of_the_page_runs(tmp_path):
    (block,) = [b for b in blocks_of(PAGE, (ROOT / "docs" / PAGE).read_text()) if b.language == "py"]
    program = tmp_path / "program.py"
    program.write_text(block.text)
    ran = run_on_two_ranks(program, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        p.name for p in (tmp_path / "adapter").iterdir()
    }


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
    expected = {
        "before": {
            "dropout": "expected lora_dropout=0.0, got 0.1",
            "DoRA": "expected plain LoRA, got Dora",
            "embedding": "expected no LoRA on an embedding whose rows are split",
            "IA3": "expected LoRA, or no adapter, got Linear of peft",
            "merged": "expected LoRA that is not merged",
        },
        "after": {
            "dropout": "expected lora_dropout=0.0, got 0.1",
            "DoRA": "expected plain LoRA, got Dora",
            "embedding": "got VocabParallelEmbedding",
            "pissa": "expected init_lora_weights True, False or 'gaussian', got 'pissa'",
            "head": "got HeadLinear",
            "plain": "is not supported",
        },
    }[when]
    for said in ranks2.run(refusals, when):
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name], name
