"""What ranks run to save and load checkpoints."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as storage

from tests.checks import error_of
from tests.interop.models import built
from tpkernels import (
    VocabParallelEmbedding,
    create_parallel_state,
    get_rng_tracker,
    initialize_model_parallel,
    manual_seed,
    plan_groups,
)
from tpkernels.interop import dcp, safetensors

KINDS = ("llama", "gpt2", "odd")


def trained(kind: str, seed: int, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two steps that treat each element by itself: the same numbers for every number of ranks."""
    model = built(kind, seed)
    ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": ours[:3], "lr": 2 * lr}, {"params": ours[3:]}], lr=lr, weight_decay=0.5
    )
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in ours:
            parameter.grad = parameter.detach() * 3 + 0.5 * parameter.detach().square()
        optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a checkpoint should bring back, on this rank, padding included."""
    found: dict[str, Any] = dict(model.state_dict())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        found |= {f"{names[parameter]} {key}": value for key, value in kept.items()}
    for number, group in enumerate(optimizer.param_groups):
        found[f"group {number}"] = [group["lr"], *group["betas"], *(names[p] for p in group["params"])]
    return found


def unequal(ours: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()

    def alike(a: Any, b: Any) -> bool:
        return a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return [name for name in ours if not alike(ours[name], expected[name])]


def save_all(folder: str, tensor: int) -> dict[str, Any]:
    """Save each kind; returns what came with it: a number of each random stream, drawn after saving."""
    initialize_model_parallel(tensor)
    manual_seed(1)
    for kind in KINDS:
        dcp.save(Path(folder, kind), *trained(kind, 1), extra={"step": 2, "kind": kind})
    return draws()


def draws() -> dict[str, float]:
    found = {}
    for stream in get_rng_tracker().get_states():
        with get_rng_tracker().fork(stream):
            found[stream] = torch.rand(()).item()
    return found


def load_all(folder: str, tensor: int) -> tuple[list[Any], dict[str, float], list[str]]:
    """What differs from models that were trained here; draws; warnings."""
    initialize_model_parallel(tensor)
    manual_seed(9)
    wrong: list[Any] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for kind in KINDS:
            model, optimizer = trained(kind, 2, lr=0.3)
            if hasattr(model, "table"):
                with torch.no_grad():
                    model.table.weight[len(model.table.split.ids_of(model.table.world.rank)) :] = 8  # garbage
            extra = dcp.load(Path(folder, kind), model, optimizer)
            wrong += unequal(everything(model, optimizer), everything(*trained(kind, 1)))
            if extra != {"step": 2, "kind": kind}:
                wrong.append(extra)
            fresh = built(kind, 2)  # an optimizer that has not stepped, and one that is not asked for
            unstepped = torch.optim.AdamW(fresh.parameters())
            if kind != "odd":
                unstepped = torch.optim.AdamW(
                    [{"params": list(fresh.parameters())[:3]}, {"params": list(fresh.parameters())[3:]}]
                )
                dcp.load(Path(folder, kind), fresh, unstepped)
                wrong += unequal(everything(fresh, unstepped), everything(*trained(kind, 1)))
            dcp.load(Path(folder, kind), fresh)
        manual_seed(9)
        dcp.load(Path(folder, KINDS[0]), built(KINDS[0], 2))
    return wrong, draws(), [str(warning.message) for warning in warned if "dcp.load" in str(warning.message)]


def save_vocabulary(path: str) -> None:
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    dcp.save(path, VocabParallelEmbedding(50257, 2))


def load_vocabulary(path: str) -> bool:
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    expected = VocabParallelEmbedding(50257, 2).weight.clone()
    loaded = VocabParallelEmbedding(50257, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(path, loaded)
    return torch.equal(loaded.weight, expected) and not torch.equal(torch.rand(2), torch.zeros(2))


def fail_while_writing(folder: str) -> tuple[Any, ...]:
    """A good checkpoint, one that a rank cannot write, and the same again when it can."""
    initialize_model_parallel(2)
    rank = dist.get_rank()
    model = built("odd", 1)
    dcp.save(Path(folder, "good"), model)
    broken = patch.object(storage.FileSystemWriter, "write_data", _no_space) if rank == 1 else nullcontext()
    with broken:
        failed = error_of(dcp.save, Path(folder, "next"), model)[0]
    with patch.object(Path, "rename", _rename_of_files):  # the last step before `latest`
        failed += error_of(dcp.save, Path(folder, "next"), model)[1]
    after = dcp.latest(folder), Path(folder, "next").exists()
    dist.barrier()
    dcp.save(Path(folder, "next"), model)
    return failed, after, dcp.latest(folder), error_of(dcp.save, Path(folder, "next"), model)


_rename = Path.rename


def _rename_of_files(path: Path, target: Path) -> Path:
    if path.is_dir():
        raise OSError("no space left")
    return _rename(path, target)


def _no_space(*_: Any) -> None:
    raise OSError("no space left")


def save_alone(folder: str) -> list[tuple[str, str]]:
    """Rank 0 saves, which the other does not know of."""
    initialize_model_parallel(2)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    model = built("odd", 1)
    if dist.get_rank() == 0:
        return [error_of(dcp.save, Path(folder, "alone"), model)]
    return []  # and leaves


def refuse(folder: str) -> list[tuple[str, str]]:
    """Calls that are wrong on some rank: the errors, after which all ranks still work."""
    initialize_model_parallel(2)
    rank = dist.get_rank()
    odd, llama = built("odd", 1), built("llama", 1)
    dcp.save(Path(folder, "odd"), odd)
    before = {name: value.clone() for name, value in odd.state_dict().items()}
    stages = plan_groups(world_size=2, pipeline=2)
    adam = torch.optim.AdamW(odd.parameters())
    strange = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    meta = VocabParallelEmbedding(7, 4, device="meta")
    factored = torch.optim.SGD(odd.parameters(), momentum=0.5)
    factored.state[odd.fused.weight]["row"] = torch.zeros(8)
    errors = [
        error_of(dcp.load, Path(folder, "absent"), odd),
        error_of(dcp.load, Path(folder, "odd"), llama),
        error_of(dcp.load, Path(folder, "odd"), odd, adam),
        error_of(dcp.load, Path(folder, "odd"), built("odd", 1).to(torch.bfloat16)),
        error_of(dcp.save, Path(folder, "new"), odd, strange),
        error_of(dcp.save, Path(folder, "new"), odd, factored),
        error_of(dcp.save, Path(folder, f"new{rank}"), odd),
        error_of(dcp.save, Path(folder, "new"), meta if rank else odd),
        error_of(safetensors.load, Path(folder, "absent.safetensors"), odd),
        error_of(dcp.save, Path(folder, "new"), odd, state=create_parallel_state(stages)),
    ]
    assert all(torch.equal(odd.state_dict()[name], value) for name, value in before.items())
    dcp.save(Path(folder, "new"), odd)
    return errors
