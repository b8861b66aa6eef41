"""Layers as citizens of PyTorch: compile, autocast, checkpoints, accumulation, frozen and tied weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.layers.small import Block, K, N, built, cut, cut_of, drawn, joined_world, outcome, tokens
from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import close, equal
from tpkernels import (
    ColumnParallelLinear,
    GradientBuckets,
    ParallelMLP,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    linear_cross_entropy,
    linear_logprobs,
    reduce_from_tensor_model_parallel_region,
)

compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")


@on_ranks(2)
def test_compiled_layers_equal_eager_ones_at_any_number_of_tokens():
    block = built()
    torch._dynamo.reset()
    whole = compiled(block, dynamic=True)
    for x in (cut(0)(drawn((rows, 3, K), rows)) for rows in (8, 16)):
        assert close(outcome(whole, block, x), outcome(block, block, x), 1e-6)


@on_ranks(2)
def test_compiled_layers_that_gather_and_cut_features_equal_eager_ones():
    """And regions of the current state."""
    joined_world()
    pair = nn.ModuleList([ColumnParallelLinear(K, N, activation="gelu"), RowParallelLinear(N, K)])

    def run(x: Tensor) -> Tensor:
        h, _ = pair[0](copy_to_tensor_model_parallel_region(x))
        return reduce_from_tensor_model_parallel_region(pair[1](h)[0])

    torch._dynamo.reset()
    whole = compiled(run, dynamic=True)
    x = drawn((4, K), 1)
    assert equal(outcome(whole, pair, x), outcome(run, pair, x))


@on_ranks(2)
def test_frozen_weights_receive_no_gradients_and_the_others_do():
    block = built(fused=True)
    for layer in (block.up, block.down, block.mlp.up, block.mlp.gate, block.mlp.down):
        layer.weight.requires_grad_(False)
        layer.weight.main_grad = torch.full_like(layer.weight, torch.nan)  # never to be touched
    frozen = outcome(block, block, tokens())
    assert all(p.main_grad.isnan().all() for p in block.parameters() if hasattr(p, "main_grad"))
    reference = Block()
    reference.load_state_dict(block.state_dict())
    full = outcome(reference, reference, tokens())
    trainable = [p.requires_grad for p in block.parameters()]
    full[2:] = [grad for grad, wanted in zip(full[2:], trainable, strict=True) if wanted]
    assert close(frozen, full, 1e-6)


def under_autocast(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block(x)


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool = False) -> Tensor:
    return checkpoint(block, x, use_reentrant=reentrant)


Way = tuple[Callable[[Block], Callable[[Tensor], Tensor]], torch.dtype, float]
WAYS: dict[str, Way] = {
    "plain": (lambda block: block, torch.float32, 1e-6),
    "narrow": (lambda block: block, torch.bfloat16, 0.01),
    "autocast": (lambda block: partial(under_autocast, block), torch.float32, 0.05),
    "checkpoint": (lambda block: partial(checkpointed, block), torch.float32, 1e-6),
    "reentrant": (lambda block: partial(checkpointed, block, reentrant=True), torch.float32, 1e-6),
}
COMPILED: dict[str, Way] = {
    "compiled checkpoint": (lambda block: compiled(partial(checkpointed, block)), torch.float32, 1e-6),
    "checkpoint of compiled": (lambda block: partial(checkpointed, compiled(block)), torch.float32, 1e-6),
    "compiled": (compiled, torch.float32, 1e-6),
    "compiled, narrow": (compiled, torch.bfloat16, 0.01),
    "reentrant of compiled": (
        lambda block: partial(checkpointed, compiled(block), reentrant=True),
        torch.float32,
        1e-6,
    ),
}


@pytest.mark.parametrize(
    "ways",
    [[*WAYS, "compiled checkpoint"], pytest.param([*COMPILED], marks=pytest.mark.sweep)],
    ids=["most", "compiled"],
)
@on_ranks(2)
def test_fusion_follows_megatrons_protocol(ways):
    """Of main_grad and its flags after a backward."""
    block = built(fused=True)
    reference = Block()
    reference.load_state_dict(block.state_dict())
    parameters = [name for name, _ in reference.named_parameters()]
    expected = dict(zip(parameters, outcome(reference, reference, tokens())[2:], strict=True))
    weights = {name: p for name, p in block.named_parameters() if p.ndim == 2}
    torch._dynamo.reset()
    for way in ways:
        made, dtype, tolerance = (WAYS | COMPILED)[way]
        block.zero_grad()
        for name, weight in weights.items():
            weight.main_grad = torch.zeros_like(weight, dtype=dtype)
            if "mlp" in name:
                weight.grad_added_to_main_grad = False
                weight.zero_out_wgrad = "gate" in name
        made(block)(tokens().requires_grad_()).square().sum().backward()
        for name, weight in weights.items():
            assert close([weight.main_grad.float()], [expected[name]], tolerance), f"{way}: {name}"
            if "mlp" in name:  # a gradient for form's sake
                assert weight.grad_added_to_main_grad is True, f"{way}: {name}"
                assert weight.grad.shape == weight.shape, f"{way}: {name}"
                assert not (weight.zero_out_wgrad and weight.grad.any()), f"{way}: {name}"
            else:
                assert weight.grad is None, f"{way}: {name}"


@on_ranks(2)
def test_gradients_of_inputs_alone_leave_main_grads_as_they_are():
    """As a penalty on gradients takes them, or a pipeline that computes those of weights later."""
    block, table = built(fused=True), nn.Parameter(drawn((N, K), 3 + dist.get_rank()))
    weights = {name: p for name, p in block.named_parameters() if p.ndim == 2} | {"table": table}
    for name, weight in weights.items():
        weight.main_grad = torch.zeros_like(weight)
        if "mlp" in name:
            weight.grad_added_to_main_grad = False

    def heads(hidden: Tensor) -> Tensor:
        ids = torch.arange(len(hidden)) % N
        mean = linear_cross_entropy(hidden, table, ids, gradient_accumulation_fusion=True)
        each, _ = linear_logprobs(hidden, table, ids, gradient_accumulation_fusion=True)
        return mean + each.sum()

    x, hidden = tokens().requires_grad_(), drawn((6, K), 2).requires_grad_()
    for loss, given in ((block(x).square().sum(), x), (heads(hidden), hidden)):
        torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward(inputs=[given], retain_graph=True)
        assert [name for name, weight in weights.items() if weight.main_grad.any()] == []
        assert not any(getattr(weight, "grad_added_to_main_grad", False) for weight in weights.values())
    loss = block(x).square().sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert equal([x.grad - expected[0]], [expected[0]])  # the second time, and of all
    marked = next(weight for name, weight in weights.items() if "mlp" in name)
    with pytest.raises(RuntimeError, match=r"got torch\.autograd\.grad of it, which would return a dummy"):
        torch.autograd.grad(block(x).sum(), marked)
    before = marked.main_grad.clone()
    with pytest.raises(RuntimeError, match="which would return a dummy"):
        torch.autograd.grad(block(x).sum(), [x, marked])
    assert torch.equal(marked.main_grad, before), "refused before anything is added"


COMPILED_BUCKETS = pytest.param(True, marks=pytest.mark.sweep)  # main_grads of compiled layers: see above


@pytest.mark.parametrize("is_compiled", [False, COMPILED_BUCKETS])
@on_ranks(2)
def test_buckets_of_fused_layers_hold_what_plain_layers_have_in_grad(is_compiled):
    block = built(fused=True)
    reference = copy.deepcopy(block)
    for module in reference.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.gradient_accumulation_fusion = False
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets(block, alone, main_grad=True)
    torch._dynamo.reset()
    run = compiled(block) if is_compiled else block
    for _ in range(3):
        buckets.zero()
        run(tokens()).square().sum().backward()
        assert not buckets.finish()
    expected = outcome(reference, reference, tokens())[2:]
    assert close([p.main_grad for p in block.parameters()], expected, 1e-6)


@on_ranks(2)
def test_tied_weights_keep_both_gradients():
    """A table that is looked up plainly and multiplied by a fused head, in buckets."""
    joined_world()
    options = {"bias": False, "skip_weight_param_allocation": True}
    torch.manual_seed(dist.get_rank())
    table = nn.Parameter(torch.randn(N // dist.get_world_size(), K))
    rows = torch.tensor([0, 3, 3])

    def backward(fused: bool) -> None:
        layer = ColumnParallelLinear(K, N, gradient_accumulation_fusion=fused, **options)
        layer(nn.functional.embedding(rows, table), table)[0].square().sum().backward()

    backward(fused=False)
    expected = table.grad
    table.grad = None
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    buckets = GradientBuckets([("table", table)], alone, main_grad=True)
    for _ in range(2):
        buckets.zero()
        backward(fused=True)
        buckets.finish()
    assert close([table.main_grad], [expected], 1e-6)
    assert table.grad is None


@on_ranks(4)
def test_seed_gives_the_same_model_in_a_row_of_layers():
    """Of what rank 0 would draw alone, in their order."""
    joined_world()
    torch.manual_seed(3)
    layers = {
        "mlp": ParallelMLP(K, N, activation="swiglu", output_layer_init_method=nn.init.normal_),
        "another": ParallelMLP(K, N),
        "column": ColumnParallelLinear(K, N, stride=3, dtype=torch.bfloat16),
        "row": RowParallelLinear(N, K, stride=2),
    }
    torch.manual_seed(3)
    for name, weight in nn.ModuleDict(layers).named_parameters():
        if not name.endswith("bias"):
            draw = nn.init.normal_ if name == "mlp.down.weight" else nn.init.xavier_normal_
            full = draw(torch.empty((K, N) if "down" in name or "row" in name else (N, K)))
            assert torch.equal(weight, cut_of(weight)(full.to(weight.dtype))), name
