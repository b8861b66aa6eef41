"""A split model of `transformers` saves what the unsharded one would."""

import json
import os
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.interop.architectures import inputs_of, model_of
from tests.interop.refused import refused_alike
from tests.on_ranks import on_ranks
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.checkpoints import safetensors
from tpkernels.interop.parallelize.saving import refuse_to_save_shards, save_full_weights


def built(name):
    """The unsharded model and the split one."""
    initialize_model_parallel(2)
    full = model_of(name).eval()
    return full, parallelize(deepcopy(full), verify=False)


def logits_of(model, name):
    with torch.no_grad():
        return model(**inputs_of(name)).logits


def saved(model, folder, **options):
    """By all ranks; the tensors in the files."""
    model.save_pretrained(folder, **options)
    return {name: tensor.clone() for name, tensor in safetensors.read(folder).items()}


def saves_as_the_unsharded(name, folder, options):
    """Files, their tensors and names, and the index's count are those that the unsharded model writes."""
    full, split = built(name)
    found = saved(split, os.path.join(folder, "split"), **options)
    if dist.get_rank() == 0:
        full.save_pretrained(os.path.join(folder, "full"), **options)
    dist.barrier()
    expected = dict(safetensors.read(os.path.join(folder, "full")))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    for index in Path(folder, "full").glob("*.index.json"):
        ours, theirs = (json.loads(Path(folder, of, index.name).read_text()) for of in ("split", "full"))
        assert ours == theirs
    assert {*os.listdir(Path(folder, "split"))} == {*os.listdir(Path(folder, "full"))}


class Library(nn.Sequential):
    """A model with a `save_pretrained`."""

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), os.path.join(folder, f"rank {dist.get_rank()}"))


@on_ranks(4)
def test_models_of_any_library_are_saved_once_for_all_replicas(tmp_path):
    initialize_model_parallel(2)
    torch.manual_seed(0)
    model = Library(nn.Embedding(7, 4), nn.Linear(4, 8, bias=False), nn.Linear(8, 4))
    parallelize(model, plan={"0": "embedding", "1": "column", "2": "row"})
    model.save_pretrained(tmp_path)
    assert os.listdir(tmp_path) == ["rank 0"]
    shapes = {"0.weight": (7, 4), "1.weight": (8, 4), "2.weight": (4, 8), "2.bias": (4,)}
    assert {n: tuple(tensor.shape) for n, tensor in torch.load(tmp_path / "rank 0").items()} == shapes


class Config:
    """Of an adapter, as `interop.peft.on_shards` returns it."""

    def __init__(self):
        self.save_pretrained = refuse_to_save_shards


class Adapted(Library):
    """As peft does, it has its configuration saved after its tensors."""

    peft_config: dict[str, Config]

    def save_pretrained(self, folder):
        super().save_pretrained(folder)
        if "save_pretrained" in vars(self.peft_config["default"]):
            self.peft_config["default"].save_pretrained(folder)


@on_ranks(2)
def test_shards_of_an_adapter_are_refused_until_full_ones_are_saved(tmp_path):
    initialize_model_parallel(2)
    torch.manual_seed(0)
    model = Adapted(parallelize(nn.Sequential(nn.Linear(4, 8)), plan={"0": "head"}))
    model.peft_config = {"default": Config()}
    with pytest.raises(RuntimeError, match=r"call tpkernels.interop.peft.save_full_weights\(model\) after"):
        model.save_pretrained(tmp_path)
    save_full_weights(model)
    for _ in range(2):
        model.save_pretrained(tmp_path)
    assert "save_pretrained" in vars(model.peft_config["default"])


needs_both = pytest.mark.skipif(
    None in (find_spec("transformers"), find_spec("safetensors")),
    reason="transformers or safetensors is not installed",
)
NAMES = [
    "LlamaForCausalLM",  # whose vocabulary is padded
    "LlamaForCausalLM, tied",
    "LlamaForCausalLM, one KV head",  # a replicated weight
    "GPT2LMHeadModel",  # transposed and stacked weights
    "Phi3ForCausalLM",  # stacked weights of several sizes
    "MixtralForCausalLM",  # experts in one tensor, of which the file has many
    "T5ForConditionalGeneration",  # one weight, three names
]


@needs_both
@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_the_unsharded_model(name, ranks2, tmp_path):
    ranks2.run(saves_as_the_unsharded, name, str(tmp_path), {})


@needs_both
def test_several_files_and_their_index_are_the_unsharded_models(ranks2, tmp_path):
    options = {"max_shard_size": "20KB"}
    ranks2.run(saves_as_the_unsharded, "LlamaForCausalLM", str(tmp_path), options)
    assert len([*Path(tmp_path, "split").glob("model-*.safetensors")]) > 1


@needs_both
@on_ranks(2)
def test_shards_and_unwritable_folders_are_refused_on_all_ranks(tmp_path):
    _, split = built("LlamaForCausalLM")
    file = tmp_path / f"file {dist.get_rank()}"
    file.write_text("")
    save, shape = split.save_pretrained, "of (31, 32), expected the full tensor's (61"
    shards = f"state_dict has 'model.embed_tokens.weight' {shape}"
    refused_alike("ValueError", shards, save, tmp_path, state_dict=split.state_dict())
    refused_alike("ValueError", "checkpoints.dcp.save", save, tmp_path, distributed_checkpoint=True)
    refused_alike("NotADirectoryError", "", save, str(file / "folder"))


QUERY = "model.layers.0.self_attn.q_proj.weight"


@needs_both
@on_ranks(2)
def test_models_inside_and_copies_save_their_own_weights(tmp_path):
    name = "LlamaForCausalLM"
    full, split = built(name)
    before, query = logits_of(split, name), full.get_parameter(QUERY).detach()
    inner = saved(split.model, tmp_path / "inner")
    assert torch.equal(inner[QUERY.removeprefix("model.")], query)
    copied = deepcopy(split)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert torch.equal(saved(copied, tmp_path / "copy")[QUERY], 2 * query)
    assert torch.equal(logits_of(split, name), before)
    assert split.state_dict()[QUERY].shape[0] * 2 == len(query)


@needs_both
@on_ranks(2)
def test_one_rank_talks_to_the_hub(tmp_path):
    _, split = built("LlamaForCausalLM")
    talking = []

    def push_to_hub(self, where):
        talking.append(dist.get_rank())
        self.save_pretrained(where)
        return where

    with patch.object(type(split), "push_to_hub", push_to_hub):
        returned = split.push_to_hub(tmp_path)
    first = dist.get_rank() == 0
    assert (returned, talking) == ((tmp_path, [0]) if first else (None, []))
    assert safetensors.read(tmp_path)[QUERY].shape == (32, 32)
