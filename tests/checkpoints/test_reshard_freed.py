"""A model that is freed while it moves is never there twice, and what cannot be freed is refused."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.two_tensor import TwoTensor

from tests.checkpoints.test_reshard import WAYS, built_over, kept_by, moving_by, over, trained, unequal
from tests.interop.refused import refused, refused_alike
from tests.live_bytes import LiveBytes
from tests.models.small import CONFIGS, IDS
from tests.on_ranks import on_ranks
from tests.products import pairwise
from tpkernels import GPT, reshard
from tpkernels.checkpoints import reshard as reshard_
from tpkernels.checkpoints.reshard_plan import plan_of


def peak_while_moving(held, model, **options):
    """The most bytes of these tensors, and of what torch allocates, at a time, once there is a plan."""
    live = LiveBytes(messages=False)

    def planned(*args, **options):
        plan = plan_of(*args, **options)
        live.peak = 0
        return plan

    with live, patch.object(reshard_, "plan_of", planned):
        for tensor in held:
            tensor.detach()  # it is counted from now on
        del held, tensor
        reshard(model, **options)
    return live.peak


def states_of(optimizer):
    return [state[key] for state in kept_by(optimizer)[1] for key in ("exp_avg", "exp_avg_sq")]


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@pairwise(way=WAYS, layout=((2, 1), (1, 2)), start=("meta", "freed"))
@on_ranks(2)
def test_a_model_that_is_freed_as_it_moves_is_never_there_twice(way, layout, start):
    """The other one is built without memory, or was freed; its parameters stay the same objects."""
    before, after = (over(tensor) for tensor in layout)
    bucket_bytes, buckets = 1024, 2
    model, expected = built_over("gpt2", before, 1), built_over("gpt2", after, 1)
    if start == "meta":
        other = GPT(CONFIGS["gpt2"], state=after, device="meta")
    else:
        other = built_over("gpt2", after, 2)
        reshard(other, to=built_over("gpt2", before, 3), free_source=True)
    kept = [id(parameter) for parameter in model.parameters()]
    options = {"free_source": True, "bucket_bytes": bucket_bytes, "buckets": buckets}
    held, wanted = bytes_of(model), bytes_of(expected)
    largest = max(parameter.nbytes for parameter in (*model.parameters(), *expected.parameters()))
    with moving_by(way):
        peak = peak_while_moving(model.parameters(), model, to=other, **options)
        assert unequal(other, expected) == []
        most = max(held, wanted) + largest + buckets * bucket_bytes
        assert (peak < most, most < held + wanted) == (True, True), (peak, most, held, wanted)
        assert all(parameter.isnan().all() for parameter in model.parameters())
        assert refused("ValueError", "was freed by a call with free_source=True", reshard, model, to=other)
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            next(model.parameters()).data.mul_(2)
        reshard(other, to=model, **options)
    assert unequal(model, built_over("gpt2", before, 1)) == []
    assert [id(parameter) for parameter in model.parameters()] == kept
    assert torch.equal(model(IDS), built_over("gpt2", before, 1)(IDS))


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_rank_without_source_gets_memory_too(way):
    whole, rank = built_over("gpt2", over(1), 1), dist.get_rank()
    other = GPT(CONFIGS["gpt2"], state=over(2), device="meta")
    with moving_by(way):
        reshard(whole if rank == 0 else None, to=other)
    assert unequal(other, built_over("gpt2", over(2), 1)) == []


@on_ranks(2)
def test_a_model_goes_to_another_layout_in_place_with_its_optimizer():
    """The other one and its optimizer are built without memory, and never there twice with the first."""
    model, expected = (built_over("llama", over(tensor), 1) for tensor in (2, 1))
    optimizer, wanted = trained(model, 1), trained(expected, 1)
    other = GPT(CONFIGS["llama"], state=over(1), device="meta")
    ours = [*other.parameters()]
    resumed = torch.optim.AdamW([{"params": ours[:3]}, {"params": ours[3:]}])
    held = [*model.parameters(), *states_of(optimizer)]
    most = [*expected.parameters(), *states_of(wanted)]
    sizes = [sum(tensor.nbytes for tensor in each) for each in (held, most)]
    limit = max(sizes) + max(tensor.nbytes for tensor in most) + 512
    options = {"free_source": True, "bucket_bytes": 512, "buckets": 1}
    held = iter([held.pop(0) for _ in range(len(held))])
    peak = peak_while_moving(held, model, to=other, optimizer=optimizer, to_optimizer=resumed, **options)
    assert (peak < limit, limit < sum(sizes)) == (True, True), (peak, limit, sizes)
    assert unequal(other, expected) == []
    assert [id(parameter) for parameter in other.parameters()] == [id(parameter) for parameter in ours]
    assert kept_by(resumed)[0] == kept_by(wanted)[0]
    for found, state in zip(kept_by(resumed)[1], kept_by(wanted)[1], strict=True):
        assert all(torch.equal(found[key], state[key]) for key in state)
    for state in kept_by(optimizer)[1]:
        assert state["exp_avg"].isnan().all()
        assert state["exp_avg_sq"].untyped_storage().nbytes() == 4
    wanted.zero_grad()
    for each in (other, expected):
        each(IDS, IDS).backward()
    for by in (resumed, wanted):
        by.step()
    assert unequal(other, expected) == []


@on_ranks(2)
def test_parameters_on_the_meta_device_that_others_hold_or_hook_into_are_refused():
    """They would stay the same objects, of which others see nothing, and whose hooks do not run."""
    state, source = over(1), nn.Linear(4, 4, bias=False)
    held, hooked, stepping = (nn.Linear(4, 4, bias=False, device="meta") for _ in range(3))
    view = held.weight.view(-1)
    hooked.weight.register_hook(lambda gradient: gradient)
    stepping.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for model, text in (
        (held, "'weight' is on the meta device, and something else holds it"),
        (hooked, "'weight' is on the meta device and has hooks"),
        (stepping, "'weight' is on the meta device and has hooks"),
    ):
        refused("ValueError", text, reshard, source, to=model, state=state, to_state=state)
    assert view.is_meta


@on_ranks(2)
def test_nothing_is_written_through_a_freed_tensor():
    """Fused optimizers go by address; states that were freed are no states to move."""
    world = dist.group.WORLD
    model, other, third = (built_over("llama", world, seed) for seed in (1, 2, 3))
    optimizer, resumed, last = trained(model, 1), trained(other, 2), trained(third, 3)
    fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    reshard(model, to=other, optimizer=optimizer, to_optimizer=resumed, free_source=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    fused.step()  # over no gradients
    first = next(model.parameters())
    first.grad = torch.ones(first.shape)
    with pytest.raises(RuntimeError, match=r"SGD.step: a parameter .* was freed by reshard"):
        fused.step()
    own = next(other.parameters())
    own.grad, resumed.state[own]["more"] = torch.ones(own.shape), TwoTensor(torch.ones(2), torch.ones(2))
    resumed.step()  # subclasses have no memory to ask for
    reshard(other, to=model, free_source=True)  # without the optimizers' states
    first.grad = torch.ones(first.shape)
    with pytest.raises(RuntimeError, match=r"AdamW.step: .* or its state, was freed by reshard"):
        optimizer.step()
    options = {"to": third, "optimizer": optimizer, "to_optimizer": last}
    assert refused("ValueError", "optimizer's state has moved without this one", reshard, model, **options)


@on_ranks(2)
def test_parameters_of_a_filled_model_stay_the_same_and_expanded_ones_are_not_taken_for_freed():
    mesh, state = init_device_mesh("cpu", (2,)), over(2)
    target = fully_shard(nn.Sequential(nn.LayerNorm(4)), mesh=mesh)
    weight = next(target.parameters())
    weight.mine = 3
    reshard(nn.Sequential(nn.LayerNorm(4)), to=target, state=state, to_state=state)
    assert next(target.parameters()) is weight
    assert weight.mine == 3
    module = nn.Module()
    module.register_buffer("steps", torch.ones(()).expand(4))
    to = {"steps": torch.zeros(4)}
    reshard(module, to=to, state=state)
    assert to["steps"].tolist() == [1.0] * 4


@on_ranks(2)
def test_what_cannot_be_freed_is_refused_and_lost_weights_told():
    rank, world = dist.get_rank(), dist.group.WORLD
    model, other = built_over("llama", world, 1), built_over("llama", world, 2)
    flat = built_over("llama", world, 1)
    first, second = [*flat.parameters()][:2]
    both = torch.cat([first.detach().flatten(), second.detach().flatten()])
    first.data = both[: first.numel()].view(first.shape)
    second.data = both[first.numel() :].view(second.shape)
    mesh, state = init_device_mesh("cpu", (2,)), over(2)
    calls = {
        "'embedding.weight' shares memory with the rest of its buffer": (flat, other),
        "is a DTensor": (fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4)),
        "which is freed": (model, model),
    }
    freed = {"free_source": True, "state": state, "to_state": state}
    for text, (source, to) in calls.items():
        refused_alike("ValueError", text, reshard, source, to=to, **freed)
    refused_alike("TypeError", "expected a model, got dict", reshard, {}, to=other, free_source=True)
    on_meta = {"weight": torch.empty(2, device="meta")}
    refused_alike("ValueError", "'weight' is on the meta device", reshard, model, to=on_meta)
    assert unequal(model, built_over("llama", world, 1)) == []

    def failing(*args, **options):
        if rank == 1 and all(parameter.isnan().all() for parameter in [*model.parameters()][:2]):
            raise OSError("planted")
        return copy_own(*args, **options)

    copy_own = reshard_.copy_own
    with patch.object(reshard_, "copy_own", failing):
        options = {"to": other, "free_source": True, "bucket_bytes": 64, "buckets": 1}
        assert refused("RuntimeError", "part of the model has moved and is freed", reshard, model, **options)
