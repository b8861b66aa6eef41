"""One file of whole tensors: readable by others, and loaded by any number of ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.interop.models import built
from tests.interop.whole_cases import (
    growth_while_loading,
    load_all,
    load_into_a_model_from_meta,
    refuse,
    save_all,
)
from tests.layers.worlds import posing
from tpkernels.interop import safetensors as ours

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def saved_by_4(ranks4, tmp_path_factory):
    """A file of each kind, saved at tensor size 4, and what each rank was given."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, ranks4.run(save_all, str(folder), 4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "odd"])
def test_file_is_the_unsharded_model(kind, saved_by_4):
    folder, given = saved_by_4
    with posing(0, 1):
        expected = built(kind, 1)
    found = load_file(folder / f"{kind}.safetensors")
    assert found.keys() == {name for name, _ in expected.named_parameters()} | (
        {"steps"} if kind == "odd" else set()
    )
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


@pytest.mark.parametrize(("pool", "tensor"), [("ranks1", 1), ("ranks2", 2), ("ranks4", 2)])
def test_ranks_load_the_file(pool, tensor, saved_by_4, request):
    for wrong in request.getfixturevalue(pool).run(load_all, str(saved_by_4[0]), tensor):
        assert wrong == []


def test_copies_of_a_model_are_saved_once(ranks4, saved_by_4, tmp_path):
    assert [sorted(given) for given in ranks4.run(save_all, str(tmp_path), 2)] == [
        ["gpt2", "llama", "odd"]
    ] * 4
    for kind in ("llama", "odd"):
        twice, once = ours.read(tmp_path / f"{kind}.safetensors"), saved_by_4[0] / f"{kind}.safetensors"
        assert all(torch.equal(value, twice[name]) for name, value in ours.read(once).items())


def test_model_built_on_the_meta_device_loads(ranks2, saved_by_4):
    file = str(saved_by_4[0] / "llama.safetensors")
    assert ranks2.run(load_into_a_model_from_meta, file) == [True] * 2


def test_a_rank_reads_its_part_only(ranks4, tmp_path):
    table = torch.arange(40_000.0)[:, None].expand(-1, 512).contiguous()
    save_file({"big.weight": table}, tmp_path / "big.safetensors")
    whole = table.nbytes / 2**20  # about 78 MiB
    for growth in ranks4.run(growth_while_loading, str(tmp_path / "big.safetensors")):
        assert growth < whole / 2


def test_folder_with_an_index_is_read_as_one(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {name: tuple(value.shape) for name, value in ours.read(tmp_path).items()} == {"a": (2,), "b": (3,)}
    with pytest.raises(FileNotFoundError, match="absent"):
        ours.read(tmp_path / "absent")


def test_wrong_calls_are_refused_on_all_ranks_alike(ranks2, tmp_path):
    first, second = ranks2.run(refuse, str(tmp_path))
    assert first == second
    expected = [
        ("FileExistsError", "there is something already"),
        ("ValueError", "missing are ['embedding.weight'"),
        ("ValueError", "'table.weight': expected torch.float64, got torch.float32; pass cast=True"),
        ("ValueError", "'plain.bias': expected (4,), got (5,)"),
        ("ValueError", "on rank 1: expected the tensors of the model by name: missing are none, not in the"),
        ("FileNotFoundError", "there is no file"),
        ("RuntimeError", "on rank 0: SafetensorError"),
        ("ValueError", "got one of 2 pipeline stages"),
        ("ValueError", "got one of 2 pipeline stages"),
    ]
    for (kind, text), (expected_kind, part) in zip(first, expected, strict=True):
        assert kind == expected_kind, text
        assert part in text


def test_missing_package_is_named():
    program = (
        "import sys; sys.modules['safetensors'] = None\n"
        "from tpkernels.interop import safetensors\n"
        "safetensors.read(__file__)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program.replace("__file__", repr(__file__))], capture_output=True, text=True
    )
    assert "the package safetensors is not installed; pip install safetensors" in ran.stderr
