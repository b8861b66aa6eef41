"""What ranks run to write and read one file of the full model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.checks import error_of
from tests.interop.models import built, loss_of
from tests.models.small import CONFIGS
from tpkernels import (
    GPT,
    VocabParallelEmbedding,
    create_parallel_state,
    initialize_model_parallel,
    plan_groups,
)
from tpkernels.interop import full_state_dict as former
from tpkernels.interop import safetensors
from tpkernels.interop.full_state_dict import full_state_dict, load_full_state_dict

KINDS = ("llama", "gpt2", "odd")


def save_all(folder: str, tensor: int) -> dict[str, dict[str, torch.Tensor]]:
    """Save each kind; the whole tensors, of rank 0 only."""
    initialize_model_parallel(tensor)
    whole = {}
    for kind in KINDS:
        model = built(kind, 1)
        safetensors.save(Path(folder, f"{kind}.safetensors"), model)
        whole[kind] = full_state_dict(model)
    return whole


def load_all(folder: str, tensor: int) -> list[str]:
    """What differs from the model that was saved."""
    initialize_model_parallel(tensor)
    wrong = []
    for kind in KINDS:
        loaded, expected = built(kind, 2), built(kind, 1)
        file = Path(folder, f"{kind}.safetensors")
        safetensors.load(file, loaded)
        wrong += [n for n, v in expected.state_dict().items() if not torch.equal(loaded.state_dict()[n], v)]
        if not torch.equal(loss_of(loaded), loss_of(expected)):
            wrong.append(f"loss of {kind}")
        half = built(kind, 2).to(torch.bfloat16)
        safetensors.load(file, half, cast=True)
        for name, value in half.state_dict().items():
            if not torch.equal(value, expected.state_dict()[name].to(value.dtype)):
                wrong.append(f"{name} cast")
    return wrong


def load_into_a_model_from_meta(file: str) -> bool:
    state = initialize_model_parallel(dist.get_world_size())
    model = GPT(CONFIGS["llama"], device="meta", state=state).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    safetensors.load(file, model, state=state)
    return bool(torch.equal(loss_of(model), loss_of(built("llama", 1))))


def by_former_names() -> list[str]:
    """What they warn of; they do what the functions of today do."""
    state = initialize_model_parallel(dist.get_world_size())
    saved, loaded = built("odd", 1), built("odd", 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        full = former.whole_state_dict(saved)
        former.load_whole(loaded, whole=full, cast=True, state=state)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in saved.state_dict().items())
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def growth_while_loading(file: str) -> float:
    """MiB of memory that come while a rank takes its rows of a large table."""
    initialize_model_parallel(dist.get_world_size())
    table = torch.nn.Module()
    table.big = VocabParallelEmbedding(40_000, 512, init_method=torch.nn.init.zeros_)
    before = _resident()
    safetensors.load(file, table)
    assert table.big.weight[:, 0].tolist() == list(table.big.split.ids_of(table.big.world.rank))
    return (_resident() - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def full_on_all(model: torch.nn.Module, where: Any) -> dict[str, torch.Tensor]:
    given = [full_state_dict(model, state=where)]
    dist.broadcast_object_list(given)
    return given[0]


def refuse(folder: str) -> list[Any]:
    """Wrong calls: the errors, after which all ranks still work."""
    state = initialize_model_parallel(2)
    rank = dist.get_rank()
    odd, llama = built("odd", 1), built("llama", 1)
    file = Path(folder, "odd.safetensors")
    safetensors.save(file, odd)
    whole = safetensors.read(file)
    before = {name: value.clone() for name, value in odd.state_dict().items()}
    errors = [
        error_of(safetensors.save, file, odd),
        error_of(safetensors.load, file, llama),
        error_of(safetensors.load, file, built("odd", 1).to(torch.float64)),
        error_of(load_full_state_dict, odd, whole | {"plain.bias": torch.zeros(5)}),
        error_of(load_full_state_dict, odd, whole | {"other": torch.zeros(5)} if rank else whole),
        error_of(safetensors.load, Path(folder, "absent.safetensors"), odd),
        error_of(safetensors.write, Path(folder, "no folder", "x"), whole),
    ]
    pipeline = create_parallel_state(plan_groups(world_size=2, pipeline=2))
    errors.append(error_of(full_state_dict, torch.nn.Linear(2, 2), state=pipeline))
    errors.append(error_of(full_state_dict, odd, state=pipeline))
    assert all(torch.equal(odd.state_dict()[name], value) for name, value in before.items())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for where in (state, mesh, mesh["tp"], state.process_group("tp")):
        load_full_state_dict(odd, full_on_all(odd, where), state=where)
    assert all(torch.equal(odd.state_dict()[name], value) for name, value in before.items())
    return errors
