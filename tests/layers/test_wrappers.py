"""Data parallelism over ranks that hold different shards is refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checks import error_of
from tests.layers.small import K, N
from tests.on_ranks import on_ranks
from tests.products import once
from tpkernels import (
    ColumnParallelLinear,
    GradientBuckets,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallelize,
)

Wrap = Callable[[nn.Module, DeviceMesh], object]


def by_ddp(module: nn.Module, mesh: DeviceMesh) -> object:
    return DistributedDataParallel(module, process_group=mesh.get_group())(torch.ones(4, 2, K))


def by_replicate(module: nn.Module, mesh: DeviceMesh) -> object:
    replicate(module, process_group=mesh.get_group())
    return module(torch.ones(4, 2, K))  # it wraps in the first forward


def by_fully_shard_each(module: nn.Module, mesh: DeviceMesh) -> object:
    for child in module.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def by_fsdp(module: nn.Module, mesh: DeviceMesh, **options: bool) -> nn.Module:
    group = mesh.get_group()
    return FullyShardedDataParallel(module, process_group=group, device_id=torch.device("cpu"), **options)


WRAPS: dict[str, Wrap] = {
    "ddp": by_ddp,
    "replicate": by_replicate,
    "fully_shard": lambda module, mesh: fully_shard(module, mesh=mesh),
    "fully_shard_each": by_fully_shard_each,
    "buckets": lambda module, mesh: GradientBuckets(module, mesh.get_group()),
}


class Plain(nn.Module):
    """Inside a model of somebody else, two levels down."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(K, K)
        self.inner = nn.Sequential(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def swapped(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(K), nn.Linear(K, N), nn.GELU(), nn.Linear(N, K))
    return parallelize(model, mesh, plan={"1": "column", "3": "row"})


MODELS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "column": lambda mesh: ColumnParallelLinear(K, N, state=mesh),
    "row": lambda mesh: RowParallelLinear(N, K, state=mesh),
    "attention": lambda mesh: ParallelAttention(K, 4, state=mesh),
    "inside": lambda mesh: Plain(ParallelMLP(K, N, state=mesh)),
    "swapped": swapped,
    "mlp": lambda mesh: ParallelMLP(K, N, state=mesh),
    "embedding": lambda mesh: VocabParallelEmbedding(10, K, state=mesh),
}


@once(wrap=[*WRAPS], model=[*MODELS])
@on_ranks(4)
def test_all_ranks_refuse_to_average_different_shards(wrap, model):
    mesh, world = meshes(2)
    kind, text = error_of(WRAPS[wrap], MODELS[model](mesh), world)
    assert kind == "ValueError", text
    assert "over ranks 0, 1, 2, 3 would average different shards" in text
    assert re.search("tensor-parallel ranks (0, 1|2, 3) ", text)
    assert 'pass the data-parallel group, state.process_group("dp") or mesh["dp"]' in text


@pytest.mark.parametrize(("world", "data_ranks"), [("ranks4", 2), ("ranks2", 1), ("ranks2", 2)])
@on_ranks()
def test_ranks_that_hold_the_same_shards_may_be_wrapped(data_ranks):
    mesh, _ = meshes(data_ranks)
    for wrap in WRAPS.values():
        wrap(MODELS["inside"](mesh), mesh["dp"])


@on_ranks(2)
def test_a_wrapper_that_has_overwritten_shards_says_so():
    """It sends rank 0's when it is made."""
    mesh, world = meshes(1)
    with pytest.raises(ValueError, match=r"do not wrap it .* Then build the model again$"):
        WRAPS["ddp"](MODELS["inside"](mesh), world)


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}], ids=["flat", "originals"])
@on_ranks(2)
def test_flat_parameters_are_refused_over_any_ranks(options):
    mesh, world = meshes(1)
    for model in MODELS.values():
        for over in (mesh["dp"], world):
            with pytest.raises(ValueError, match=r"^FullyShardedDataParallel: expected no .* use"):
                by_fsdp(model(mesh), over, **options)


@on_ranks(2)
def test_flat_parameters_of_a_rank_alone_are_accepted():
    mesh, _ = meshes(2)
    model = by_fsdp(MODELS["inside"](mesh), mesh["dp"])
    model(torch.ones(4, 2, K))[0].sum().backward()


@on_ranks(2)
def test_wrappers_of_parameters_that_were_replaced_are_refused():
    mesh, _ = meshes(1)
    model = nn.Sequential(nn.Linear(K, N))
    wrapper = DistributedDataParallel(model)
    wrapper(torch.ones(2, K))
    parallelize(model, mesh["tp"], plan={"0": "head"})
    with pytest.raises(ValueError, match=r"has wrapped '0.weight', which parallelize has replaced"):
        wrapper(torch.ones(2, K))


@on_ranks(2)
def test_what_is_not_split_may_be_wrapped():
    """By wrappers that are told to leave the shards alone."""
    mesh, world = meshes(1)
    model = MODELS["swapped"](mesh)
    shards = {name: p for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    model._ddp_params_and_buffers_to_ignore = list(shards)
    copies = [(name, p) for name, p in model.named_parameters() if name not in shards]
    WRAPS["ddp"](model, world)
    GradientBuckets(copies, world.get_group())
    fully_shard(MODELS["swapped"](mesh)[0], mesh=world)


def meshes(data_ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Data- by tensor-parallel ranks, and all of them in one dimension."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (data_ranks, ranks // data_ranks), mesh_dim_names=("dp", "tp"))
    return mesh, init_device_mesh("cpu", (ranks,))


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2)
def test_without_data_parallel_ranks_there_is_nothing_to_wrap(wrap):
    mesh, world = meshes(1)
    kind, text = error_of(WRAPS[wrap], MODELS["inside"](mesh), world)
    assert kind == "ValueError", text
    assert "tensor-parallel ranks 0, 1 each hold other rows or columns of" in text
    assert "there is nothing to average: do not wrap it" in text
