"""Copies that drift apart in a plain training loop are told within the steps that were asked for."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistNetworkError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_ as one_ranks_clip_grad_norm_

from tests.checks import error_of
from tests.layers.small import K, N, built, drawn, joined_world, tokens
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.products import once
from tpkernels import ColumnParallelLinear, RMSNorm, clip_grad_norm_, finalize_gradients, parallelize
from tpkernels.groups.checksums import sums_of_bits
from tpkernels.layers import replicas
from tpkernels.layers.attributes import Attributes

Clip = Callable[..., object]
Said = tuple[str, str]
NOTHING = ("nothing", "")


def every(steps: int) -> AbstractContextManager[int]:
    """As if TPKERNELS_CHECK_REPLICAS had been this."""
    return patch.object(replicas, "steps_between_checks", steps)


def steps_until_told(interval: int, steps: int, one_step: Callable[[int], None]) -> tuple[int, Said]:
    """How many steps a plain loop takes, and the error that ends it."""
    with every(interval):
        for step in range(steps):
            said = error_of(one_step, step)
            if said != NOTHING:
                return step + 1, said
    return steps, NOTHING


def loop(clip: Clip, interval: int, steps: int = 7, finalize: bool = True) -> tuple[int, Said]:
    block = built()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)

    def one_step(step: int) -> None:
        optimizer.zero_grad()
        for part in range(2):  # gradients are accumulated
            block(tokens(10 * step + part)).square().mean().backward()
        with torch.no_grad():
            if dist.get_rank() == 0:
                block.norm(tokens())  # not every rank need look at its own
        if finalize:
            finalize_gradients(block)
        clip(block.parameters(), 0.01)
        optimizer.step()

    return steps_until_told(interval, steps, one_step)


def by_torch(interval: int) -> tuple[int, Said]:
    return loop(one_ranks_clip_grad_norm_, interval)


def unsummed(interval: int) -> tuple[int, Said]:
    return loop(lambda *_: None, interval, finalize=False)


def other_data(interval: int) -> tuple[int, Said]:
    """Each tensor-parallel rank reads a batch of its own, as a prepared DataLoader would have it."""
    joined_world()
    torch.manual_seed(7)
    norm, layer = RMSNorm(K), ColumnParallelLinear(K, N)
    optimizer = torch.optim.SGD([*norm.parameters(), *layer.parameters()], lr=0.1)

    def one_step(_: int) -> None:
        optimizer.zero_grad()
        layer(norm(drawn((4, K), dist.get_rank())))[0].square().mean().backward()
        optimizer.step()

    return steps_until_told(interval, 7, one_step)


@on_ranks(2)
def test_unsplit_models_and_megatrons_experts_are_left_alone():
    """They are each rank's own."""
    plain, block = nn.Linear(4, 4), built()
    block.norm.weight.allreduce = False
    plain.weight.grad = torch.ones(4, 4)
    with torch.no_grad():
        for own in (plain.weight, block.norm.weight):
            own.fill_(1 + dist.get_rank())
    with every(1):
        torch.optim.AdamW(plain.parameters()).step()
        torch.optim.SGD(block.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_step_that_one_rank_takes_alone_is_told():
    """One that the others skip, as each GradScaler decides for itself."""
    block = built()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    words = "rank 0 waited 1 s after 1 optimizer steps.*rank 1 took another number of steps, or died"
    with every(1), patch.object(replicas.c10d, "default_timeout", lambda: timedelta(seconds=1)):
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=words):
                optimizer.step()


@on_ranks(2)
def test_each_optimizer_is_counted_by_itself():
    """Only the second drifts. A parallelized model tells of itself."""
    block = built()
    torch.manual_seed(3)
    model = parallelize(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)), plan={"1": "head"})
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (block, model))
    drift = r"^check_replicas: 'parameter 0 of the optimizer, \(4,\)' differs.* after 2 steps"
    with every(2):
        for step in (1, 2):
            block(tokens()).square().mean().backward()
            finalize_gradients(block)
            first.step()
            model[0].weight.grad = torch.full((4,), float(dist.get_rank() if step == 2 else 1))
            with pytest.raises(RuntimeError, match=drift) if step == 2 else nullcontext():
                second.step()


@on_ranks(2)
def test_copies_that_a_rank_lacks_are_told():
    block = built()
    parameters = list(block.parameters())
    block.norm.weight.requires_grad_(False)
    kept = [p for p in parameters if p.requires_grad or dist.get_rank() == 0]
    words = "tensor-parallel ranks hold different numbers of copies: 3 on rank 0, 2 on rank 1"
    with every(1), pytest.raises(RuntimeError, match=words):
        torch.optim.SGD(kept, lr=0.1).step()


@on_ranks(4)
def test_copies_under_fully_shard_are_compared_shard_by_shard():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), mesh, plan={"1": "head"})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    drift = "'0.weight' differs between tensor-parallel ranks.*so do 1 more of 2 parameters"
    for drifting in (False, True):
        model(torch.ones(2, 8)).square().sum().backward()
        for parameter in (p for p in model.parameters() if not Attributes.of(p).tensor_model_parallel):
            parameter.grad.zero_()  # what it is without a sum over what follows is not the point here
            if drifting:
                parameter.grad.add_(mesh.get_local_rank("tp"))
        with every(1), pytest.raises(RuntimeError, match=drift) if drifting else nullcontext():
            optimizer.step()


def one_step_of(
    interval: int, added: float = 0.0, gradient: Tensor | None = None, mark: bool = True
) -> tuple[int, Said]:
    """Of a copy beside a layer. added: to the weights of rank 1"""
    joined_world()
    layer, copy = ColumnParallelLinear(K, N), nn.Parameter(torch.ones(K) + added * dist.get_rank())
    copy.grad = gradient
    if mark:
        Attributes().put_on(copy)
    optimizer = torch.optim.SGD([copy, *layer.parameters()], lr=0.1)
    return steps_until_told(interval, 1, lambda _: optimizer.step())


def other_weights(interval: int) -> tuple[int, Said]:
    return one_step_of(interval, added=1.0, gradient=torch.ones(K))


def no_gradient(interval: int) -> tuple[int, Said]:
    return one_step_of(interval, added=1.0)


def other_kernels(interval: int) -> tuple[int, Said]:
    return one_step_of(interval, gradient=torch.ones(K) * (1 + 1e-5 * dist.get_rank()))


def unmarked_shard(interval: int) -> tuple[int, Said]:
    """Of a module of another library."""
    return one_step_of(interval, gradient=torch.arange(K).add(2.0 * dist.get_rank()).cos(), mark=False)


CAUSES = {
    by_torch: "Its gradients are proportional, on rank 1 ",
    unsummed: "Its gradients differ, too. Likeliest is a sum that is missing",
    other_data: "Its gradients differ, too. Likeliest is other data",
    other_weights: "Its gradients are equal now: ranks have begun with other weights",
    other_kernels: "Its gradients differ by rounding: on GPUs chosen kernels may differ in the last bit",
    no_gradient: "No gradients are there to compare: ranks may also have begun with other weights",
    unmarked_shard: "mark it by set_tensor_model_parallel_attributes(parameter, True, dim, 1)",
}


@once(drifting=list(CAUSES))
def test_drift_ends_the_loop_on_all_ranks(ranks2, drifting):
    """In its first step already: a short run may end before the interval does."""
    interval = 100
    first, second = ranks2.run(drifting, interval)
    assert first == second
    steps, (kind, text) = first
    assert steps == 1
    assert kind == "RuntimeError"
    assert "differs between tensor-parallel ranks that hold copies of it. " in text
    assert "It differs on rank 1 from rank 0" in text
    assert CAUSES[drifting] in text
    assert ("mark it by" in text) == (drifting is unmarked_shard)
    assert f"after 1 steps of the optimizer (TPKERNELS_CHECK_REPLICAS={interval}; 0: never)" in text
    by_torchs_clip = "torch's clip_grad_norm_, which takes the norm of one rank's shards: clip by tpkernels."
    assert (by_torchs_clip in text) == (drifting in (by_torch, no_gradient))


def test_our_own_clipping_keeps_copies_equal(ranks4):
    assert ranks4.run(loop, clip_grad_norm_, 1, 4) == [(4, NOTHING)] * 4


def test_it_looks_by_itself_and_can_be_switched_off(ranks2):
    assert replicas.steps_between_checks == 100
    assert ranks2.run(by_torch, 0) == [(7, NOTHING)] * 2


def test_steps_that_are_compared():
    """The first ones, ever more rarely, and each that the interval divides."""
    for interval, compared in ((5, [1, 2, 4, 5, 8, 10, 15, 16, 20]), (0, [])):
        watching, looks = replicas.Watch(), []
        with every(interval), patch.object(watching, "look", looks.append):
            for step in range(1, 21):
                watching.after_step(lambda step=step: step)
        assert looks == compared


def test_a_store_that_ended_is_no_error(monkeypatch):
    """Rank 0, which may hold it, ends when its work is done."""

    def gone(*_: object) -> None:
        raise DistNetworkError("the store is gone")

    with posing(0, 2):
        monkeypatch.setattr(replicas.Watch, "_exchanged", gone)
        with pytest.warns(RuntimeWarning, match="parameters could not be compared: the store is gone"):
            replicas.Watch().look(([0, 1], {}))


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16", "float16", "complex64", "complex128"])
def test_sums_of_bits_see_every_change(kind):
    """Of a bit, of the sign of zero, of two elements' places."""
    tensor = drawn((3, 1100), 1).to(getattr(torch, kind))
    tensor[0, 0] = 0.0
    swapped, negative, bit = tensor.clone(), tensor.clone(), tensor.clone()
    swapped[0, :2] = tensor[0, :2].flip(0)
    negative[0, 0] = -0.0
    bit.view(-1).view(torch.uint8)[-1] ^= 1
    for other in (swapped, bit) if tensor.is_complex() else (swapped, negative, bit):
        assert sums_of_bits([other]) != sums_of_bits([tensor])
    odd = tensor.view(-1)[1:12]  # neither begins nor ends where a word does
    assert sums_of_bits([odd]) == sums_of_bits([odd.clone()])
    assert sums_of_bits([tensor.t().contiguous().t()]) == sums_of_bits([tensor])
    assert sums_of_bits([torch._neg_view(-tensor)]) == sums_of_bits([tensor])


@pytest.mark.parametrize("value", ["often", "-1", "1.5", " 2"])
def test_nonsense_is_refused(value):
    with pytest.raises(ValueError, match=f"CHECK_REPLICAS is '{value}'; expected a number of optimizer"):
        replicas._read(value)


@pytest.mark.parametrize(("value", "steps"), [("7", 7), ("0", 0), ("", 100)])
def test_the_variable_is_read_at_import(value, steps, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CHECK_REPLICAS", value)
    assert runpy.run_path(replicas.__file__)["steps_between_checks"] == steps
