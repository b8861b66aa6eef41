"""A model with norms of queries and keys, trained on ranks in many ways and compared with one unsharded."""

import pickle
from copy import deepcopy
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.interop.refused import refused
from tests.interop.torch_models import STACK_PLAN, Stack, loss_of, stack
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
PARTIAL = ("q_norm.weight", "k_norm.weight", "scale", "temperature")


def train(model, how, state=None):
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


def trained_alike(how):
    """What differs from the unsharded model after some steps, and between ranks."""
    state = initialize_model_parallel(dist.get_world_size())
    whole, split = stack(), parallelize(stack(), plan=STACK_PLAN)
    model = split
    if how in ("checkpointed", "reentrant"):
        whole.checkpointing = split.checkpointing = how == "reentrant"
    elif how == "compiled":
        split.compile(backend="aot_eager", fullgraph=True)
    elif how == "copied":
        model = split = deepcopy(split)
    elif how == "pickled":
        model = split = pickle.loads(pickle.dumps(split))
    losses = train(model, how, state)
    check_replicas(split)
    return unlike(split, whole, losses, train(whole, how if how in ("accumulated", "frozen") else "plain"))


def unlike(split, whole, losses, expected):
    wrong = [f"loss {step}" for step in range(STEPS) if abs(losses[step] - expected[step]) > 1e-10]
    trained = dict(split.named_parameters())
    for name, parameter in whole.named_parameters():
        if name.endswith(PARTIAL):
            found = trained[name]
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            if not torch.allclose(found, parameter, rtol=0, atol=1e-9):
                wrong.append(name)
    return wrong


def data_parallel(wrapper, sequence_parallel=False):
    """Two copies of a model that two ranks share each, on half of the batch each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, split = (stack(scalar=False) for _ in range(2))  # FSDP takes no scalars
    parallelize(split, mesh, plan=STACK_PLAN, sequence_parallel=sequence_parallel)
    expected = train(whole, "plain")
    if wrapper == "ddp":
        model = DistributedDataParallel(split, process_group=mesh.get_group("dp"))
    else:
        for module in (split.layers[0].attention.q_norm, *split.layers, split):
            model = fully_shard(module, mesh=mesh["dp"])
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


def declared():
    """What is summed when a plan says so; and what is said when it is wrong, or nobody can tell."""
    initialize_model_parallel(2)
    halves = dict.fromkeys(("layers.?.attention", "layers.*.?_norm"), "partial")
    halves |= {"layers.?.norm?": "replicated"}
    split = parallelize(stack(), plan=STACK_PLAN | halves, verify=False)
    whole, reentrant = stack(), stack()
    reentrant.checkpointing = True
    untold = "'layers.0.attention.scale' stands beside layers that are split"
    of_queries, of_all = {"layers.*.attention.q_norm": "replicated"}, {"layers.*.norm1": "partial"}
    return [
        unlike(split, whole, train(split, "plain"), train(whole, "plain")),
        refused("ValueError", f"{untold}, and", parallelize, stack(), plan=STACK_PLAN, verify=False),
        refused("ValueError", "q_norm.weight' is off by", parallelize, stack(), plan=STACK_PLAN | of_queries),
        refused("ValueError", "norm1.weight' is off by", parallelize, stack(), plan=STACK_PLAN | of_all),
        refused("ValueError", untold, parallelize, reentrant, plan=STACK_PLAN),
    ]


class AllHeads(Stack):
    """Queries are normalised over all heads at once."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.attention.q = nn.Sequential(layer.attention.q, nn.RMSNorm(16))


class Plain(nn.Module):
    """Two layers, and between them what a function does with parameters of the model."""

    def __init__(self, between):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        if between == "gate":
            self.gate = nn.Linear(8, 1)
        self.between = between

    def forward(self, x):
        x = self.first(x)
        h = self.up(x)
        if self.between == "gate":  # its gradient with respect to x would be partial
            h = h * self.gate(x).sigmoid()
        elif self.between == "norm":  # over all features, without a weight
            h = F.rms_norm(h, h.shape[-1:])
        return self.down(h)


def refusals():
    """What is said where features are not those that a function takes, or gradients are not summed."""
    initialize_model_parallel(2)
    plan = {"up": "column", "down": "row"}
    in_sequence = {name: said for name, said in STACK_PLAN.items() if "[qkv]" not in name}
    in_sequence |= dict.fromkeys(("layers.*.q.0", "layers.*.[kv]"), Split("column", unit=4))
    full = "'layers.0.attention.q.1' does not take this rank's features, though it takes all of them"
    both = "reaches both full features and, past no column, those that ranks split"
    differs = "the first module whose output differs is 'down', and the last before it that agrees is 'up'"
    torch.manual_seed(0)
    said = [
        refused("ValueError", full, parallelize, AllHeads().double(), plan=in_sequence),
        refused("ValueError", both, parallelize, Plain("gate"), plan=plan),
        refused("ValueError", differs, parallelize, Plain("norm"), plan=plan),
    ]
    with patch.object(verify, "sum_gradients", lambda *_: None):
        said.append(refused("ValueError", "the gradient of 'layers.", parallelize, stack(), plan=STACK_PLAN))
    assert "is off by" in said[-1]
    return said
