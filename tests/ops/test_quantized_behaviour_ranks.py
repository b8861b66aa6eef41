"""Ops in fp8 over ranks, beside what plain ones do too: mistakes, main_grad, FSDP2, ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import block, message_of, mlp, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, equal, leaf, prepare
from tests.ops.test_parting import hasty
from tests.ops.test_second_derivatives import WORDS
from tests.patience import patient
from tpkernels import Recipe, ops, reuse_quantized_weights
from tpkernels.ops.main_grad import accumulating
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear

ROWWISE, BLOCKWISE = Recipe.rowwise(), Recipe.blockwise()


@pytest.mark.parametrize("world", ["ranks1", "ranks2"])
@on_ranks()
def test_mistakes_are_errors_on_every_rank_before_anything_travels():
    group = dist.group.WORLD
    x, w, w2 = operands_of(5)
    wide = [t.double() for t in (x, w, w2)]

    def second(function: Callable[..., Tensor], **options: Any) -> None:
        leaves = [leaf(t) for t in operands_of(5)]
        y = function(*leaves, quantize=ROWWISE, **options)
        (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
        torch.autograd.grad(dx.square().sum(), leaves, allow_unused=True)

    def forward_mode() -> None:
        with torch.autograd.forward_ad.dual_level():
            column_linear(torch.autograd.forward_ad.make_dual(x, x), w, None, group, quantize=ROWWISE)

    recipe = "expected quantize=tpkernels.Recipe.rowwise()"
    dtype = "expected x in bfloat16, float16 or float32 with quantize"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: block(x, w, w2, quantize="fp8"), f"TypeError: column_linear: {recipe}"),
        (lambda: mlp(x, w, w2, quantize="rowwise"), f"TypeError: parallel_mlp: {recipe}"),
        (lambda: row_linear(x @ w.t(), w2, None, group, quantize=True), f"TypeError: row_linear: {recipe}"),
        (lambda: block(*wide, quantize=ROWWISE), f"TypeError: column_linear: {dtype}"),
        (lambda: mlp(*wide, quantize=ROWWISE), f"TypeError: parallel_mlp: {dtype}"),
        (lambda: second(block), WORDS),
        (lambda: second(block, sequence_parallel=True), WORDS),
        (lambda: second(mlp), WORDS),
        (forward_mode, "NotImplementedError: column_linear: expected no forward-mode derivative"),
        (lambda: block(x, w, w2, quantize=ROWWISE, sequence_parallel=True), "no error"),
    ]
    for call, words in calls:
        assert words in message_of(call)


def said_of_other_recipes(debug: bool, names: Sequence[str]) -> str:
    """By this rank, whose recipe has another name than that of its peer. Rows of both have as many words."""
    group = dist.new_group(timeout=timedelta(seconds=patient(4)))
    recipes = {
        "rowwise": ROWWISE,
        "blockwise": BLOCKWISE,
        "e5m2": Recipe.rowwise(gradients="e5m2"),
        "power_of_two": Recipe.rowwise(power_of_two=True),
        "wgrad": Recipe.rowwise(wgrad="fp8"),
    }
    x, w = torch.randn(4, 1024, requires_grad=True), torch.randn(8, 1024)
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": recipes.get(names[dist.get_rank()])}

    def both() -> None:
        column_linear(x, w, None, group, **options).sum()
        h = torch.randn(8, 8, requires_grad=True)
        row_linear(h, w.t().contiguous(), None, group, **options).sum().backward()

    with patch.object(parallel, "debug", debug), hasty():
        return message_of(both)


@on_ranks(2)
def test_ranks_that_want_other_gradients_are_told_so_in_debug_mode():
    """In the backward of an MLP: of different inputs."""
    group = dist.new_group(timeout=timedelta(seconds=patient(10)))
    x, w, w2 = operands_of(6)
    weights = [leaf(w) if dist.get_rank() == 0 else w, leaf(w2)]
    y = parallel_mlp(x, weights[0], None, weights[1], None, group, quantize=ROWWISE)
    with patch.object(parallel, "debug", True):
        assert "parallel_mlp backward: ranks disagree" in message_of(lambda: y.sum().backward())


@on_ranks(1)
def test_one_rank_has_the_numbers_of_the_local_ops():
    x, w, w2 = operands_of(7)

    def local(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        h = ops.linear(x, w, None, "gelu", quantize=ROWWISE)
        return ops.linear(h, w2, None, quantize=ROWWISE)

    ours = with_gradients(block, [x, w, w2], sequence_parallel=True, quantize=ROWWISE)
    assert equal(ours, with_gradients(local, [x, w, w2]))


@on_ranks(2)
def test_marked_weights_take_main_grads():
    """`grad_added_to_main_grad` is set, and main_grad has what `grad` would have got."""
    prepare(Setting())
    for recipe in (ROWWISE, Recipe.rowwise(wgrad="fp8"), BLOCKWISE):
        x, w, _ = (t.bfloat16() for t in operands_of(8))
        plain, marked = leaf(w), leaf(w)
        marked.main_grad = torch.zeros_like(w, dtype=torch.float32)  # type: ignore[attr-defined]
        marked.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        options: dict[str, Any] = {"sequence_parallel": True, "quantize": recipe}
        column_linear(x, plain, None, dist.group.WORLD, **options).sum().backward()
        for _ in range(2):
            weight, into = accumulating(marked, "test")
            column_linear(x, weight, None, dist.group.WORLD, main_grad=into, **options).sum().backward()
        assert marked.grad_added_to_main_grad, recipe  # type: ignore[attr-defined]
        twice = marked.main_grad.bfloat16() / 2  # type: ignore[attr-defined]
        torch.testing.assert_close(twice, plain.grad, rtol=8e-3, atol=0)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = ops.linear(x, self.up.weight, self.up.bias, "gelu", quantize=ROWWISE)
        return ops.linear(h, self.down.weight, self.down.bias, quantize=ROWWISE)


def losses(wrapped: bool, reusing: bool) -> list[float]:
    """Of three steps of two microbatches each; wrapped: parameters and rows of a microbatch are sharded."""
    torch.manual_seed(0)
    model, batches = TwoLayers(), torch.randn(3, 2, 4, 64)
    if wrapped:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches:
        with reuse_quantized_weights() if reusing else nullcontext():
            for rows in batch:
                own = rows.chunk(dist.get_world_size())[dist.get_rank()] if wrapped else rows
                loss = model(own).square().mean() / len(batch)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if wrapped:
            dist.all_reduce(total, dist.ReduceOp.SUM)
            total /= dist.get_world_size()
        found.append(float(total))
    return found


PAIRS = [("rowwise", "blockwise"), ("plain", "rowwise"), ("rowwise", "e5m2")]


@pytest.mark.parametrize("recipes", PAIRS, ids="-".join)
@on_ranks(2)
def test_ranks_with_other_recipes_are_told_so_in_debug_mode(recipes):
    message = said_of_other_recipes(True, recipes)
    for words in ("ranks disagree", "options: ", "Recipe(scaling='rows'"):
        assert words in message


@pytest.mark.parametrize("recipes", [*PAIRS, ("rowwise", "power_of_two"), ("wgrad", "rowwise")], ids="-".join)
@on_ranks(2)
def test_ranks_with_other_recipes_are_told_of_other_calls_without_it(recipes):
    """No rank takes another's words for its own kind, also where they are as many."""
    told = (
        "it sent rows of another call",
        "expected equal arguments on all ranks",
        "ranks have left the common order of calls",
    )
    message = said_of_other_recipes(False, recipes)
    assert any(words in message for words in told), message


@pytest.mark.parametrize("reusing", [False, True], ids=["anew", "reused"])
def test_fully_sharded_weights_have_the_losses_of_full_ones(ranks2, reusing):
    """Their gathers rewrite storages and count no version: a weight of the step before would show."""
    full = ranks2.run(losses, False, False)[0]
    assert len(set(full)) == 3
    for found in ranks2.run(losses, True, reusing):
        assert found == pytest.approx(full, rel=1e-5)
