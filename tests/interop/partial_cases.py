"""A model with norms of queries and keys, trained on ranks in many ways and compared with one unsharded."""

import pickle
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.interop.refused import refused_alike
from tests.interop.torch_models import (
    PLAN,
    STACK_PLAN,
    assert_alike,
    assert_gradients_alike,
    losses_of,
    stack,
    toy,
)
from tests.models.small import IDS, TARGETS
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.interop.parallelize import verify

ODD = IDS[:, :5], TARGETS[:, :5]  # whose tokens two ranks do not divide


def trained_alike(how="plain", kind="gpt", sequence_parallel=False):
    """The split model is the unsharded one, at first and after some steps, and on all ranks."""
    state = initialize_model_parallel(dist.get_world_size())
    direct = kind == "direct"  # columns and rows are children of layers
    whole, plan = (toy(), PLAN) if direct else (stack(kind), STACK_PLAN)
    if how == "compiled":
        del whole.layers[1]  # a second layer takes as long to trace, and shows no more
    split = parallelize(deepcopy(whole), plan=plan, sequence_parallel=sequence_parallel)
    if how in ("checkpointed", "reentrant"):
        whole.checkpointing = split.checkpointing = how == "reentrant"
    elif how == "copied":
        split = deepcopy(split)
    elif how == "pickled":
        split = pickle.loads(pickle.dumps(split))
    assert_alike(split, whole)
    for model in (split, whole) if sequence_parallel else ():
        model.eval()
    for ids, targets in (ODD, (IDS, TARGETS)) if sequence_parallel else (ODD,):
        assert_alike(split, whole, 1e-12, ids, targets)
    if how == "untrained":
        return
    for model in (split, whole):
        model.train().zero_grad()
    if how == "compiled":
        torch._dynamo.reset()
        split.compile(backend="aot_eager", fullgraph=True)
    losses = losses_of(split, how, state)
    check_replicas(split)
    expected = losses_of(whole, how if how in ("accumulated", "frozen") else "plain")
    assert_trained_alike(split, whole, losses, expected)


def assert_trained_alike(split, whole, losses, expected):
    """Losses, and parameters that ranks do not split."""
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    trained = {name: full(parameter) for name, parameter in split.named_parameters()}
    for name, parameter in whole.named_parameters():
        kept = trained[name].shape == parameter.shape
        if kept:
            torch.testing.assert_close(trained[name], parameter, rtol=0, atol=1e-9, msg=name)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def data_parallel(wrapper, sequence_parallel=False):
    """Two copies of a model that two ranks share each, on half of the batch each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, split = (stack(scalar=False) for _ in range(2))  # FSDP takes no scalars
    parallelize(split, mesh, plan=STACK_PLAN, sequence_parallel=sequence_parallel)
    plain = deepcopy(split)
    if wrapper == "ddp":
        model = DistributedDataParallel(split, process_group=mesh.get_group("dp"))
    else:
        for module in (split.layers[0].attention.q_norm, *split.layers, split):
            model = fully_shard(module, mesh=mesh["dp"])
    assert_trained_alike(split, whole, losses_of(model, data=mesh.get_group("dp")), losses_of(whole))
    for to, parameter in zip(plain.parameters(), split.parameters(), strict=True):
        to.grad = full(parameter.grad)
    assert_gradients_alike(plain, whole, atol=1e-9)


def declared():
    """What is summed when a plan says so; and what is said when it is wrong, or nobody can tell."""
    initialize_model_parallel(2)
    halves = dict.fromkeys(("layers.?.attention", "layers.*.?_norm"), "partial")
    halves |= {"layers.?.norm?": "replicated"}
    split = parallelize(stack(), plan=STACK_PLAN | halves, verify=False)
    whole, reentrant = stack(), stack()
    reentrant.checkpointing = True
    untold = "'layers.0.attention.scale' is next to split layers"
    wrong = {"q_norm": {"layers.*.attention.q_norm": "replicated"}, "norm1": {"layers.*.norm1": "partial"}}
    assert_trained_alike(split, whole, losses_of(split), losses_of(whole))
    refused_alike("ValueError", f"{untold}, and", parallelize, stack(), plan=STACK_PLAN, verify=False)
    for norm, entry in wrong.items():
        off = f"{norm}.weight' is off by"
        refused_alike("ValueError", off, parallelize, stack(), plan=STACK_PLAN | entry)
    refused_alike("ValueError", untold, parallelize, reentrant, plan=STACK_PLAN)


class Gated(nn.Module):
    """Two layers, and between them what a function does with a third one: its gradient would be partial."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Linear(8, 8), nn.Linear(8, 1)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        return self.down(self.up(x) * self.gate(x).sigmoid())


def refusals():
    """What is said where gradients are not summed."""
    initialize_model_parallel(2)
    torch.manual_seed(0)
    both = "reaches full features, and split features without a column before them"
    refused_alike("ValueError", both, parallelize, Gated(), plan={"up": "column", "down": "row"})
    with patch.object(verify, "sum_gradients", lambda *_: None):
        said = refused_alike("ValueError", "the gradient of 'layers.", parallelize, stack(), plan=STACK_PLAN)
    assert "is off by" in said
