"""What ranks run in tests of copies: gradients made whole, norms that count once, drift that is told."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks import error_of
from tests.layers.behaviour import Block, built, close, tokens
from tests.layers.parity import K, N, cut_of, drawn
from tpkernels import (
    GradientBuckets,
    check_replicas,
    clip_grad_norm_,
    finalize_gradients,
    initialize_model_parallel,
    manual_seed,
    parallel_state,
)
from tpkernels.layers.attributes import Attributes


def whole_parameters() -> dict[str, Tensor]:
    """The parameters of the unsharded `Block`, in float64."""
    torch.manual_seed(7)
    shapes = {"up": (N, K), "down": (K, N), "mlp.up": (N, K), "mlp.gate": (N, K), "mlp.down": (K, N)}
    p = {f"{name}.weight": nn.init.xavier_normal_(torch.empty(shape)) for name, shape in shapes.items()}
    p |= {"norm.weight": torch.ones(K), "up.bias": torch.zeros(N), "down.bias": torch.zeros(K)}
    p["mlp.down.bias"] = torch.zeros(K)
    return {name: value.double().requires_grad_() for name, value in p.items()}


def whole_loss(p: dict[str, Tensor], seed: int) -> Tensor:
    """The unsharded `Block`, in plain torch."""
    x = drawn((8, 3, K), seed, torch.float32).double()
    h = F.gelu(F.linear(F.rms_norm(x, (K,), p["norm.weight"], 1e-5), p["up.weight"], p["up.bias"]))
    x = x + F.linear(h, p["down.weight"], p["down.bias"])
    h = F.silu(F.linear(x, p["mlp.gate.weight"])) * F.linear(x, p["mlp.up.weight"])
    y = x + F.linear(h, p["mlp.down.weight"], p["mlp.down.bias"])
    return y.square().mean()


def whole_after_backward() -> dict[str, Tensor]:
    p = whole_parameters()
    whole_loss(p, 1).backward()
    return p


def backward(model: nn.Module) -> None:
    loss(model, 1).backward()


def loss(model: nn.Module, seed: int) -> Tensor:
    """This rank's part of the whole loss."""
    return model(tokens(seed)).square().mean() / dist.get_world_size()


def _wrong_gradients(block: Block) -> list[str]:
    expected = whole_after_backward()
    return [
        name
        for name, p in block.named_parameters()
        if not close([p.grad.double()], [cut_of(p)(expected[name].grad)], 1e-5)
    ]


def finalized() -> list[list[str]]:
    """Whose gradients are wrong: before, and after; and after buckets did it."""
    block = built()
    backward(block)
    before = _wrong_gradients(block)
    finalize_gradients(block)
    after = _wrong_gradients(block)
    group = parallel_state.get_tensor_model_parallel_group()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets(block, alone, tensor_parallel_group=group)
    for _ in range(2):
        buckets.zero()
        backward(block)
        buckets.finish()
    return [before, after, _wrong_gradients(block)]


def finalized_halves() -> bool:
    """Sums of bfloat16 gradients are taken in fp32; `main_grad` is taken where it is."""
    initialize_model_parallel(dist.get_world_size())
    ranks = dist.get_world_size()
    module = nn.ParameterList([torch.ones(3, dtype=torch.bfloat16), torch.ones(2), torch.ones(2)])
    for parameter in module:
        Attributes(sequence_parallel=True).put_on(parameter)
    module[0].grad = torch.full((3,), 1 + 2**-7, dtype=torch.bfloat16)
    module[1].main_grad = torch.arange(2.0)
    finalize_gradients(module)
    exact = torch.full((3,), ranks * (1 + 2**-7)).bfloat16()
    return (
        torch.equal(module[0].grad, exact)
        and torch.equal(module[1].main_grad, ranks * torch.arange(2.0))
        and module[2].grad is None
    )


def clipped(max_norm: float) -> list[bool]:
    """Norm and clipped gradients against torch's own of the whole model."""
    block = built()
    backward(block)
    finalize_gradients(block)
    whole = whole_after_backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.values(), max_norm)
    found = clip_grad_norm_(block.parameters(), max_norm)
    wrong = [
        name
        for name, p in block.named_parameters()
        if not close([p.grad.double()], [cut_of(p)(whole[name].grad)], 1e-5)
    ]
    again = clip_grad_norm_(list(block.parameters()), max_norm)
    return [
        abs(float(found) / float(expected) - 1) < 1e-5,
        not wrong,
        abs(float(again) / min(max_norm, float(expected)) - 1) < 1e-3,
    ]


def clipped_over_stages() -> list[float]:
    """The norm over 2 tensor ranks x 2 stages: a shard of 3s, a copy of 4s, and one that is shared."""
    initialize_model_parallel(2, 2)
    shard, copy, shared = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    Attributes(True, 0, 1).put_on(shard)
    for parameter, value in ((shard, 3.0), (copy, 4.0), (shared, 100.0)):
        parameter.grad = torch.tensor([value])
    shared.shared = True
    norm = clip_grad_norm_([shard, copy, shared, shard], 1.0)
    return [float(norm), float(shard.grad), float(shared.grad)]


def forgotten() -> list[tuple[str, str]]:
    """What clipping and checking say where gradients were not finalized."""
    block = built()
    backward(block)
    said = [error_of(clip_grad_norm_, block.parameters(), 1.0)]
    with torch.no_grad():
        for parameter in block.parameters():
            parameter -= 0.1 * parameter.grad
    return [*said, error_of(check_replicas, block)]


def refused_on_one_stage() -> tuple[str, str]:
    """Copies of the second stage of two have gradients that differ."""
    initialize_model_parallel(2, 2)
    weight = nn.Parameter(torch.zeros(2))
    stage = parallel_state.get_pipeline_model_parallel_rank()
    weight.grad = torch.ones(2) * (1 + stage * dist.get_rank())
    said = error_of(clip_grad_norm_, [weight], 0.1)
    assert weight.grad[0] == 1 + stage * dist.get_rank(), "nothing is clipped"
    return said


def drift(plant: Callable[[Block], None]) -> tuple[str, str]:
    block = built()
    check_replicas(block)  # nothing to tell yet
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            plant(block)
    return error_of(check_replicas, block)


def one_bit(block: Block) -> None:
    block.down.bias[3] = 1e-45


def minus_zero(block: Block) -> None:
    block.down.bias[3] = -0.0


def two_parameters(block: Block) -> None:
    block.norm.weight *= 1.5
    block.mlp.down.bias += 1


def a_shard(block: Block) -> None:
    block.up.weight.zero_()  # of which ranks hold different parts anyway


def different_models() -> list[tuple[str, str]]:
    block = built()
    if dist.get_rank() == 0:
        block.down.bias = None
        del block.norm.weight
    return [
        error_of(check_replicas, block),
        error_of(finalize_gradients, block),
        error_of(clip_grad_norm_, block.parameters(), 1.0),
    ]


def not_finite() -> list[float]:
    """Norms of gradients that are infinite on all ranks, and NaN in a shard of one."""
    block = built()
    manual_seed(1)
    block.norm.weight.grad = torch.full((K,), torch.inf)
    infinite = clip_grad_norm_(block.parameters(), 1.0)
    block.zero_grad()
    block.up.weight.grad = torch.full_like(block.up.weight, torch.nan if dist.get_rank() == 0 else 1.0)
    return [float(infinite), float(clip_grad_norm_(block.parameters(), 1.0))]


def other_strides() -> list[object]:
    """Copies that lie otherwise in memory on one rank: the norm, whether gradients are right, and drift."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(5)
    values, gradient = torch.randn(7, 5), torch.randn(7, 5)
    if dist.get_rank() == 1:
        values, gradient = values.t().contiguous().t(), gradient.t().contiguous().t()
    module = nn.ParameterDict({"matrix": nn.Parameter(values), "marked": nn.Parameter(values.clone())})
    Attributes(sequence_parallel=True).put_on(module["marked"])
    module["matrix"].grad, module["marked"].grad = gradient, gradient / dist.get_world_size()
    assert module["matrix"].stride() == ((1, 7) if dist.get_rank() == 1 else (5, 1))
    finalize_gradients(module)
    whole = gradient.contiguous()
    right = torch.allclose(module["marked"].grad, whole, rtol=1e-6)
    norm = clip_grad_norm_(module.parameters(), 1.0)
    clipped = whole / (2**0.5 * whole.norm())
    right &= all(torch.allclose(p.grad, clipped, rtol=1e-5) for p in module.parameters())
    check_replicas(module)
    with torch.no_grad():
        module["matrix"][3, 1] += dist.get_rank()
    return [float(norm), right, error_of(check_replicas, module)[0]]


def trained(steps: int) -> list[tuple[float, float]]:
    """The loss of each step beside that of the unsharded model; at the end, copies are equal."""
    block = built()
    whole = whole_parameters()
    ours = torch.optim.AdamW(block.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(whole.values(), lr=0.01)
    losses = []
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        own, expected = loss(block, step), whole_loss(whole, step)
        own.backward()
        expected.backward()
        finalize_gradients(block)
        clip_grad_norm_(block.parameters(), 0.3)
        torch.nn.utils.clip_grad_norm_(whole.values(), 0.3)
        ours.step()
        theirs.step()
        total = own.detach().clone()
        dist.all_reduce(total)
        losses.append((float(total), float(expected)))
    check_replicas(block)
    return losses
