"""Muon on shards beside torch's on full matrices, with the same gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tpkernels
from tests.checks import error_of
from tpkernels import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tpkernels.interop import dcp
from tpkernels.interop.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.interop.shards import TensorShard, shards_of
from tpkernels.optim import Muon, hidden_matrices

STEPS = 3
LR = 0.02


class Matrices(nn.Module):
    """Every way in which a matrix is sharded, in shapes that are wide, tall and square."""

    def __init__(self, tensor: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        state = tpkernels.create_parallel_state(
            tpkernels.plan_groups(world_size=dist.get_world_size(), tensor=tensor)
        )
        self.state = state
        where: dict[str, Any] = {"bias": False, "state": state, "dtype": dtype}
        self.wide = ColumnParallelLinear(40, 16, **where)
        self.tall = ColumnParallelLinear(8, 48, **where)
        self.stacked = ColumnParallelLinear(16, 48, stride=2, **where)
        self.row = RowParallelLinear(32, 16, **where)
        self.table = VocabParallelEmbedding(13, 8, state=state, dtype=dtype)  # padded
        self.replicated = nn.Linear(12, 20, bias=False, dtype=dtype)
        self.unused = RowParallelLinear(16, 8, **where)
        load_full_state_dict(self, values_for(self, "weights", 0, dtype), state=state)


def values_for(model: nn.Module, kind: str, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A full tensor for each parameter, the same on all ranks and at all sizes."""
    made = {}
    for name, shard in shards_of(model).items():
        generator = torch.Generator().manual_seed(hash_of(f"{kind} {step} {name}"))
        made[name] = torch.randn(shard.shape, generator=generator).to(dtype)
    return made


def hash_of(text: str) -> int:
    return sum(position * ord(letter) for position, letter in enumerate(text, 1))


def cut(shard: TensorShard, full: Tensor) -> Tensor:
    own = torch.zeros_like(shard.tensor)
    for chunk in shard.chunks(own):
        chunk.view.copy_(full[chunk.where])
    return own


def set_gradients(model: nn.Module, full: dict[str, Tensor]) -> None:
    for name, shard in shards_of(model).items():
        if not name.startswith("unused"):
            shard.tensor.grad = cut(shard, full[name])


def reference(
    start: dict[str, Tensor], steps: int, options: dict[str, Any], gradients: Any
) -> dict[str, Tensor]:
    """What torch's Muon makes of the full matrices."""
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = torch.optim.Muon(list(parameters.values()), **options)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            if not name.startswith("unused"):
                parameters[name].grad = gradient.clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def differences(
    tensor: int, options: dict[str, Any], own: dict[str, Any], dtype: torch.dtype
) -> dict[str, tuple[int, float]]:
    """In how many elements matrices differ from torch's after three steps, and by how many roundings.

    own: options of our Muon only; "shared": with the data-parallel group
    """
    model = Matrices(tensor, dtype)
    if own.pop("shared", False):
        own["data_parallel_group"] = model.state.process_group("dp")
    start = values_for(model, "weights", 0, dtype)
    optimizer = Muon(model.parameters(), model=model, **options, **own)
    for step in range(STEPS):
        set_gradients(model, values_for(model, "gradients", step, dtype))
        optimizer.step()
    expected = reference(start, STEPS, options, lambda step: values_for(model, "gradients", step, dtype))
    found = {}
    for name, shard in shards_of(model).items():
        assert torch.equal(expected[name], start[name]) == name.startswith("unused")
        theirs = cut(shard, expected[name])
        unequal = shard.tensor != theirs
        if unequal.any():
            apart = ((shard.tensor - theirs) / theirs).abs()[unequal]
            found[name] = int(unequal.sum()), float(apart.max()) / torch.finfo(dtype).eps
    return found


def stacked_difference(tensor: int) -> bool:
    """Whether `split_stacked` treats gate and up as torch does two parameters."""
    model = Matrices(tensor)
    weight = shards_of(model)["stacked.weight"]
    start = values_for(model, "weights", 0, torch.float32)["stacked.weight"]
    gradient = values_for(model, "gradients", 0, torch.float32)["stacked.weight"]
    halves = [nn.Parameter(half.clone()) for half in start.chunk(2)]
    for half, own in zip(halves, gradient.chunk(2), strict=True):
        half.grad = own.clone()
    torch.optim.Muon(halves, lr=LR).step()
    weight.tensor.grad = cut(weight, gradient)
    Muon([weight.tensor], lr=LR, model=model, split_stacked=True).step()
    return not torch.equal(weight.tensor, cut(weight, torch.cat([half.detach() for half in halves])))


def uneven_difference() -> bool:
    """Whether stacked weights of 16 and 8 rows on two ranks are treated as torch does two parameters."""
    state = tpkernels.create_parallel_state(tpkernels.plan_groups(world_size=2, tensor=2))
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(12, 12))
    ranges = tuple((range(8 * r, 8 * r + 8), range(16 + 4 * r, 20 + 4 * r)) for r in range(2))
    shard = TensorShard(model.weight, (24, 12), 0, ranges, dist.get_rank(), (0, 0))
    gradient = torch.randn(24, 12, generator=torch.Generator().manual_seed(4))
    parts = [nn.Parameter(torch.zeros(16, 12)), nn.Parameter(torch.zeros(8, 12))]
    for part, own in zip(parts, gradient.split([16, 8]), strict=True):
        part.grad = own.clone()
    torch.optim.Muon(parts).step()
    with patch("tpkernels.optim.muon.shards_of", lambda *_: {"weight": shard}):
        optimizer = Muon([model.weight], model=model, split_stacked=True, state=state)
    model.weight.grad = cut(shard, gradient)
    optimizer.step()
    return not torch.equal(model.weight, cut(shard, torch.cat([part.detach() for part in parts])))


def collectives(layers: int, round_bytes: int, tensor: int) -> dict[str, int]:
    """How many of each kind torch.distributed is asked for in a step over so many layers."""
    state = tpkernels.create_parallel_state(
        tpkernels.plan_groups(world_size=dist.get_world_size(), tensor=tensor)
    )
    model = nn.ModuleList(ColumnParallelLinear(8, 16, bias=False, state=state) for _ in range(layers))
    optimizer = Muon(
        model.parameters(),
        model=model,
        round_bytes=round_bytes,
        data_parallel_group=state.process_group("dp"),
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}


def trained(tensor: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a GPT under Muon and AdamW, and its weights."""
    state = tpkernels.create_parallel_state(
        tpkernels.plan_groups(world_size=dist.get_world_size(), tensor=tensor)
    )
    torch.manual_seed(3)
    config = tpkernels.GPTConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=1, ffn_hidden_size=48
    )
    model = tpkernels.GPT(config, sequence_parallel=True, state=state).double()
    matrices, others = hidden_matrices(model)
    optimizers = [Muon(matrices, lr=LR, model=model), torch.optim.AdamW(others, lr=0.01)]
    ids = torch.arange(64).view(2, 32) * 7 % 61
    ids = ids.chunk(state.size("dp"))[state.rank_in("dp")] if state.size("dp") > 1 else ids
    buckets = tpkernels.GradientBuckets(
        list(model.named_parameters()),
        state.process_group("dp"),
        tensor_parallel_group=state.process_group("tp"),
    )
    losses = []
    for _ in range(4):
        buckets.zero()
        loss = model(ids, ids.roll(1, 1))
        loss.backward()
        buckets.finish()
        for optimizer in optimizers:
            optimizer.step()
        dist.all_reduce(loss_ := loss.detach().clone())
        losses.append(loss_.item() / dist.get_world_size())
    return losses, full_state_dict(model, state=state)


def half_way(folder: str, tensor: int, resumed: bool) -> dict[str, Tensor]:
    """Two steps that are saved; or two more from there."""
    model = Matrices(tensor)
    optimizer = Muon(model.parameters(), model=model, lr=0.5 if resumed else LR)
    if resumed:
        dcp.load(folder, model, optimizer)
    for step in (2, 3) if resumed else (0, 1):
        set_gradients(model, values_for(model, "gradients", step, torch.float32))
        optimizer.step()
    if not resumed:
        dcp.save(folder, model, optimizer)
        return {}
    expected = reference(
        values_for(model, "weights", 0, torch.float32),
        4,
        {"lr": LR},
        lambda step: values_for(model, "gradients", step, torch.float32),
    )
    return {name: cut(shard, expected[name]) - shard.tensor for name, shard in shards_of(model).items()}


def refused(case: str) -> str:
    """The error of each rank."""
    model = Matrices(dist.get_world_size())
    optimizer = Muon(model.parameters(), model=model)
    set_gradients(model, values_for(model, "gradients", 0, torch.float32))
    try:
        if case == "gradient of one rank" and dist.get_rank() == 1:
            model.get_parameter("row.weight").grad = None
        if case == "options of one rank" and dist.get_rank() == 1:
            optimizer.param_groups[0]["momentum"] = 0.5
        if case == "dtype of one rank" and dist.get_rank() == 1:
            vars(model.replicated.weight)["main_grad"] = torch.zeros(20, 12, dtype=torch.float64)
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def under_fully_shard() -> tuple[str, str]:
    """A model whose parameters are DTensors."""
    model = fully_shard(Matrices(1), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return error_of(Muon, hidden_matrices(model)[0], model=model)
