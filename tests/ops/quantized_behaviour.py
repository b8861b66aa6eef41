"""What ranks run in tests of how ops in fp8 behave, beside the numbers that they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tests.ops import parallel_citizens
from tests.ops.parallel_behaviour import block, message_of, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, leaf, prepare
from tests.ops.parting_cases import hasty
from tests.ops.second_cases import WORDS
from tpkernels import Recipe, ops, reuse_quantized_weights
from tpkernels.dispatch.operators import Operator
from tpkernels.ops.quantized.column_linear import column_forward, column_gradients
from tpkernels.ops.quantized.mlp import mlp_forward, mlp_gradients
from tpkernels.ops.quantized.row_linear import row_forward, row_gradients
from tpkernels.ops.quantized.span import Span
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear

ROWWISE, BLOCKWISE = Recipe.rowwise(), Recipe.blockwise()


def mlp(x: Tensor, w: Tensor, w2: Tensor, **options: Any) -> Tensor:
    return parallel_mlp(x, w, w[:, 0], w2, w2[:, 0], dist.group.WORLD, **options)


def checkpointed_unlike_plain(reentrant: bool) -> list[str]:
    prepare(Setting())
    wrong = []
    for function, recipe in product((block, mlp), (ROWWISE, BLOCKWISE)):
        call = partial(function, sequence_parallel=True, quantize=recipe)
        plain = with_gradients(call, operands_of(3))
        leaves = [leaf(t) for t in operands_of(3)]
        y = checkpoint(call, *leaves, use_reentrant=reentrant)
        y.square().sum().backward()
        again = [y.detach(), *(t.grad for t in leaves)]
        if not all(a.equal(b) for a, b in zip(plain, again, strict=True)):
            wrong.append(f"{function.__name__}, {recipe}")
    return wrong


def unlike_with_grad(recipe: Recipe) -> list[str]:
    """Which results without gradients have other bits than with them."""
    prepare(Setting())
    wrong = []
    for function, parallel_ in product((block, mlp), (True, False)):
        call = partial(function, sequence_parallel=parallel_, quantize=recipe)
        expected = with_gradients(call, operands_of(4))[0]
        with torch.no_grad():
            found = call(*operands_of(4))
        with torch.inference_mode():
            inferred = call(*operands_of(4))
        if not (found.equal(expected) and inferred.equal(expected)):
            wrong.append(f"{function.__name__}, {parallel_=}")
    return wrong


def operators_pass_opcheck(sequence_parallel: bool) -> list[str]:
    group, ranks = dist.group.WORLD, dist.get_world_size()
    span = Span(group, sequence_parallel, True, Recipe.rowwise(power_of_two=True, wgrad="fp8"))
    x, w, b = torch.randn(4, 8), torch.randn(12, 8), torch.randn(12)
    full = 4 * (ranks if sequence_parallel else 1)
    h, w2, b2, dy = torch.randn(full, 12), torch.randn(8, 12), torch.randn(8), torch.randn(4, 8)
    kept = span.activations(x).words if span.token_shards > 1 else x
    z, dh = torch.randn(full, 12), torch.randn(full, 12)
    needs, all_ = [True, True, False], [True] * 3
    calls: dict[str, tuple[Operator[..., Any], tuple[Any, ...]]] = {
        "column": (column_forward, (x, [w, w], [None, b], span, "gelu", sequence_parallel, True)),
        "column backward": (
            column_gradients, (needs, [dh], kept, [w], [z], [None], 8, span, "gelu", False)
        ),
        "frozen column backward": (
            column_gradients, ([True, False, True], [dh], None, [w], [], [None], 8, span, "none", False)
        ),
        "column backward of dw": (
            column_gradients, ([False, True, True], [dh], kept, [None], [], [w], 8, span, "none", False)
        ),
        "row": (row_forward, (h, w2, b2, span)),
        "row backward": (row_gradients, (all_, dy, h, w2, [w2], span)),
        "mlp": (mlp_forward, (x, b, b2, [w, w2], span, "gelu", None, True)),
        "gated mlp": (mlp_forward, (x, None, None, [w, w, w2], span, "none", "swiglu", False)),
        "mlp backward": (
            mlp_gradients, ([True] * 5, dy, kept, [w, w2], [z], [None, w2], 8, span, "gelu", None)
        ),
    }  # fmt: skip
    problems = []
    for case, (operator, arguments) in calls.items():
        try:
            opcheck(operator.overload, operator.packed(*arguments))
        except Exception as error:  # whatever it says is the answer
            problems.append(f"{case}: {error}")
    return problems


def unlike_compiled(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Of functions of `parallel_citizens`: y, gradients, bytes saved."""
    return [
        f"{name} {options}: {wrong}"
        for name, options in cases
        for wrong in parallel_citizens.unlike_compiled(getattr(parallel_citizens, name), **options)
    ]


def two_operators(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], parallel_: bool
) -> Tensor:
    group = dist.group.WORLD
    options: dict[str, Any] = {"sequence_parallel": parallel_, "quantize": Recipe.rowwise(wgrad="fp8")}
    up, gate, down = weights
    h, g = column_linear(x, [up, gate], [bias, None], group, main_grad=[main_grads[0], None], **options)
    return row_linear(h * g, down, None, group, main_grad=main_grads[2], **options)


def one_operator(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], parallel_: bool
) -> Tensor:
    up, gate, down = weights
    return bias.sum() + parallel_mlp(
        *(x, up, None, down, None, dist.group.WORLD),
        w_gate_shard=gate,
        sequence_parallel=parallel_,
        main_grads=main_grads,
        quantize=BLOCKWISE,
    )


def refusals() -> dict[str, str]:
    """What each mistake is answered with, by every rank; and whether the group is of use afterwards."""
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

    calls: dict[str, Callable[[], object]] = {
        "a word": lambda: block(x, w, w2, quantize="fp8"),
        "a word, mlp": lambda: mlp(x, w, w2, quantize="rowwise"),
        "True": lambda: row_linear(x @ w.t(), w2, None, group, quantize=True),  # type: ignore[arg-type]
        "float64": lambda: block(*wide, quantize=ROWWISE),
        "float64, mlp": lambda: mlp(*wide, quantize=ROWWISE),
        "second derivative": lambda: second(block),
        "second derivative, tokens split": lambda: second(block, sequence_parallel=True),
        "second derivative, mlp": lambda: second(mlp),
        "forward mode": forward_mode,
    }
    found = {name: message_of(call) for name, call in calls.items()}
    found["afterwards"] = message_of(lambda: block(x, w, w2, quantize=ROWWISE, sequence_parallel=True))
    return found


REFUSED = {
    "a word": "TypeError: column_linear: expected quantize=tpkernels.Recipe.rowwise()",
    "a word, mlp": "TypeError: parallel_mlp: expected quantize=tpkernels.Recipe.rowwise()",
    "True": "TypeError: row_linear: expected quantize=tpkernels.Recipe.rowwise()",
    "float64": "TypeError: column_linear: expected x in bfloat16, float16 or float32 with quantize",
    "float64, mlp": "TypeError: parallel_mlp: expected x in bfloat16, float16 or float32 with quantize",
    "second derivative": WORDS,
    "second derivative, tokens split": WORDS,
    "second derivative, mlp": WORDS,
    "forward mode": "NotImplementedError: column_linear: expected no forward-mode derivative",
    "afterwards": "no error",
}


def other_recipes(debug: bool, of_rank: Sequence[str]) -> str:
    """What ranks say that have different recipes. Rows of both have as many words."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    recipes = {
        "plain": None,
        "rowwise": ROWWISE,
        "blockwise": BLOCKWISE,
        "e5m2": Recipe.rowwise(gradients="e5m2"),
    }
    recipe = recipes[of_rank[dist.get_rank()]]
    x, w = torch.randn(4, 1024, requires_grad=True), torch.randn(8, 1024)
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": recipe}

    def both() -> None:
        column_linear(x, w, None, group, **options).sum()
        h = torch.randn(8, 8, requires_grad=True)
        row_linear(h, w.t().contiguous(), None, group, **options).sum().backward()

    parallel.debug = debug
    try:
        with hasty():
            return message_of(both)
    finally:
        parallel.debug = False


def other_gradients_in_debug() -> str:
    """What ranks say in the backward of an MLP, if they want gradients of different inputs."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    x, w, w2 = operands_of(6)
    weights = [leaf(w) if dist.get_rank() == 0 else w, leaf(w2)]
    y = parallel_mlp(x, weights[0], None, weights[1], None, group, quantize=ROWWISE)
    parallel.debug = True
    try:
        return message_of(lambda: y.sum().backward())
    finally:
        parallel.debug = False


def one_rank_touches_nobody() -> list[bool]:
    """With a group of one: no transfer, and the numbers of the local ops."""
    x, w, w2 = operands_of(7)
    options: dict[str, Any] = {"sequence_parallel": True, "quantize": ROWWISE}

    def local(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        h = ops.linear(x, w, None, "gelu", quantize=ROWWISE)
        return ops.linear(h, w2, None, quantize=ROWWISE)

    ours, theirs = with_gradients(block, [x, w, w2], **options), with_gradients(local, [x, w, w2])
    return [a.equal(b) for a, b in zip(ours, theirs, strict=True)]


def marked_weights_take_main_grads() -> list[str]:
    """`grad_added_to_main_grad` is set, and main_grad has what `grad` would have got."""
    from tpkernels.ops.main_grad import accumulating

    prepare(Setting())
    wrong = []
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
        if not marked.grad_added_to_main_grad:  # type: ignore[attr-defined]
            wrong.append(f"{recipe}: not marked")
        twice = marked.main_grad.bfloat16() / 2  # type: ignore[attr-defined]
        if not torch.allclose(twice, plain.grad, rtol=8e-3, atol=0):
            wrong.append(f"{recipe}: another gradient")
    return wrong


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
