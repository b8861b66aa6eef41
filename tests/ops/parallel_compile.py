"""What ranks run to compare torch.compile with eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops import vocab_behaviour
from tests.ops.parallel_behaviour import operands_of
from tests.ops.parallel_cases import Setting, leaf, prepare, shard
from tpkernels.ops import linear_cross_entropy, vocab_cross_entropy, vocab_embedding
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_linear


def pair(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor, setting: Setting) -> Tensor:
    """Up and down again: column, then row."""
    group = dist.group.WORLD
    options = {"sequence_parallel": setting.sequence_parallel, "overlap": setting.overlap}
    h, other = column_linear(x, [w, w], [b, None], group, activation=setting.activation, **options)
    return row_linear(h * other, w2, b2, group, **options)


def compiled_against_eager(setting: Setting, rows: tuple[int, ...]) -> list[bool]:
    """Whether each number of rows gives the same y and gradients, compiled once for all."""
    prepare(setting)
    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, dynamic=True, backend="aot_eager")
    return [_same(pair, compiled, setting, count) for count in rows]


def _same(eager, compiled, setting: Setting, rows: int) -> bool:  # type: ignore[no-untyped-def]
    torch.manual_seed(rows)
    k, n = setting.features
    w, b = torch.randn(n, k), torch.randn(n)
    x, w2, b2 = torch.randn(rows, k), torch.randn(k, n), torch.randn(k)
    x = shard(x, 0) if setting.sequence_parallel else x
    whole = (x, shard(w, 0), shard(b, 0), shard(w2, 1), b2)
    results = []
    for function in (eager, compiled):
        leaves = [t.clone().requires_grad_() for t in whole]
        y = function(*leaves, setting)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        results.append([y.detach(), *grads])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def groups_in_graphs() -> dict[str, str]:
    """What each operator is told of its group in a traced graph, of which Inductor's cache makes its keys."""
    group = dist.group.WORLD
    told = {}

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in graph.graph.nodes:
            if str(node.target).startswith("tpkernels."):
                names = [argument for argument in node.args if str(argument).startswith(group.group_name)]
                told[str(node.target).split(".")[1]] = str(names[0])
        return graph.forward

    def over_the_group(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        h = column_linear(vocab_embedding(ids, w, group), w, None, group)
        loss = vocab_cross_entropy(h, ids, group=group).sum() + linear_cross_entropy(x, w, ids, group=group)
        gathered = mappings.gather_from_region(row_linear(x, w, None, group), group)
        return loss + gathered.sum()

    torch._dynamo.reset()
    torch.compile(over_the_group, fullgraph=True, backend=note)(
        torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)
    )
    return told


Model = Callable[[Tensor, list[Tensor], Tensor, list[Tensor], bool], Tensor]


def two_operators(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], parallel: bool
) -> Tensor:
    """The gate gets a gradient of the usual kind, beside the others, which do not."""
    group = dist.group.WORLD
    up, gate, down = weights
    h, g = column_linear(
        x,
        [up, gate],
        [bias, None],
        group,
        activation="gelu",
        sequence_parallel=parallel,
        main_grad=[main_grads[0], None],
    )
    return row_linear(h * g, down, None, group, sequence_parallel=parallel, main_grad=main_grads[2])


def one_operator(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], parallel: bool
) -> Tensor:
    up, gate, down = weights
    return bias.sum() + parallel_mlp(
        x,
        up,
        None,
        down,
        None,
        dist.group.WORLD,
        w_gate_shard=gate,
        sequence_parallel=parallel,
        main_grads=main_grads,
    )


def main_grads_under_compile(backend: str, models: list[Model], sequence_parallel: list[bool]) -> list[str]:
    """The ways of calling that add something else to main_grads than eager does, or to other gradients."""
    prepare(Setting())
    wrong = []
    for model, parallel in itertools.product(models, sequence_parallel):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
        for x_needs, up_needs in ((True, True), (False, True), (True, False)):
            expected, ours = (
                _accumulated(function, parallel, x_needs, up_needs) for function in (model, compiled)
            )
            if len(expected) != len(ours) or not all(map(_close, ours, expected)):
                wrong.append(f"{model.__name__}: {parallel=} {x_needs=} {up_needs=}")
    return wrong


def _accumulated(model: Model, parallel: bool, x_needs: bool, up_needs: bool) -> list[Tensor]:
    """main_grads and gradients after three backwards, of which the first two come after two forwards."""
    whole, up, down = operands_of(7)
    weights = [leaf(up), leaf(up.flip(0)), leaf(down)]
    weights[0].requires_grad_(up_needs)
    bias = leaf(up[:, 0].contiguous())
    flat = torch.ones(sum(weight.numel() for weight in weights))  # as in buckets: parts of one tensor
    parts = flat.split([weight.numel() for weight in weights])
    main_grads = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
    xs = [(whole * number).requires_grad_(x_needs) for number in (1, 2, 3)]
    waiting = [model(x, weights, bias, main_grads, parallel) for x in xs[:2]]
    for y in waiting:
        y.square().sum().backward()
    model(xs[2], weights, bias, main_grads, parallel).square().sum().backward()
    return [flat, *(leaf.grad for leaf in (*xs, *weights, bias) if leaf.grad is not None)]


def _close(ours: Tensor, expected: Tensor) -> bool:
    return float((ours - expected).norm()) <= 1e-6 * float(expected.norm())


def main_grads_of_heads_differ_by(sequence_parallel: bool) -> list[float]:
    """How far main_grad and dhidden are from eager ones after two backwards, of fp32 and bfloat16."""
    _, weight, _, target = vocab_behaviour.operands()
    group = dist.group.WORLD
    hidden = torch.randn(8 // (group.size() if sequence_parallel else 1), 3, vocab_behaviour.FEATURES)
    worst = []

    def loss(hidden: Tensor, weight: Tensor, main_grad: Tensor, reduction: str) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            group,
            reduction=reduction,
            sequence_parallel=sequence_parallel,
            main_grad=main_grad,
        ).sum()

    for dtype, reduction in itertools.product((torch.float32, torch.bfloat16), ("mean", "none")):
        torch._dynamo.reset()
        found = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            leaves = [leaf(t.to(dtype)) for t in (hidden, weight)]
            main_grad = torch.ones_like(weight)
            for y in [function(*leaves, main_grad, reduction) for _ in range(2)]:
                y.backward()
            assert leaves[1].grad is None
            found.append([main_grad, leaves[0].grad])
        worst += [float((ours - eager).norm() / eager.norm()) for eager, ours in zip(*found, strict=True)]
    return worst
