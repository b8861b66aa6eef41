"""A model with norms of queries and keys, trained on ranks in many ways and compared with one unsharded."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.interop.refused import refused
from tests.interop.split_cases import loss_of
from tests.models.small import IDS, TARGETS
from tpkernels import (
    GradientBuckets,
    check_replicas,
    finalize_gradients,
    initialize_model_parallel,
    parallelize,
)
from tpkernels.interop.parallelize import verify
from tpkernels.interop.parallelize.plan import Split

STEPS = 5


class Attention(nn.Module):
    """Four heads; queries and keys are normalised, values are scaled."""

    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.scale = nn.Parameter(torch.rand(4))
        self.temperature = nn.Parameter(torch.full(() if scalar else (1,), 0.7))
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = self.q_norm(q) * self.temperature
        heads = F.scaled_dot_product_attention(q, self.k_norm(k), v * self.scale, is_causal=True)
        y: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return y


class Normed(nn.Module):
    checkpointing: bool | None = None  # with use_reentrant

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(2))
        self.attentions = nn.ModuleList(Attention(scalar) for _ in range(2))
        self.head = nn.Linear(16, 37, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            if self.checkpointing is None:
                x = x + attention(norm(x))
            else:
                x = x + checkpoint(attention, norm(x), use_reentrant=self.checkpointing)
        y: Tensor = self.head(x)
        return y


PLAN: dict[str, Any] = {
    "embed": "embedding",
    "attentions.*.[qkv]": Split("column", unit=4),
    "attentions.*.out": Split("row", unit=4),
    "head": "head",
}
PARTIAL = ("q_norm.weight", "k_norm.weight", "scale", "temperature")


def normed(scalar: bool = True) -> Normed:
    torch.manual_seed(5)
    return Normed(scalar).double()


def train(model: nn.Module, how: str, state: Any = None) -> list[float]:
    """Losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    buckets = None
    if how == "buckets":
        dp, tp = (state.process_group(name) for name in ("dp", "tp"))
        buckets = GradientBuckets(model, dp, tensor_parallel_group=tp)
    losses = []
    for step in range(STEPS):
        if how == "frozen":
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.endswith("q_norm.weight") or step > 1)
        buckets.zero() if buckets else optimizer.zero_grad()
        parts = [slice(0, 1), slice(1, 2)] if how == "accumulated" else [slice(0, 2)]
        loss = torch.zeros(())
        for part in parts:
            one = loss_of(model, IDS[part], TARGETS[part]) / len(parts)
            one.backward()
            loss = loss + one.detach()
        if buckets:
            buckets.finish()
        if how == "finalized":
            finalize_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


WAYS = ("plain", "accumulated", "checkpointed", "reentrant", "compiled", "frozen", "buckets", "finalized")
WAYS += ("copied", "pickled")


def trained_alike(how: str) -> list[str]:
    """What differs from the unsharded model after some steps, and between ranks."""
    state = initialize_model_parallel(dist.get_world_size())
    whole, split = normed(), parallelize(normed(), plan=PLAN)
    model: Any = split
    if how in ("checkpointed", "reentrant"):
        whole.checkpointing = split.checkpointing = how == "reentrant"  # type: ignore[assignment]
    elif how == "compiled":
        split.compile(backend="aot_eager", fullgraph=True)
    elif how == "copied":
        model = split = deepcopy(split)
    elif how == "pickled":
        model = split = pickle.loads(pickle.dumps(split))
    losses = train(model, how, state)
    check_replicas(split)
    return unlike(split, whole, losses, train(whole, how if how in ("accumulated", "frozen") else "plain"))


def unlike(split: nn.Module, whole: nn.Module, losses: list[float], expected: list[float]) -> list[str]:
    wrong = [f"loss {step}" for step in range(STEPS) if abs(losses[step] - expected[step]) > 1e-10]
    trained = dict(split.named_parameters())
    for name, parameter in whole.named_parameters():
        if name.endswith(PARTIAL):
            found = trained[name]
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            if not torch.allclose(found, parameter, rtol=0, atol=1e-9):
                wrong.append(name)
    return wrong


def data_parallel(wrapper: str) -> list[str]:
    """Two copies of a model that two ranks share each, on half of the batch each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, split = normed(False), parallelize(normed(False), mesh, plan=PLAN)  # FSDP takes no scalars
    expected = train(whole, "plain")
    if wrapper == "ddp":
        model: nn.Module = DistributedDataParallel(split, process_group=mesh.get_group("dp"))
    else:
        fully_shard(split.attentions[0].q_norm, mesh=mesh["dp"])  # type: ignore[union-attr, index]
        fully_shard(split.attentions[0], mesh=mesh["dp"])  # type: ignore[index]
        model = fully_shard(split, mesh=mesh["dp"])
    own = slice(mesh.get_local_rank("dp"), mesh.get_local_rank("dp") + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, IDS[own], TARGETS[own])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        losses.append(mean.item() / 2)
    return unlike(split, whole, losses, expected)


def declared() -> list[Any]:
    """What is summed when a plan says so; and what is said when it is wrong, or nobody can tell."""
    initialize_model_parallel(2)
    halves = {"attentions.*.?_norm": "partial", "attentions.?": "partial", "norms": "replicated"}
    split = parallelize(normed(), plan=PLAN | halves, verify=False)
    whole, reentrant = normed(), normed()
    reentrant.checkpointing = True
    untold = "'attentions.0.scale' stands beside layers that are split"
    of_queries, of_all = {"attentions.*.q_norm": "replicated"}, {"norms.*": "partial"}
    return [
        unlike(split, whole, train(split, "plain"), train(whole, "plain")),
        refused("ValueError", f"{untold}, and it cannot", parallelize, normed(), plan=PLAN, verify=False),
        refused("ValueError", "q_norm.weight' is off by", parallelize, normed(), plan=PLAN | of_queries),
        refused("ValueError", "norms.1.weight' is off by", parallelize, normed(), plan=PLAN | of_all),
        refused("ValueError", untold, parallelize, reentrant, plan=PLAN),
    ]


class AllHeads(Normed):
    """Queries are normalised over all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        for attention in self.attentions:
            attention.q = nn.Sequential(attention.q, nn.RMSNorm(16))  # type: ignore[assignment, arg-type]


class Plain(nn.Module):
    """Two layers, and between them what a function does with parameters of the model."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        if between == "gate":
            self.gate = nn.Linear(8, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        h = self.up(x)
        if self.between == "gate":  # its gradient with respect to x would be partial
            h = h * self.gate(x).sigmoid()
        elif self.between == "norm":  # over all features, without a weight
            h = F.rms_norm(h, h.shape[-1:])
        y: Tensor = self.down(h)
        return y


def refusals() -> list[str]:
    """What is said where features are not those that a function takes, or gradients are not summed."""
    initialize_model_parallel(2)
    plan = {"up": "column", "down": "row"}
    in_sequence = {name: said for name, said in PLAN.items() if "[qkv]" not in name}
    in_sequence |= dict.fromkeys(("attentions.*.q.0", "attentions.*.[kv]"), Split("column", unit=4))
    full = "'attentions.0.q.1' does not take this rank's features, though it takes all of them"
    both = "reaches both full features and, past no column, those that ranks split"
    differs = "the first module whose output differs is 'down', and the last before it that agrees is 'up'"
    torch.manual_seed(0)
    said = [
        refused("ValueError", full, parallelize, AllHeads().double(), plan=in_sequence),
        refused("ValueError", both, parallelize, Plain("gate"), plan=plan),
        refused("ValueError", differs, parallelize, Plain("norm"), plan=plan),
    ]
    with patch.object(verify, "sum_gradients", lambda *_: None):
        said.append(refused("ValueError", "the gradient of 'attentions.", parallelize, normed(), plan=PLAN))
    assert "is off by" in said[-1]
    return said
