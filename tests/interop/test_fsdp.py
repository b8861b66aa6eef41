"""Models that tensor-parallel ranks and fully_shard split train, clip, save and load as unsharded ones."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as storage
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, debug

from tests.interop.refused import refused, refused_alike
from tests.interop.torch_models import PLAN, STACK_PLAN, Stack, loss_of, stack, toy
from tests.models.small import CONFIGS
from tests.on_ranks import on_ranks
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import (
    GPT,
    GradientBuckets,
    RMSNorm,
    check_replicas,
    clip_grad_norm_,
    finalize_gradients,
    parallelize,
)
from tpkernels.checkpoints import dcp
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
from tpkernels.interop.parallelize.saving import hold_dtensors
from tpkernels.layers.world import tensor_world

IDS = torch.arange(32).view(4, 8) * 5 % 37
TARGETS = (IDS * 3 + 1) % 37
STEPS, MORE, MAX_NORM = 2, 1, 0.5
KINDS = ("toy", "as_dtensor", "gpt2", "llama")


PLANS = {
    "toy": PLAN | {"blocks.?.norm": "replicated"},
    "as_dtensor": STACK_PLAN
    | {"layers.?.norm?": "replicated", "layers.?.attention": "partial", "layers.*.?_norm": "partial"},
}


def mesh_of(data, tensor):
    debug._clear_sharding_prop_cache()  # of an equal mesh of this case, with other groups
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def built(kind, mesh):
    """The same model in float64 for every mesh; a vocabulary of 37, which no number of ranks divides."""
    if kind in CONFIGS:
        torch.manual_seed(3)
        return GPT(CONFIGS[kind], sequence_parallel=True, state=mesh, dtype=torch.float64)
    model = toy(tied=True, bias=False) if kind == "toy" else stack("tied", scalar=False)
    if mesh.size() == 1:
        return model
    return parallelize(model, mesh, plan=PLANS[kind], verify=False, as_dtensor=kind == "as_dtensor")


def sharded(kind, mesh):
    model = built(kind, mesh)
    for block in model.layers if isinstance(model, Stack) else model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def mean_loss(model, ids, targets):
    return model(ids, targets) if isinstance(model, GPT) else loss_of(model, ids, targets)


def clip_by_ours(model, mesh):
    if isinstance(model, GPT):
        finalize_gradients(model, state=mesh)
    return clip_grad_norm_(model.parameters(), MAX_NORM, state=mesh)


def clip_by_torch(model, _):
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def train(model, optimizer, mesh, steps=STEPS, clip=clip_by_ours):
    """Loss of the full batch and norm of its gradient, for each step."""
    rows, place = len(IDS) // mesh["dp"].size(), mesh.get_local_rank("dp")
    own = slice(place * rows, (place + 1) * rows)
    told = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mean_loss(model, IDS[own], TARGETS[own])
        loss.backward()
        norm = clip(model, mesh)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        told.append((mean.item() / mesh["dp"].size(), norm.item()))
    check_replicas(model, state=mesh)
    return told


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def run(kind, data, tensor, folder):
    """Losses, norms and full weights of a run that is saved, then goes on."""
    mesh = mesh_of(data, tensor)
    model = built(kind, mesh) if dist.get_world_size() == 1 else sharded(kind, mesh)
    optimizer = adamw(model)
    told = train(model, optimizer, mesh)
    dcp.save(Path(folder), model, optimizer, extra={"step": STEPS}, state=mesh)
    return told + train(model, optimizer, mesh, MORE), full_state_dict(model, state=mesh)


def resume(kind, data, tensor, folder):
    """What came after the checkpoint again, on another mesh, with an evaluation before and after."""
    mesh = mesh_of(data, tensor)
    model = built(kind, mesh) if dist.get_world_size() == 1 else sharded(kind, mesh)
    optimizer = adamw(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        mean_loss(model, IDS, TARGETS)  # leaves the root's parameters unsharded
    assert dcp.load(Path(folder), model, optimizer, state=mesh) == {"step": STEPS}
    if dist.get_world_size() > 1:
        require_zero_padding(model, mesh)
    told = train(model, optimizer, mesh, MORE)
    with torch.no_grad():
        mean_loss(model, IDS, TARGETS)
    return told, full_state_dict(model, state=mesh)


def by_torch(folder, reference, place):
    """torch's own clipping, checkpoints and AdamW, of a model whose parameters are DTensors.

    It is saved on two by two ranks, and goes on there, then elsewhere.
    reference: losses and norms of the unsharded run
    place: where: data ranks, tensor ranks, whether fully_shard wraps it
    """
    for number, (data, tensor, wraps) in enumerate(((2, 2, True), place)):
        mesh = mesh_of(data, tensor)
        model = sharded("as_dtensor", mesh) if wraps else built("as_dtensor", mesh)
        optimizer = adamw(model)
        if number == 0:
            assert train_by_torch(model, optimizer, mesh, STEPS) == reference[:STEPS]
            weights, state = get_state_dict(model, optimizer)
            storage.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state}
        storage.load(content, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
        )
        assert train_by_torch(model, optimizer, mesh, MORE) == reference[STEPS:]


def train_by_torch(model, optimizer, mesh, steps):
    """As `train`, rounded to nine digits."""
    told = train(model, optimizer, mesh, steps, clip_by_torch)
    return [(round(loss, 9), round(norm, 9)) for loss, norm in told]


def unsharded_by_torch():
    mesh = mesh_of(1, 1)
    model = built("as_dtensor", mesh)
    return train_by_torch(model, adamw(model), mesh, STEPS + MORE)


@on_ranks(4)
def test_dtensors_of_a_model_on_the_meta_device():
    mesh = mesh_of(2, 2)
    whole = stack("tied", scalar=False)
    with torch.device("meta"):
        model = stack("tied", scalar=False)
    parallelize(model, mesh, plan=PLANS["as_dtensor"], verify=False, as_dtensor=True)
    fully_shard(model, mesh=mesh["dp"]).to_empty(device="cpu")
    load_full_state_dict(model, whole.state_dict(), state=mesh)
    torch.testing.assert_close(model(IDS), whole(IDS), rtol=0, atol=1e-12)
    assert model.head.weight is model.embed.weight


@on_ranks(2)
def test_what_cannot_be_dtensors_is_refused_before_anything_is_replaced():
    mesh = mesh_of(1, 2)
    stacked, other = toy(), stack("tied", scalar=False)
    before = [type(module) for model in (stacked, other) for module in model.modules()]
    one_range = "plan: 'blocks.*.qkv': expected weights with one range of rows or columns on each rank"
    as_dtensor = partial(parallelize, verify=False, as_dtensor=True)
    group, plan = mesh.get_group("tp"), PLANS["as_dtensor"]
    refused_alike("ValueError", one_range, as_dtensor, stacked, mesh, plan=PLAN)
    refused_alike("ValueError", "True: expected a DeviceMesh", as_dtensor, other, group, plan=plan)
    assert before == [type(module) for model in (stacked, other) for module in model.modules()]
    plain = "is a DTensor; expected a plain tensor: use fully_shard"
    model = built("as_dtensor", mesh)
    refused("TypeError", plain, GradientBuckets, model, mesh.get_group("dp"))  # each rank names itself


@on_ranks(4)
def test_norm_counts_replicas_of_shards_once():
    """fully_shard also replicates."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicas", "shards", "tp"))
    model, whole = built("llama", mesh), built("llama", mesh)
    fully_shard(model, mesh=mesh["replicas", "shards"])
    for each in (model, whole):
        mean_loss(each, IDS, TARGETS).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM, state=mesh)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0, check_dtype=False)


def exact_norms(data, tensor):
    """The norm that is added exactly, of gradients that are the same on all meshes."""
    with tp_invariance(4):
        mesh = mesh_of(data, tensor)
        torch.manual_seed(3)
        model = GPT(CONFIGS["gpt2"], state=mesh)
        if dist.get_world_size() > 1:
            fully_shard(model, mesh=mesh["dp"])
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 3
        return clip_grad_norm_(model.parameters(), MAX_NORM, state=mesh).item()


def require_zero_padding(model, mesh):
    """The table's rows for no id, which no checkpoint has: each rank holds others of its rows."""
    table = next(p for name, p in model.named_parameters() if name.startswith("embed"))
    held = table.detach().to_local().abs().sum()
    dist.all_reduce(held)
    full = [full_state_dict(model, state=mesh)]
    dist.broadcast_object_list(full)
    expected = next(value for name, value in full[0].items() if name.startswith("embed"))
    torch.testing.assert_close(held, expected.abs().sum())


@on_ranks(2)
def test_partial_gradients_of_dtensors_are_summed_once():
    """Of a norm of this rank's tokens: complete after backward."""
    mesh = mesh_of(1, 2)
    norm = RMSNorm(8, sequence_parallel=True)
    hold_dtensors(norm, mesh, tensor_world(mesh))
    tokens = torch.arange(32.0).view(2, 2, 8).sin()
    norm(tokens[dist.get_rank()]).square().sum().backward()
    weight = torch.ones(8, requires_grad=True)
    F.rms_norm(tokens, (8,), weight, 1e-5).square().sum().backward()
    for _ in range(2):
        torch.testing.assert_close(norm.weight.grad.full_tensor(), weight.grad)
        finalize_gradients(norm, state=mesh)


def require_alike(found, expected, steps):
    """Losses, norms and weights."""
    for told, _ in found:
        assert torch.allclose(torch.tensor(told), torch.tensor(expected[0][-steps:]), rtol=1e-6, atol=0)
    weights = found[0][1]
    assert weights.keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.allclose(weights[name], value, rtol=0, atol=1e-9), name


PLACES = {
    "four_data_ranks": (4, 1, "split"),
    "four_tensor_ranks": (1, 4, "split"),
    "one_rank": (1, 1, "split"),
    "two_by_two_from_one": (2, 2, "unsharded"),
}


@pytest.fixture(scope="module")
def runs_of(ranks1, ranks4, tmp_path_factory):
    """(the unsharded run of a kind, that of two by two ranks, their folder), made once."""

    @cache
    def of(kind):
        folder = tmp_path_factory.mktemp(kind)
        (expected,) = ranks1.run(run, kind, 1, 1, str(folder / "unsharded"))
        return expected, ranks4.run(run, kind, 2, 2, str(folder / "split")), folder

    return of


@once(kind=KINDS, place=PLACES)
def test_runs_of_2_by_2_are_unsharded_and_resume_anywhere(kind, place, ranks4, ranks1, runs_of):
    expected, split, saved = runs_of(kind)
    require_alike(split, expected, STEPS + MORE)
    data, tensor, folder = place
    pool = ranks1 if data * tensor == 1 else ranks4
    require_alike(pool.run(resume, kind, data, tensor, str(saved / folder)), expected, MORE)


@pytest.mark.parametrize("place", [(1, 4, False), pytest.param((4, 1, True), marks=pytest.mark.sweep)])
def test_torchs_own_tools_see_the_unsharded_model_in_dtensors(place, ranks4, ranks1, tmp_path):
    (reference,) = ranks1.run(unsharded_by_torch)
    ranks4.run(by_torch, str(tmp_path / "checkpoint"), reference, place)


def test_exact_norm_has_the_same_bits_under_fully_shard(ranks1, ranks4):
    (expected,) = ranks1.run(exact_norms, 1, 1)
    for sizes in ((2, 2), (4, 1), (1, 4)):
        assert ranks4.run(exact_norms, *sizes) == [expected] * 4
