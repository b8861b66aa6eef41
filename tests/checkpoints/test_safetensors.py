"""One file of whole tensors: readable by others, and loaded by any number of ranks."""

import json
import os
import struct
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.interop.models import built, loss_of
from tests.interop.refused import refused_alike
from tests.layers.worlds import posing
from tests.models.small import CONFIGS
from tests.on_ranks import on_ranks
from tpkernels import (
    GPT,
    VocabParallelEmbedding,
    create_parallel_state,
    initialize_model_parallel,
    plan_groups,
)
from tpkernels.checkpoints import safetensors
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file

KINDS = ("llama", "gpt2", "odd")


def save_all(folder, tensor):
    """Save each kind; the whole tensors, of rank 0 only."""
    initialize_model_parallel(tensor)
    whole = {}
    for kind in KINDS:
        model = built(kind, 1)
        safetensors.save(Path(folder, f"{kind}.safetensors"), model)
        whole[kind] = full_state_dict(model)
    return whole


def load(file, kind):
    """Load into models of other weights, one of them in bfloat16."""
    initialize_model_parallel(dist.get_world_size())
    loaded, half, expected = built(kind, 2), built(kind, 2).to(torch.bfloat16), built(kind, 1)
    safetensors.load(file, loaded)
    safetensors.load(file, half, cast=True)
    for name, value in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        found = half.state_dict()[name]
        assert torch.equal(found, value.to(found.dtype)), name
    assert torch.equal(loss_of(loaded), loss_of(expected))


@on_ranks(4)
def test_a_rank_reads_its_part_only(tmp_path):
    """Memory that comes while a rank takes its rows of a large table of 78 MiB."""
    initialize_model_parallel(4)
    if dist.get_rank() == 0:
        whole = torch.arange(40_000.0)[:, None].expand(-1, 512).contiguous()
        save_file({"big.weight": whole}, tmp_path / "big.safetensors")
        del whole
    dist.barrier()
    table = torch.nn.Module()
    table.big = VocabParallelEmbedding(40_000, 512, init_method=torch.nn.init.zeros_)
    before = _resident()
    safetensors.load(tmp_path / "big.safetensors", table)
    assert table.big.weight[:, 0].tolist() == list(table.big.split.ids_of(table.big.world.rank))
    assert _resident() - before < 40_000 * 512 * 4 / 2


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def full_on_all(model, where):
    given = [full_state_dict(model, state=where)]
    dist.broadcast_object_list(given)
    return given[0]


@on_ranks(2)
def test_wrong_calls_are_refused_on_all_ranks_alike(tmp_path):
    """After which all ranks still work."""
    state = initialize_model_parallel(2)
    rank, file = dist.get_rank(), tmp_path / "odd.safetensors"
    odd, llama, wide = built("odd", 1), built("llama", 1), built("odd", 1).to(torch.float64)
    safetensors.save(file, odd)
    full = safetensors.read(file)
    before = deepcopy(odd.state_dict())
    stages = create_parallel_state(plan_groups(world_size=2, pipeline=2))
    dtype = "'table.weight': expected torch.float64, got torch.float32; pass cast=True"
    long, more = full | {"plain.bias": torch.zeros(5)}, full | {"other": torch.zeros(5)} if rank else full
    names = "on rank 1: expected the tensors of the model by name: missing are nothing, not in the"
    absent, nowhere = tmp_path / "absent.safetensors", tmp_path / "no folder" / "x"
    for kind, text, call, *args in (
        ("FileExistsError", "there is something already", safetensors.save, file, odd),
        ("ValueError", "missing are ['embedding.weight'", safetensors.load, file, llama),
        ("ValueError", dtype, safetensors.load, file, wide),
        ("ValueError", "'plain.bias': expected (4,), got (5,)", load_full_state_dict, odd, long),
        ("ValueError", names, load_full_state_dict, odd, more),
        ("FileNotFoundError", "there is no file", safetensors.load, absent, odd),
        ("RuntimeError", "on rank 0: SafetensorError", safetensors.write, nowhere, full),
    ):
        refused_alike(kind, text, call, *args)
    for model in (torch.nn.Linear(2, 2), odd):
        refused_alike("ValueError", "one of 2 pipeline stages", full_state_dict, model, state=stages)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for where in (state, mesh, mesh["tp"], state.process_group("tp")):
        load_full_state_dict(odd, full_on_all(odd, where), state=where)
        assert all(torch.equal(odd.state_dict()[name], value) for name, value in before.items())


@pytest.fixture(scope="module")
def saved_by_4(ranks4, tmp_path_factory):
    """A file of each kind, saved by two tensor-parallel groups, and what each rank was given."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, ranks4.run(save_all, str(folder), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_file_is_the_unsharded_model(kind, saved_by_4):
    folder, given = saved_by_4
    with posing(0, 1):
        expected = built(kind, 1)
    found = load_file(folder / f"{kind}.safetensors")
    names = {name for name, _ in expected.named_parameters()}
    assert found.keys() == names | ({"steps"} if kind == "odd" else set())
    for name, value in found.items():
        alone = expected.state_dict()[name]
        if name == "table.weight":  # padded on one rank too
            alone = alone[:7]
        assert torch.equal(value, alone), name
        assert torch.equal(value, given[0][kind][name])
    assert all(other[kind] == {} for other in given[1:])
    with safe_open(folder / f"{kind}.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_load_the_file(ranks, kind, saved_by_4, request):
    request.getfixturevalue(f"ranks{ranks}").run(load, str(saved_by_4[0] / f"{kind}.safetensors"), kind)


@on_ranks(2)
def test_model_built_on_the_meta_device_loads(tmp_path):
    state, file = initialize_model_parallel(2), tmp_path / "llama.safetensors"
    safetensors.save(file, expected := built("llama", 1))
    model = GPT(CONFIGS["llama"], device="meta", state=state).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    safetensors.load(file, model, state=state)
    assert torch.equal(loss_of(model), loss_of(expected))


def test_folder_with_an_index_is_read_as_one(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = safetensors.read(tmp_path)
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1, 1], "b": [0, 0, 0]}
    with pytest.raises(FileNotFoundError, match="absent"):
        safetensors.read(tmp_path / "absent")


def folder_with(tmp_path, weight_map):
    """A folder whose index names these files, one of which is there."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "other.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "other.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../other.safetensors"}, "expected files in its own folder, got '../other.safetensors'"),
        ({"a": "x/../../other.safetensors"}, "expected files in its own folder, got 'x/../../other"),
        ({"a": "/etc/passwd"}, "expected files in its own folder, got '/etc/passwd'"),
        ({"a": "link.safetensors"}, "expected files in its own folder, got 'link.safetensors', which is"),
        ({"a": "model-2.safetensors"}, "there is no file .*model-2.safetensors"),
        ({"b": "model-1.safetensors"}, r"the index names, \['b'\] are missing"),
        ({"a": 7}, "expected JSON with a weight_map"),
        (["model-1.safetensors"], "expected JSON with a weight_map"),
        ("{}", "expected JSON with a weight_map"),
        ("[" * 100_000, "nested too deeply"),
        ('{"weight_map"', "expected JSON with a weight_map"),
    ],
)
def test_index_that_leads_elsewhere_or_nowhere_is_refused_by_name(weight_map, message, tmp_path):
    folder = folder_with(tmp_path, weight_map)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        safetensors.read(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = folder_with(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, folder / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"\['a'\] are in another, too"):
        safetensors.read(folder)


def test_links_of_hugging_face_caches_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "abc")
    (blobs / "index").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    assert safetensors.read(snapshot)["a"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_fifos_are_refused_at_once(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises((ValueError, FileNotFoundError), match=f"{name}: expected|there is no file .*{name}"):
        safetensors.read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"\xff", struct.pack("<Q", 1 << 60) + b"{}"], ids=["no header", "cut off"]
)
def test_damaged_headers_are_refused_with_the_file(content, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged, or no safetensors file"):
        safetensors.read(tmp_path / "x.safetensors")


@on_ranks(2)
def test_a_link_for_an_unfinished_file_is_not_followed(tmp_path):
    initialize_model_parallel(2)
    if dist.get_rank() == 0:
        (tmp_path / "theirs").write_text("kept")
        (tmp_path / ".model.safetensors.unfinished").symlink_to("theirs")
    dist.barrier()
    with pytest.raises(FileExistsError, match="expected no symbolic link at"):
        safetensors.write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert (tmp_path / "theirs").read_text() == "kept"


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="safetensors is not installed; pip install safetensors"):
        safetensors.read(__file__)
