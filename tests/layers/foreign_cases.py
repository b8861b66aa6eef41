"""What ranks run in tests of torch's own data parallelism around our layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checks import error_of
from tests.layers.parity import K, N
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
    return DistributedDataParallel(module, process_group=mesh.get_group())


def by_replicate(module: nn.Module, mesh: DeviceMesh) -> object:
    replicate(module, process_group=mesh.get_group())
    return module(torch.ones(4, 2, K))  # it wraps in the first forward


def by_fsdp(module: nn.Module, mesh: DeviceMesh) -> object:
    return FullyShardedDataParallel(module, process_group=mesh.get_group(), device_id=torch.device("cpu"))


def by_fsdp_of_originals(module: nn.Module, mesh: DeviceMesh) -> object:
    group = mesh.get_group()
    return FullyShardedDataParallel(
        module, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
    )


def by_fully_shard(module: nn.Module, mesh: DeviceMesh) -> object:
    return fully_shard(module, mesh=mesh)


def by_fully_shard_each(module: nn.Module, mesh: DeviceMesh) -> object:
    for child in module.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def by_buckets(module: nn.Module, mesh: DeviceMesh) -> object:
    return GradientBuckets(module, mesh.get_group())


WRAPS: dict[str, Wrap] = {
    wrap.__name__: wrap for wrap in (by_ddp, by_replicate, by_fsdp, by_fsdp_of_originals)
}
WRAPS |= {wrap.__name__: wrap for wrap in (by_fully_shard, by_fully_shard_each, by_buckets)}


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
    "mlp": lambda mesh: ParallelMLP(K, N, state=mesh),
    "attention": lambda mesh: ParallelAttention(K, 4, state=mesh),
    "embedding": lambda mesh: VocabParallelEmbedding(10, K, state=mesh),
    "inside": lambda mesh: Plain(ParallelMLP(K, N, state=mesh)),
    "swapped": swapped,
}


def refused(wrap: str, data_ranks: int) -> dict[str, tuple[str, str]]:
    """What is said of each model that is wrapped over all ranks."""
    mesh, world = meshes(data_ranks)
    return {name: error_of(WRAPS[wrap], make(mesh), world) for name, make in MODELS.items()}


def taken(data_ranks: int) -> dict[str, tuple[str, str]]:
    """What is said of a model that is wrapped over ranks which hold the same shards."""
    mesh, _ = meshes(data_ranks)
    return {name: error_of(wrap, MODELS["inside"](mesh), mesh["dp"]) for name, wrap in WRAPS.items()}


def weights_after_refusal() -> bool:
    """Whether every rank still has its own shard, where the wrapper would have sent rank 0's."""
    mesh, world = meshes(dist.get_world_size() // 2)
    model = MODELS["inside"](mesh)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert error_of(by_ddp, model, world)[0] == "ValueError"
    return all(map(torch.equal, before, model.parameters()))


def shards_left_out() -> list[tuple[str, str]]:
    """Wrappers that are told to leave the shards alone may have the rest."""
    mesh, world = meshes(1)
    model = MODELS["swapped"](mesh)
    shards = {name: p for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
    model._ddp_params_and_buffers_to_ignore = list(shards)
    copies = [(name, p) for name, p in model.named_parameters() if name not in shards]
    return [
        error_of(by_ddp, model, world),
        error_of(GradientBuckets, copies, world.get_group()),
        error_of(fully_shard, MODELS["swapped"](mesh)[0], mesh=world),
    ]


def meshes(data_ranks: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Data- by tensor-parallel ranks, and all of them in one dimension."""
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (data_ranks, ranks // data_ranks), mesh_dim_names=("dp", "tp"))
    return mesh, init_device_mesh("cpu", (ranks,))
