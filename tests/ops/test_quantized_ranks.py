"""Ops in fp8 over ranks: numbers of the definition whatever the way, bytes that travel, mistakes, FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.on_ranks import on_ranks
from tests.ops.cases import ACT
from tests.ops.invariant_cases import whole_of
from tests.ops.parallel_behaviour import block, message_of, mlp, operands_of
from tests.ops.parallel_cases import (
    BOUND,
    Setting,
    accumulated,
    added,
    assert_within,
    equal,
    leaf,
    prepare,
    same,
    shard,
    split,
)
from tests.ops.quantized_oracle import RECIPES, Oracle
from tests.ops.scaled_ranks import apart_from_one_rank, bytes_of
from tests.ops.test_quantized import _Act, _Gated
from tests.ops.test_second_derivatives import WORDS
from tests.ops.transport_cases import under
from tests.patience import patient
from tests.products import combined, once, pairwise
from tests.ranks import RankPool
from tpkernels import Recipe, ops, reuse_quantized_weights
from tpkernels.gate.numerics import relative_error
from tpkernels.kernels.activations import act_grad_ref
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear

ROWWISE, BLOCKWISE = Recipe.rowwise(), Recipe.blockwise()
Excess = dict[str, float]  # each result's error, as a part of what is allowed


def rows_of(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)


def operands(setting: Setting) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """x, two weights, their biases, gradients of both results; the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    k, n = setting.features

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(setting.dtype)

    widths = n, n // 2
    return (
        random(*setting.leading, k),
        [random(width, k) / k**0.5 for width in widths],
        [random(width) for width in widths],
        [random(*setting.leading, width) for width in widths],
    )


def excess(setting: Setting, results: dict[str, tuple[Tensor | None, Tensor]]) -> Excess:
    found = {}
    for name, (ours, exact) in results.items():
        assert ours is not None, name
        dtype = setting.dtype if ours.dtype == torch.float32 else ours.dtype  # of a main_grad, too
        found[name] = relative_error(ours.detach(), exact) / BOUND[dtype]
    return found


def column(setting: Setting, recipe: str) -> Excess:
    prepare(setting)
    ranks = dist.get_world_size()
    oracle, activation = Oracle(RECIPES[recipe]), setting.activation
    x, weights, biases, dys = operands(setting)
    tokens = split(0) if setting.sequence_parallel else same
    ours_x, ours_w = leaf(tokens(x)), [leaf(shard(w, 0)) for w in weights]
    ours_b = [leaf(shard(b, 0)) for b in biases]
    main_grads = [accumulated(setting, w) for w in ours_w]

    def ours(x: Tensor, activation: str | None) -> Sequence[Tensor]:
        options: dict[str, Any] = setting.options | {
            "quantize": RECIPES[recipe],
            "save_gathered": setting.save_gathered,
        }
        return column_linear(
            x, ours_w, ours_b, dist.group.WORLD, activation=activation, main_grad=main_grads, **options
        )

    ys = ours(ours_x, activation)
    torch.autograd.backward(ys, [shard(dy, -1) for dy in dys])
    with torch.no_grad():
        zs = [whole_of((rows_of(z), 1)) for z in ours(ours_x, None)]
    dzs = [
        act_grad_ref(rows_of(dy), z, activation) if activation else rows_of(dy)
        for dy, z in zip(dys, zs, strict=True)
    ]
    pairs = [
        (dz_shard, w_shard)
        for dz, w in zip(dzs, weights, strict=True)
        for dz_shard, w_shard in zip(dz.chunk(ranks, 1), w.chunk(ranks, 0), strict=True)
    ]
    dx = sum(oracle.dgrad(dz, w) for dz, w in pairs)
    assert isinstance(dx, Tensor)
    x_of_dw = rows_of(x)
    if setting.sequence_parallel and ranks > 1:
        x_of_dw = oracle.activations(x_of_dw).to(setting.dtype)
    results: dict[str, tuple[Tensor | None, Tensor]] = {"dx": (ours_x.grad, tokens(dx.view(x.shape)))}
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        y = ACT[activation](oracle.linear(rows_of(x), shard(w, 0), shard(b, 0)))
        dz = shard(dzs[i], 1)
        results[f"y {i}"] = ys[i], y.view(ys[i].shape)
        results[f"dw {i}"] = added(ours_w[i], main_grads[i]), oracle.wgrad(dz, x_of_dw)
        results[f"db {i}"] = ours_b[i].grad, dz.double().sum(0)
    return excess(setting, results)


def row(setting: Setting, recipe: str) -> Excess:
    prepare(setting)
    ranks = dist.get_world_size()
    oracle = Oracle(RECIPES[recipe])
    x, (w, *_), (b, *_), (dy, *_) = operands(setting)
    tokens = split(0) if setting.sequence_parallel else same
    ours_x, ours_w, ours_b = leaf(shard(x, -1)), leaf(shard(w, -1)), leaf(b)
    main_grad = accumulated(setting, ours_w)
    options = setting.options | {"quantize": RECIPES[recipe]}
    ours = row_linear(ours_x, ours_w, ours_b, dist.group.WORLD, main_grad=main_grad, **options)
    ours.backward(tokens(dy))
    terms = [
        oracle.linear(rows_of(x_shard), w_shard)
        for x_shard, w_shard in zip(x.chunk(ranks, -1), w.chunk(ranks, -1), strict=True)
    ]
    y = sum(terms[1:], terms[0]) + b.double()
    full = rows_of(dy)
    dx = oracle.dgrad(full, shard(w, -1))
    if setting.sequence_parallel and ranks > 1:
        full = oracle.gradients(full).to(setting.dtype)
    return excess(
        setting,
        {
            "y": (ours, tokens(y.view(dy.shape))),
            "dx": (ours_x.grad, dx.view(ours_x.shape)),
            "dw": (added(ours_w, main_grad), oracle.wgrad(full, rows_of(shard(x, -1)))),
            "db": (ours_b.grad, full.double().sum(0)),
        },
    )


CASES: dict[str, Callable[..., Excess]] = {"column": column, "row": row}


def run_all(name: str, settings: Sequence[tuple[Setting, str]]) -> list[Excess]:
    return [CASES[name](setting, recipe) for setting, recipe in settings]


@pytest.mark.parametrize("fault", ["doubled bias", "swapped rank", "wrong scale"])
@on_ranks(2)
def test_a_fault_would_be_seen(fault):
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def wrong(x: Tensor, w: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
        if fault == "doubled bias":
            b = b * ranks
        elif fault == "swapped rank":
            w = w.roll(rank, 1)
        else:  # a scale of a rank's own
            x = x * (1 + 0.1 * rank)
        return ops.row_linear(x, w, b, *rest, **options)

    with patch(f"{__name__}.row_linear", wrong):
        assert max(row(Setting(torch.bfloat16, features=(256, 96)), "rowwise").values()) > 5


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@on_ranks(2)
def test_parallel_mlp_has_the_bits_of_its_parts(recipe, activation):
    """Of column_linear and row_linear with h between them; in fp32, as in 16 bits these round h."""
    prepare(Setting(small_pieces=False))
    group = dist.group.WORLD
    gated = activation == "swiglu"

    def whole(*tensors: Tensor, **kwargs: Any) -> Tensor:
        x, up, gate, down, b, c = tensors
        b_up, w_gate = (None, gate) if gated else (b, None)
        kwargs |= {"w_gate_shard": w_gate, "activation": activation}
        return parallel_mlp(x, up, b_up, down, c, group, **kwargs)

    def parts(*tensors: Tensor, **kwargs: Any) -> Tensor:
        x, up, gate, down, b, c = tensors
        if gated:
            u, g = column_linear(x, [up, gate], None, group, **kwargs)
            h = _Gated.apply(g, u, "silu")
        else:
            h = _Act.apply(column_linear(x, up, b, group, **kwargs), activation)
        return row_linear(h, down, c, group, **kwargs)

    x, (up, *_), (b_up, *_), _ = operands(Setting(features=(64, 96)))
    gate, down = up.flip(0), up.t().contiguous()
    weights = [shard(up, 0), shard(gate, 0), shard(down, 1), shard(b_up, 0), x[0].flatten()]
    for tokens_split, overlap in product([True, False], [True, False]):
        found = []
        for function in (whole, parts):
            leaves = [leaf(t) for t in (shard(x, 0) if parallel else x, *weights)]
            options = {"sequence_parallel": tokens_split, "overlap": overlap, "quantize": RECIPES[recipe]}
            y = function(*leaves, **options)
            y.backward(torch.ones_like(y))
            found.append([y.detach(), *(t.grad for t in leaves if t.grad is not None)])
        assert equal(*found), f"{tokens_split=} {overlap=}"


SOME = ["rowwise", "rowwise, wgrad fp8, e5m2", "blockwise", "blockwise, power of two, e5m2"]
FEATURES = (256, 512)  # blocks and shards have no common border: at 2 ranks some, at 4 others


def check(ranks: RankPool, name: str, settings: list[tuple[Setting, str]]) -> None:
    assert_within(ranks.run(run_all, name, settings), settings)


@combined
@pairwise(
    world=["ranks1", "ranks2", "ranks4"],
    name=["column", "row"],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
)
def test_any_number_of_ranks_gives_the_numbers_of_the_definition(ranks, name, dtype, combined):
    settings = [
        Setting(dtype, parallel, overlap, main_grad=main_grad, features=FEATURES)
        for parallel, overlap, main_grad in combined([False, True], [False, True], [False, True])
    ]
    if dtype is torch.float32:  # leading dimensions are any
        size = ranks.world_size
        settings += [
            Setting(leading=leading, features=FEATURES, sequence_parallel=parallel)
            for leading in ((8, 3), (4, 2, 2), (0,), (8, 0), (size,))
            for parallel in (True, False)
        ] + [Setting(leading=(7,), features=FEATURES, sequence_parallel=False)]
    check(ranks, name, [(setting, SOME[i % len(SOME)]) for i, setting in enumerate(settings)])


@once(recipe=list(RECIPES), name=["column", "row"])
def test_each_recipe_over_ranks(ranks2, name, recipe):
    settings = [
        Setting(torch.bfloat16, features=FEATURES, activation="gelu" if name == "column" else None),
        Setting(torch.bfloat16, features=FEATURES, save_gathered=True),
        Setting(torch.bfloat16, features=(200, 72), sequence_parallel=False),
    ]
    check(ranks2, name, [(setting, recipe) for setting in settings])


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@on_ranks()
def test_operands_that_lie_within_ranks_are_those_of_one_rank(recipe):
    """x and rows of the weight in column forward, dy and columns of the weight in row backward; dw exactly.

    Others have scales of shards, unless blocks and shards have common borders: then only what ranks send each
    other is rounded. Figures are in docs/fp8-figures.md.
    """
    found = apart_from_one_rank(RECIPES[recipe])
    assert found["column dw"] == found["row dw"] == 0
    assert found["column y"] < 1e-4  # sums in fp32 in another order
    assert found["row dx"] < 1e-4
    least, most = (0.02, 0.06) if recipe == "rowwise" else (0.001, 0.005)
    assert least < found["row y"] < most
    assert least < found["column dx"] < most


# fp8 rows with their scales, to 16 bits
AT_MOST = {64: 0.532, 256: 0.516, 1024: 0.516, 4096: 0.516}
WIDE = pytest.param("shared", 4096, marks=pytest.mark.sweep)


@pytest.mark.parametrize(("transport", "hidden"), [("c10d", 64), ("shared", 256), ("c10d", 1024), WIDE])
def test_gathers_send_half_the_bytes_and_sums_send_the_same(ranks2, transport, hidden):
    sent_by = partial(ranks2.run, under, transport, "torch", bytes_of, hidden)
    plain = sent_by(None)
    for recipe in (Recipe.rowwise(), Recipe.blockwise()):
        for ours, theirs in zip(sent_by(recipe), plain, strict=True):
            for name, sent in ours.items():
                assert theirs[name] > 0, name
                if "gather" in name:
                    assert sent / theirs[name] <= AT_MOST[hidden], name
                else:
                    assert sent == theirs[name], name


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


OTHERS = {  # of each rank. Rows of both have as many words
    "rowwise-blockwise": (ROWWISE, BLOCKWISE),
    "plain-rowwise": (None, ROWWISE),
    "rowwise-e5m2": (ROWWISE, Recipe.rowwise(gradients="e5m2")),
    "rowwise-power_of_two": (ROWWISE, Recipe.rowwise(power_of_two=True)),
    "wgrad-rowwise": (Recipe.rowwise(wgrad="fp8"), ROWWISE),
}
TOLD_OF_OTHER_CALLS = (
    "expected equal arguments on all ranks",
    "ranks have left the common order of calls",
)


@pytest.mark.parametrize("recipes", OTHERS)
@on_ranks(2)
def test_ranks_with_other_recipes_are_told_of_other_calls_and_in_debug_mode_of_the_recipes(recipes):
    """No rank takes another's words for its own kind, also where they are as many."""
    x, w = torch.randn(4, 1024, requires_grad=True), torch.randn(8, 1024)
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": OTHERS[recipes][dist.get_rank()]}

    def both(group: dist.ProcessGroup) -> None:
        column_linear(x, w, None, group, **options).sum()
        h = torch.randn(8, 8, requires_grad=True)
        row_linear(h, w.t().contiguous(), None, group, **options).sum().backward()

    said = []
    for debug in (True, False):
        group = dist.new_group(timeout=timedelta(seconds=patient(30)))
        with patch.object(parallel, "debug", debug):
            said.append(message_of(lambda: both(group)))  # noqa: B023
    for words in ("ranks disagree", "options: ", "Recipe(scaling='rows'"):
        assert words in said[0]
    assert any(words in said[1] for words in TOLD_OF_OTHER_CALLS), said[1]


@on_ranks(2)
def test_ranks_that_want_other_gradients_are_told_so_in_debug_mode():
    """In the backward of an MLP: of different inputs."""
    group = dist.new_group(timeout=timedelta(seconds=patient(30)))
    x, w, w2 = operands_of(6)
    weights = [leaf(w) if dist.get_rank() == 0 else w, leaf(w2)]
    y = parallel_mlp(x, weights[0], None, weights[1], None, group, quantize=ROWWISE)
    with patch.object(parallel, "debug", True):
        assert "parallel_mlp backward: ranks disagree" in message_of(lambda: y.sum().backward())


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


@pytest.mark.parametrize("reusing", [False, True], ids=["anew", "reused"])
def test_fully_sharded_weights_have_the_losses_of_full_ones(ranks2, reusing):
    """Their gathers rewrite storages and count no version: a weight of the step before would show."""
    full = ranks2.run(losses, False, False)[0]
    assert len(set(full)) == 3
    for found in ranks2.run(losses, True, reusing):
        assert found == pytest.approx(full, rel=1e-5)
