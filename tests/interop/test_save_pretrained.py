"""A split model of `transformers` saves what the unsharded one would."""

import json
import os
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checks import error_of
from tests.interop.architectures import inputs_of, model_of
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.checkpoints import safetensors


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


def refusals(folder):
    """Of shards, of transformers' own distributed checkpoints, and of a folder inside a file."""
    _, split = built("LlamaForCausalLM")
    file = Path(folder, f"file {dist.get_rank()}")
    file.write_text("")
    save = split.save_pretrained
    return [
        error_of(save, folder, state_dict=split.state_dict()),
        error_of(save, folder, distributed_checkpoint=True),
        error_of(save, str(file / "folder")),
    ]


def parts_and_copies_apart(folder):
    """A model inside the model; a copy that was changed; and the split model, which stays as it was."""
    name = "LlamaForCausalLM"
    full, split = built(name)
    before = logits_of(split, name)
    inner = saved(split.model, os.path.join(folder, "inner"))
    apart = [float((inner["layers.0.self_attn.q_proj.weight"] - _query(full)).abs().max())]
    copied = deepcopy(split)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    copy = saved(copied, os.path.join(folder, "copy"))
    apart.append(float((copy["model.layers.0.self_attn.q_proj.weight"] - 2 * _query(full)).abs().max()))
    apart.append(float((logits_of(split, name) - before).abs().max()))
    own = split.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert own.shape[0] * 2 == _query(full).shape[0]
    return apart


def _query(full):
    return full.get_parameter("model.layers.0.self_attn.q_proj.weight").detach()


def pushed(folder):
    """Ranks that talk to the hub, and the shape of a weight that they upload."""
    _, split = built("LlamaForCausalLM")
    talking = []

    def push_to_hub(self, where):
        talking.append(dist.get_rank())
        self.save_pretrained(where)
        return where

    before = type(split).push_to_hub
    type(split).push_to_hub = push_to_hub
    try:
        returned = split.push_to_hub(folder)
    finally:
        type(split).push_to_hub = before
    assert returned == (folder if dist.get_rank() == 0 else None)
    return talking, tuple(safetensors.read(folder)["model.layers.0.self_attn.q_proj.weight"].shape)


class Library(nn.Sequential):
    """A model with a `save_pretrained`."""

    def save_pretrained(self, folder):
        torch.save(self.state_dict(), os.path.join(folder, f"rank {dist.get_rank()}"))


def saved_by_a_library(folder):
    """Files, and shapes in the first one's, of a model on two tensor-parallel and two data-parallel ranks."""
    initialize_model_parallel(2)
    torch.manual_seed(0)
    model = Library(nn.Embedding(7, 4), nn.Linear(4, 8, bias=False), nn.Linear(8, 4))
    parallelize(model, plan={"0": "embedding", "1": "column", "2": "row"})
    model.save_pretrained(folder)
    loaded = torch.load(os.path.join(folder, "rank 0"))
    return sorted(os.listdir(folder)), {name: tuple(tensor.shape) for name, tensor in loaded.items()}


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
def test_several_files_and_their_index_are_those_of_the_unsharded_model(ranks2, tmp_path):
    options = {"max_shard_size": "20KB"}
    ranks2.run(saves_as_the_unsharded, "LlamaForCausalLM", str(tmp_path), options)
    assert len([*Path(tmp_path, "split").glob("model-*.safetensors")]) > 1


@needs_both
def test_shards_and_unwritable_folders_are_refused_on_all_ranks(ranks2, tmp_path):
    answers = ranks2.run(refusals, str(tmp_path))
    assert answers[0] == answers[1]
    (shards, text), (checkpoint, advice), (folder, _) = answers[0]
    assert (shards, checkpoint, folder) == ("ValueError", "ValueError", "NotADirectoryError")
    assert "state_dict has 'model.embed_tokens.weight' of (31, 32), expected the full tensor's (61" in text
    assert "tpkernels.checkpoints.dcp.save" in advice


@needs_both
def test_models_inside_and_copies_save_their_own_weights(ranks2, tmp_path):
    assert ranks2.run(parts_and_copies_apart, str(tmp_path)) == [[0.0, 0.0, 0.0]] * 2


@needs_both
def test_one_rank_talks_to_the_hub(ranks2, tmp_path):
    assert ranks2.run(pushed, str(tmp_path)) == [([0], (32, 32)), ([], (32, 32))]


def test_models_of_any_library_are_saved_once_for_all_replicas(ranks4, tmp_path):
    shapes = {"0.weight": (7, 4), "1.weight": (8, 4), "2.weight": (4, 8), "2.bias": (4,)}
    assert ranks4.run(saved_by_a_library, str(tmp_path)) == [(["rank 0"], shapes)] * 4
