"""Checkpoints come back to the bit at another number of ranks, and an unfinished one is never taken."""

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as storage
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoints.test_reshard import over
from tests.checks import error_of
from tests.interop.models import built
from tests.interop.refused import refused_alike
from tests.interop.test_plans import unusual
from tests.on_ranks import on_ranks
from tests.ranks import leave_world
from tpkernels import (
    VocabParallelEmbedding,
    create_parallel_state,
    get_rng_tracker,
    initialize_model_parallel,
    manual_seed,
    parallelize,
    plan_groups,
)
from tpkernels.interop import dcp, safetensors

KINDS = ("llama", "gpt2", "odd")


def adamw(model, lr=0.1):
    """With two groups."""
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": ours[:3], "lr": 2 * lr}, {"params": ours[3:]}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.5)


def trained(kind, seed, lr=0.1):
    return stepped(built(kind, seed), lr)


def stepped(model, lr=0.1):
    """Two steps that treat each element by itself: the same numbers for every number of ranks."""
    optimizer = adamw(model, lr)
    for _ in range(2):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() * 3 + 0.5 * parameter.detach().square()
        optimizer.step()
    return model, optimizer


def assert_resumes_at_other_sizes(make, folder):
    """make: returns the same unsharded model each time"""
    for saved, loaded in ((2, 1), (1, 2)):
        path = folder / f"saved-by-{saved}"
        dcp.save(path, *stepped(parallelize(make(), over(saved), verify=False)))
        expected = everything(*stepped(parallelize(make(), over(loaded), verify=False)))
        model = parallelize(make(), over(loaded), verify=False)
        optimizer = adamw(model, lr=0.3)
        dcp.load(path, model, optimizer)
        assert_equal(everything(model, optimizer), expected)


def everything(model, optimizer):
    """All that a checkpoint should bring back, on this rank, padding included."""
    found = dict(model.state_dict())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        found |= {f"{names[parameter]} {key}": value for key, value in kept.items()}
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}"] = [group["lr"], *group["betas"], *(names[p] for p in group["params"])]
    return found


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value, expected[name]), name
        else:
            assert value == expected[name], name


def save_all(folder, tensor, kinds=KINDS):
    """Save each kind; returns what came with it: a number of each random stream, drawn after saving."""
    initialize_model_parallel(tensor)
    manual_seed(1)
    for kind in kinds:
        dcp.save(Path(folder, kind), *trained(kind, 1), extra={"step": 2, "kind": kind})
    return draws()


def draws():
    found = {}
    for stream in get_rng_tracker().get_states():
        with get_rng_tracker().fork(stream):
            found[stream] = torch.rand(()).item()
    return found


def load_all(folder, tensor, kinds=KINDS):
    """Compare with models that were trained here; returns draws, and warnings."""
    initialize_model_parallel(tensor)
    manual_seed(9)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for kind in kinds:
            expected = everything(*trained(kind, 1))
            model, optimizer = trained(kind, 2, lr=0.3)
            if hasattr(model, "table"):
                with torch.no_grad():
                    model.table.weight[len(model.table.split.ids_of(model.table.world.rank)) :] = 8  # garbage
            assert dcp.load(Path(folder, kind), model, optimizer) == {"step": 2, "kind": kind}
            assert_equal(everything(model, optimizer), expected)
            fresh = built(kind, 2)
            unstepped = adamw(fresh)
            dcp.load(Path(folder, kind), fresh, unstepped)
            assert_equal(everything(fresh, unstepped), expected)
            dcp.load(Path(folder, kind), fresh)  # the optimizer is not asked for
        manual_seed(9)
        dcp.load(Path(folder, kinds[0]), built(kinds[0], 2))
    return draws(), [str(warning.message) for warning in warned if "dcp.load" in str(warning.message)]


@on_ranks(2)
def test_unfinished_checkpoint_is_never_taken(tmp_path):
    """A good checkpoint, one that a rank cannot write, and the same again when it can."""
    initialize_model_parallel(2)
    model, after = built("odd", 1), tmp_path / "next"
    dcp.save(tmp_path / "good", model)
    no_space = patch.object(storage.FileSystemWriter, "write_data", _no_space)
    with no_space if dist.get_rank() == 1 else nullcontext():
        assert error_of(dcp.save, after, model)[0] == "RuntimeError"
    with patch.object(Path, "rename", _rename_of_files):  # the last step before `latest`
        assert error_of(dcp.save, after, model)[1].endswith("on rank 0: OSError: no space left")
    assert (dcp.latest(tmp_path), after.exists()) == (tmp_path / "good", False)
    dist.barrier()
    dcp.save(after, model)
    assert dcp.latest(tmp_path) == after
    assert error_of(dcp.save, after, model)[0] == "FileExistsError"


def _rename_of_files(path, target, rename=Path.rename):
    if path.is_dir():
        _no_space()
    return rename(path, target)


def _no_space(*_):
    raise OSError("no space left")


@on_ranks(2)
def test_stacked_experts_resume_at_another_size(tmp_path):
    assert_resumes_at_other_sizes(unusual, tmp_path)


@on_ranks(2)
def test_a_rank_that_stays_away_is_no_hang(tmp_path):
    """Rank 0 saves, which the other does not know of: it leaves."""
    initialize_model_parallel(2)
    model, store = built("odd", 1), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["saving"])
        leave_world()
        return
    store.set("saving", "now")
    with pytest.raises(RuntimeError, match="a rank died, came too late, or left the common order of calls"):
        dcp.save(tmp_path / "alone", model)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_wrong_calls_are_refused_on_all_ranks_alike(tmp_path):
    """Calls that are wrong on some rank, after which all ranks still work."""
    initialize_model_parallel(2)
    rank, odd = dist.get_rank(), built("odd", 1)
    saved, new = tmp_path / "odd", tmp_path / "new"
    dcp.save(saved, odd)
    before = {name: value.clone() for name, value in odd.state_dict().items()}
    stages = create_parallel_state(plan_groups(world_size=2, pipeline=2))
    adam = torch.optim.AdamW(odd.parameters())
    strange = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    meta = VocabParallelEmbedding(7, 4, device="meta")
    factored = torch.optim.SGD(odd.parameters(), momentum=0.5)
    factored.state[odd.fused.weight]["row"] = torch.zeros(8)
    half, llama = built("odd", 1).to(torch.bfloat16), built("llama", 1)
    other = "the checkpoint is of another model: missing are ['embedding.weight'"
    absent = "parameter group 0 has a tensor (2,) that is not a parameter of the model"
    row = "expected 'row' of 'fused.weight' to be a number or of the parameter's shape (12, 4)"
    one_piece = "expected a model in one piece, got one of 2 pipeline stages"
    file = tmp_path / "absent.safetensors"
    refused_alike("FileNotFoundError", "there is no checkpoint", dcp.load, tmp_path / "absent", odd)
    refused_alike("FileNotFoundError", file.name, safetensors.load, file, odd)
    for text, call, *args in (
        (other, dcp.load, saved, llama),
        ("it holds no optimizer", dcp.load, saved, odd, adam),
        ("expected torch.bfloat16, got torch.float32", dcp.load, saved, half),
        (absent, dcp.save, new, odd, strange),
        (row, dcp.save, new, odd, factored),
        ("ranks disagree: rank 0 has dcp.save", dcp.save, Path(f"{new}{rank}"), odd),
        ("on rank 1: 'weight' is on the meta", dcp.save, new, meta if rank else odd),
    ):
        refused_alike("ValueError", text, call, *args)
    refused_alike("ValueError", one_piece, dcp.save, new, odd, state=stages)
    assert all(torch.equal(odd.state_dict()[name], value) for name, value in before.items())
    dcp.save(new, odd)


@pytest.fixture(scope="module")
def saved_by_4(ranks4, tmp_path_factory):
    """A checkpoint of each kind, saved at tensor size 4, and what each rank drew afterwards."""
    folder = tmp_path_factory.mktemp("saved-by-4")
    return folder, ranks4.run(save_all, str(folder), 4)


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.sweep), (4, 2)])
def test_ranks_load_what_four_saved(ranks, tensor, saved_by_4, request):
    found = request.getfixturevalue(f"ranks{ranks}").run(load_all, str(saved_by_4[0]), tensor)
    for kind in KINDS:  # by one rank of the machine
        said = [[text for text in warned if f"{kind}): saved by" in text] for _, warned in found]
        assert sum(map(bool, said)) == 1, said
        assert all("random streams stay as they are" in text for texts in said for text in texts)


def test_the_same_ranks_draw_on_where_they_were(saved_by_4, ranks4):
    folder, drawn = saved_by_4
    # the first kind was saved before the others were built, which draw from the default stream
    results = ranks4.run(load_all, str(folder), 4, KINDS[:1])
    for (draws, warned), expected in zip(results, drawn, strict=True):
        assert warned == []
        assert draws.keys() == expected.keys() != set()
        assert {stream for stream in draws if draws[stream] != expected[stream]} <= {"default"}
    assert len({draws["model-parallel-rng"] for draws, _ in results}) == 4


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_four_load_what_fewer_saved(ranks, request, ranks4, tmp_path):
    kinds = ("gpt2", "odd")  # vocabularies that are padded, tied and not, and features that are not
    request.getfixturevalue(f"ranks{ranks}").run(save_all, str(tmp_path), ranks, kinds)
    ranks4.run(load_all, str(tmp_path), 4, kinds)


def test_checkpoint_holds_whole_tensors_without_padding(saved_by_4, tmp_path):
    folder, _ = saved_by_4
    entries = FileSystemReader(folder / "odd").read_metadata().state_dict_metadata
    sizes = {name: tuple(entry.size) for name, entry in entries.items() if name.startswith("model.")}
    of_layers = {"table.weight": (7, 4), "fused.weight": (24, 4), "fused.bias": (24,), "back.weight": (4, 24)}
    of_layers |= {"back.bias": (4,), "plain.weight": (4, 4), "plain.bias": (4,), "steps": ()}
    assert sizes == {f"model.{name}": size for name, size in of_layers.items()}
    assert tuple(entries["optimizer.state.table.weight.exp_avg"].size) == (7, 4)
    assert not [name for name in entries if "optimizer.state.back.bias" in name]  # frozen
    dcp_to_torch_save(folder / "odd", tmp_path / "odd.pt")  # readable by torch's tools
    whole = torch.load(tmp_path / "odd.pt", weights_only=False)
    assert whole["extra"] == {"step": 2, "kind": "odd"}
    assert whole["model.fused.weight"].shape == (24, 4)


def test_a_folder_without_a_readable_latest(tmp_path):
    assert dcp.latest(tmp_path) is None
    assert dcp.latest(tmp_path / "absent") is None
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(FileNotFoundError, match="names '\ufffd', which is not there"):
        dcp.latest(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(ValueError, match="expected a regular file"):
        dcp.latest(tmp_path)


@pytest.mark.parametrize("name", ["gone\n", "", "..", "../elsewhere", "/tmp", "step-1/", "."])
def test_latest_names_nothing_outside_its_folder(name, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "saved" / "step-1").mkdir(parents=True)
    (tmp_path / "saved" / "latest").write_text(name)
    with pytest.raises(FileNotFoundError, match="which is not there"):
        dcp.latest(tmp_path / "saved")


@on_ranks(2)
def test_an_optimizer_that_had_not_stepped_has_no_state_afterwards(tmp_path):
    initialize_model_parallel(2)
    fresh, (model, optimizer) = built("llama", 1), trained("llama", 2)
    dcp.save(tmp_path / "checkpoint", fresh, adamw(fresh))
    dcp.load(tmp_path / "checkpoint", model, optimizer)
    assert not optimizer.state
