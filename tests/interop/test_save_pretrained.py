"""A split model of `transformers` saves what the unsharded one would."""

from __future__ import annotations

import os

import pytest

from tests.interop.save_cases import (
    loaded_apart,
    number_of_files,
    parts_and_copies_apart,
    pushed,
    refusals,
    saved_by_a_library,
    unlike_the_unsharded,
)

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


@pytest.fixture
def needed():
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")


of_transformers = pytest.mark.usefixtures("needed")

NAMES = [
    "LlamaForCausalLM",  # whose vocabulary is padded
    "LlamaForCausalLM, tied",
    "LlamaForCausalLM, one KV head",  # a replicated weight
    "GPT2LMHeadModel",  # transposed and stacked weights
    "Phi3ForCausalLM",  # stacked weights of several sizes
    "MixtralForCausalLM",  # experts in one tensor, of which the file has many
    "T5ForConditionalGeneration",  # one weight, three names
]


@of_transformers
@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_the_unsharded_model(name, ranks2, tmp_path):
    assert ranks2.run(unlike_the_unsharded, name, str(tmp_path), {}) == [[], []]


@of_transformers
def test_from_pretrained_computes_the_same(ranks2, tmp_path):
    for apart in ranks2.run(loaded_apart, "MixtralForCausalLM", str(tmp_path)):
        assert apart < 1e-6


@of_transformers
def test_several_files_and_their_index_are_those_of_the_unsharded_model(ranks2, tmp_path):
    options = {"max_shard_size": "20KB"}
    assert ranks2.run(unlike_the_unsharded, "LlamaForCausalLM", str(tmp_path), options) == [[], []]
    assert ranks2.run(number_of_files, "LlamaForCausalLM", str(tmp_path / "more"))[0] > 1


@of_transformers
def test_shards_and_unwritable_folders_are_refused_on_all_ranks(ranks2, tmp_path):
    answers = ranks2.run(refusals, str(tmp_path))
    assert answers[0] == answers[1]
    (shards, text), (checkpoint, advice), (folder, _) = answers[0]
    assert (shards, checkpoint, folder) == ("ValueError", "ValueError", "NotADirectoryError")
    assert "state_dict has 'model.embed_tokens.weight' of (31, 32), expected the full tensor's (61" in text
    assert "tpkernels.interop.dcp.save" in advice


@of_transformers
def test_models_inside_and_copies_save_their_own_weights(ranks2, tmp_path):
    assert ranks2.run(parts_and_copies_apart, str(tmp_path)) == [[0.0, 0.0, 0.0]] * 2


@of_transformers
def test_one_rank_talks_to_the_hub(ranks2, tmp_path):
    assert ranks2.run(pushed, str(tmp_path)) == [([0], (32, 32)), ([], (32, 32))]


def test_models_of_any_library_are_saved_once_for_all_replicas(ranks4, tmp_path):
    shapes = {"0.weight": (7, 4), "1.weight": (8, 4), "2.weight": (4, 8), "2.bias": (4,)}
    assert ranks4.run(saved_by_a_library, str(tmp_path)) == [(["rank 0"], shapes)] * 4
