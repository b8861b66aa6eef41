"""Ops over a group as citizens of PyTorch, in fp8 too: opcheck, compile, autocast, main_grad."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import block, mlp, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, close, leaf, prepare, shard
from tests.products import once
from tpkernels import Recipe
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.ops import linear_cross_entropy, vocab_cross_entropy, vocab_embedding
from tpkernels.ops.matmul import PLAIN, Plain
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.column_linear import column_forward, column_gradients, column_linear
from tpkernels.ops.tensor_parallel.parallel import SplitOperator, name_of, split_of, strategy_of
from tpkernels.ops.tensor_parallel.parallel_mlp import mlp_forward, mlp_gradients, parallel_mlp
from tpkernels.ops.tensor_parallel.residual_norm import NOTHING
from tpkernels.ops.tensor_parallel.row_linear import row_forward, row_gradients, row_linear

WGRAD_FP8, BLOCKWISE = Recipe.rowwise(wgrad="fp8"), Recipe.blockwise()
OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
Calls = dict[str, tuple[SplitOperator, tuple[Any, ...]]]


def pass_opcheck(calls: Calls, tp: TensorParallel, matmul: Plain) -> None:
    """The first call of each operator is compiled, too: others are in `test_compiled_ops_...`."""
    compiled = set()
    split = name_of(tp.group), tp.sequence_parallel, tp.overlap, matmul.segments, matmul.recipe
    for operator, arguments in calls.values():
        checks = OPCHECKS[:2] if operator in compiled else OPCHECKS
        opcheck(operator._overload, (*arguments, *split), test_utils=checks)
        compiled.add(operator)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_operators_in_fp8_pass_opcheck(sequence_parallel):
    recipe = Recipe.rowwise(power_of_two=True, wgrad="fp8")
    x, w, b = torch.randn(4, 8), torch.randn(12, 8), torch.randn(12)
    tp = split_of("test", dist.group.WORLD, sequence_parallel)
    fp8, full, f32 = strategy_of("test", tp, recipe, x), 4 * tp.token_shards, torch.float32
    h, w2, b2, dy = torch.randn(full, 12), torch.randn(8, 12), torch.randn(8), torch.randn(4, 8)
    rows = fp8.pack(x)
    kept, packed_h = rows if sequence_parallel else x, fp8.pack(h)
    z, dh = torch.randn(full, 12), torch.randn(full, 12)
    needs, all_, wide = [True, True, False], [True] * 3, [True]
    calls: Calls = {
        "column": (column_forward, (rows, [w, w], [None, b], "gelu", True, sequence_parallel, f32)),
        "column backward": (column_gradients, ([dh], kept, [w], [z], needs, [False], 8, "gelu", False)),
        "frozen column backward": (
            column_gradients,
            ([dh], None, [w], [], [True, False, True], [False], 8, "none", False),
        ),
        "column backward of dw": (
            column_gradients,
            ([dh], kept, [None], [], [False, True, True], wide, 8, "none", False),
        ),
        "row": (row_forward, (packed_h, w2, b2, f32, *NOTHING)),
        "row backward": (row_gradients, (dy, h, w2, all_, wide)),
        "mlp": (mlp_forward, (rows, b, b2, [w, w2], "gelu", True, f32, *NOTHING)),
        "gated mlp": (mlp_forward, (rows, None, None, [w, w, w2], "swiglu", False, f32, *NOTHING)),
        "mlp backward": (mlp_gradients, (dy, kept, [w], w2, [z], [True] * 5, [False, True], 8, "gelu")),
    }
    pass_opcheck(calls, tp, fp8)


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "names"),
    [
        ("ranks1", False, ["columns", "column of x", "row", "gated mlp"]),
        ("ranks1", True, ["columns", "gated mlp backward"]),
        ("ranks2", True, ["column", "column backward", "row", "row backward", "mlp", "mlp backward of dw"]),
        (
            "ranks2",
            True,
            ["columns", "wide column backward", "mlp backward", "gated mlp backward", "wide row backward"],
        ),
    ],
)
@on_ranks()
def test_operators_pass_opcheck(sequence_parallel, names):
    """In 32 and 16 bits, forward and backward."""
    tp, f32 = split_of("test", dist.group.WORLD, sequence_parallel, sequence_parallel), torch.float32
    x, w, b = torch.randn(4, 8), torch.randn(12, 8), torch.randn(12)
    h, w2, b2 = torch.randn(4 * tp.token_shards, 12), torch.randn(8, 12), torch.randn(8)
    z, dh, dy = torch.randn_like(h), torch.randn_like(h), torch.randn_like(x)
    short_x, short_w, short_h, short_w2 = (t.bfloat16() for t in (x, w, h, w2))
    short_z, short_dh, short_dy = (t.bfloat16() for t in (z, dh, dy))
    part, of_mlp, keeps = [True, True, False], [True, True, False, False, True], tp.token_shards > 1
    calls: Calls = {
        "column": (column_forward, (x, [w], [b], "gelu", True, False, f32)),
        "columns": (column_forward, (x, [w, w], [None, b], "none", True, keeps, f32)),
        "column of x": (column_forward, (x, [w], [None], "none", False, False, f32)),
        "column backward": (column_gradients, ([dh], x, [w], [z], part, [False], 8, "gelu", False)),
        "wide column backward": (
            column_gradients,
            ([short_dh], short_x, [short_w], [short_z], [True] * 3, [True], 8, "gelu", False),
        ),
        "row": (row_forward, (h, w2, b2, f32, *NOTHING)),
        "row backward": (row_gradients, (dy, h, w2, [True] * 3, [False])),
        "wide row backward": (row_gradients, (short_dy, short_h, short_w2, part, [True])),
        "mlp": (mlp_forward, (x, b, b2, [w, w2], "gelu", True, f32, *NOTHING)),
        "gated mlp": (mlp_forward, (x, None, b2, [w, w, w2], "swiglu", False, f32, *NOTHING)),
        "mlp backward of dw": (
            mlp_gradients,
            (dy, x, [None], w2, [z], [False, True, False, True, True], [False, True], 8, "gelu"),
        ),
        "mlp backward": (mlp_gradients, (dy, x, [w], w2, [z], of_mlp, [False, True], 8, "gelu")),
        "gated mlp backward": (
            mlp_gradients,
            (dy, x, [w, w], w2, [z, h], [True, False, *[True] * 4], [False] * 3, 8, "swiglu"),
        ),
    }
    pass_opcheck({name: calls[name] for name in names}, tp, PLAIN)


def columns(x: Tensor, w: Tensor, w2: Tensor, **options: Any) -> Tensor:
    """Two weights that share x."""
    y, other = column_linear(x, [w, w2.T.contiguous()], [None, w[:, 0]], dist.group.WORLD, **options)
    return y * other


def row(x: Tensor, w: Tensor, w2: Tensor, **options: Any) -> Tensor:
    return row_linear(x @ w.T, w2, w2[:, 0], dist.group.WORLD, **options)


def unlike_compiled(function: Callable[..., Tensor], operands: Sequence[Sequence[Tensor]]) -> list[str]:
    """Which of y and gradients are others under torch.compile than eagerly, and whether more bytes are saved.

    A graph does not save what only tells second derivatives, as x_shard beside a gathered x.

    operands: of calls that one graph serves; their `requires_grad` counts
    """
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=len(operands) > 1 or None, backend="aot_eager")
    wrong = []
    for given in operands:
        found = []
        for run in (function, compiled):
            leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
            saved: dict[int, int] = {}

            def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                y = run(*leaves)
            if y.requires_grad:
                y.backward(torch.ones_like(y))
            results = {f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
            found.append(results | {"y": y.detach(), "saved bytes": torch.tensor(sum(saved.values()))})
        expected, ours = found
        wrong += [
            f"{name} of {tuple(given[0].shape)}: {ours.get(name)}, not {truth}"
            for name, truth in expected.items()
            if name not in ours
            or not (ours[name] <= truth if name == "saved bytes" else ours[name].equal(truth))
        ]
    return wrong


def model_unlike_compiled(model: Callable[..., Tensor], **options: Any) -> list[str]:
    """Of 8 and 6 tokens a rank."""
    prepare(Setting())
    x, *weights = (leaf(t) for t in operands_of(1))
    return unlike_compiled(partial(model, **options), [[leaf(x.detach()[:n]), *weights] for n in (8, 6)])


COMPILED: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "columns": (columns, {}),
    "columns gelu": (columns, {"activation": "gelu"}),
    "columns that save the gathered x": (columns, {"activation": "silu", "save_gathered": True}),
    "row": (row, {}),
    "mlp": (mlp, {"gated": False}),
    "gated mlp": (mlp, {"gated": True}),
    "columns in fp8": (columns, {"activation": "gelu", "save_gathered": True, "quantize": WGRAD_FP8}),
    "row in fp8": (row, {"quantize": WGRAD_FP8}),
    "mlp in fp8": (mlp, {"gated": False, "quantize": WGRAD_FP8}),
    "gated mlp in fp8": (mlp, {"gated": True, "quantize": BLOCKWISE}),
}


@once(name=list(COMPILED), sequence_parallel=[False, True])
def test_compiled_ops_save_and_compute_what_eager_ones_do(request, name, sequence_parallel):
    """The graph of ranks that split no tokens is that of a rank alone."""
    function, options = COMPILED[name]
    ranks = request.getfixturevalue("ranks2" if sequence_parallel else "ranks1")
    run = partial(model_unlike_compiled, function, **options, sequence_parallel=sequence_parallel)
    assert ranks.run(run) == [[]] * ranks.world_size


INPUTS = ("x", "up", "gate", "down")  # of which a call gets the first three or four, and the needs of these
SAVED: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {  # what needs a gradient: what is saved
    "columns": (
        lambda x, up, _, **options: column_linear(x, up, None, dist.group.WORLD, **options),
        {"x": "up", "up": "x", "x up": "x up"},
    ),
    "columns, activated": (
        lambda x, up, _, **options: column_linear(
            x, up, None, dist.group.WORLD, activation="gelu", **options
        ),
        {"x": "up", "up": "x", "x up": "x up"},
    ),
    "two columns": (
        lambda x, up, gate, **options: column_linear(x, [up, gate], None, dist.group.WORLD, **options)[1],
        {"x": "up gate", "up": "x", "gate x": "x up gate"},
    ),
    "gated mlp": (
        lambda x, up, gate, down, **options: parallel_mlp(
            x, up, None, down, None, dist.group.WORLD, w_gate_shard=gate, **options
        ),
        {"x": "up gate down", "gate": "x down", "down": "down"},
    ),
}


def _noted(addresses: list[int], tensor: Tensor) -> Tensor:
    addresses.append(tensor.data_ptr())
    return tensor


@on_ranks(2)
def test_what_no_gradient_needs_is_not_saved():
    """Of frozen weights, as under LoRA, no x. Beside it only what forward computes is saved, such as z.

    Rows are more than a message holds: of fewer the gathered x is kept.
    """
    for name, (op, cases) in SAVED.items():
        for needed, expected in cases.items():
            for options in ({}, {"sequence_parallel": True}):
                given = [torch.randn(8, 8) for _ in INPUTS[: 4 if "mlp" in name else 3]]
                for word, tensor in zip(INPUTS, given, strict=False):
                    tensor.requires_grad_(word in needed.split())
                saved: list[int] = []
                noting = torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda t: t)
                with patch.object(TensorParallel, "fits_in_message", lambda self, shard: False), noting:
                    op(*given, **options).sum().backward()
                found = [w for w, tensor in zip(INPUTS, given, strict=False) if tensor.data_ptr() in saved]
                assert found == expected.split(), (name, needed, options)


@on_ranks(2)
def test_a_graph_tells_groups_of_another_size_apart():
    """By what each operator is told of its group, of which Inductor's cache makes its keys."""
    group, told = dist.group.WORLD, {}

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in graph.graph.nodes:
            if str(node.target).startswith("tpkernels."):
                words = [argument for argument in node.args if isinstance(argument, str)]
                (name,) = [word for word in words if word.startswith(group.group_name)]
                told[str(node.target).split(".")[1]] = name
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
    assert len(told) == 6
    assert {name.partition(" ")[2] for name in told.values()} == {"of 2 ranks"}


Model = Callable[..., Tensor]


def two_operators(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], **options: Any
) -> Tensor:
    """The gate gets a gradient of the usual kind, beside the others, which do not."""
    group = dist.group.WORLD
    up, gate, down = weights
    into = [main_grads[0], None]
    h, g = column_linear(x, [up, gate], [bias, None], group, activation="gelu", main_grad=into, **options)
    return row_linear(h * g, down, None, group, main_grad=main_grads[2], **options)


def one_operator(
    x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], **options: Any
) -> Tensor:
    up, gate, down = weights
    group = dist.group.WORLD
    y = parallel_mlp(x, up, None, down, None, group, w_gate_shard=gate, main_grads=main_grads, **options)
    return bias.sum() + y


def head(x: Tensor, weights: list[Tensor], bias: Tensor, main_grads: list[Tensor], **options: Any) -> Tensor:
    up, *others = weights
    target = torch.arange(len(x) * (dist.get_world_size() if options["sequence_parallel"] else 1)) % 3
    loss = linear_cross_entropy(x, up, target, dist.group.WORLD, main_grad=main_grads[0], **options)
    return loss + bias.sum() + sum(weight.sum() for weight in others)


def unlike_main_grads(
    backend: str, model: Model, needs: list[tuple[bool, bool]], **options: Any
) -> list[str]:
    """For which needs (x, up) compiled code adds something else to main_grads, or has other gradients."""
    prepare(Setting())
    wrong = []
    torch._dynamo.reset()
    eager = partial(model, **options)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=backend)
    for x_needs, up_needs in needs:
        expected, ours = (_accumulated(function, x_needs, up_needs) for function in (eager, compiled))
        if not close(ours, expected, 1e-6):
            wrong.append(f"{x_needs=} {up_needs=}")
    return wrong


def _accumulated(model: Model, x_needs: bool, up_needs: bool) -> list[Tensor]:
    """main_grads and gradients after three backwards, of which the first two come after two forwards."""
    whole, up, down = operands_of(7)
    weights = [leaf(up), leaf(up.flip(0)), leaf(down)]
    weights[0].requires_grad_(up_needs)
    bias = leaf(up[:, 0].contiguous())
    flat = torch.ones(sum(weight.numel() for weight in weights))  # as in buckets: parts of one tensor
    parts = flat.split([weight.numel() for weight in weights])
    main_grads = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
    xs = [(whole * number).requires_grad_(x_needs) for number in (1, 2, 3)]
    waiting = [model(x, weights, bias, main_grads) for x in xs[:2]]
    for y in waiting:
        y.square().sum().backward()
    model(xs[2], weights, bias, main_grads).square().sum().backward()
    return [flat, *(leaf.grad for leaf in (*xs, *weights, bias) if leaf.grad is not None)]


EACH_NEED = [(True, True), (False, True), (True, False)]  # of x and of a weight


@pytest.mark.parametrize(
    ("model", "options", "needs"),
    [
        (two_operators, {"sequence_parallel": True}, EACH_NEED),
        (one_operator, {"sequence_parallel": False}, EACH_NEED[1:2]),
        (two_operators, {"sequence_parallel": False, "quantize": WGRAD_FP8}, EACH_NEED[:1]),
        (one_operator, {"sequence_parallel": True, "quantize": BLOCKWISE}, EACH_NEED[:1]),
        (head, {"sequence_parallel": True, "reduction": "none"}, EACH_NEED[:1]),
        (head, {"sequence_parallel": False, "reduction": "mean"}, EACH_NEED[:1]),
        pytest.param(two_operators, {"sequence_parallel": False}, EACH_NEED, marks=pytest.mark.sweep),
        pytest.param(one_operator, {"sequence_parallel": True}, EACH_NEED, marks=pytest.mark.sweep),
        pytest.param(one_operator, {"sequence_parallel": False}, EACH_NEED, marks=pytest.mark.sweep),
    ],
)
def test_main_grads_take_under_compile_what_they_take_eagerly(request, model, options, needs):
    ranks = request.getfixturevalue("ranks2" if options["sequence_parallel"] else "ranks1")
    run = partial(unlike_main_grads, "aot_eager", model, needs, **options)
    assert ranks.run(run, timeout=300) == [[]] * ranks.world_size


@pytest.mark.sweep  # half a minute for what `aot_eager` shows, too, but for the code that Inductor makes
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_main_grads_take_from_inductor_what_they_take_eagerly(ranks1):
    run = partial(unlike_main_grads, "inductor", one_operator, EACH_NEED[:1])
    assert ranks1.run(run, timeout=300) == [[]]


@on_ranks(2)
def test_autocast_casts_what_goes_in_and_gradients_come_back_in_their_dtypes():
    prepare(Setting())
    given = operands_of(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for model in (block, mlp):
            run = partial(model, sequence_parallel=True)
            results = with_gradients(run, given)
            exact = with_gradients(
                lambda *t, run=run: run(*t).double(), [t.bfloat16().float() for t in given]
            )
            for ours, truth in zip(results, exact, strict=True):
                assert float((ours.double() - truth.double()).norm() / truth.double().norm()) < 2e-2
            assert [t.dtype for t in results] == [torch.bfloat16, *[torch.float32] * 3]


@on_ranks(2)
def test_shards_may_differ_in_size():
    """Ranks with more and fewer features between the two products: the numbers of the whole."""
    prepare(Setting())
    torch.manual_seed(5)
    rank = dist.get_rank()
    sizes = [3 + 2 * other for other in range(dist.get_world_size())]
    whole = [leaf(torch.randn(shape)) for shape in ((8, 6), (sum(sizes), 6), (6, sum(sizes)))]
    dy = torch.randn(8, 6)
    x, w, w2 = whole
    y = torch.nn.functional.gelu(x @ w.T) @ w2.T
    dx, dw, dw2 = torch.autograd.grad(y, whole, dy)
    shards = [shard(x, 0), w.split(sizes)[rank], w2.split(sizes, 1)[rank]]
    expected = [shard(y, 0), shard(dx, 0), dw.split(sizes)[rank], dw2.split(sizes, 1)[rank]]
    for is_mlp in (False, True):
        x, w, w2 = ours = [leaf(t.detach()) for t in shards]
        if is_mlp:
            group, options = dist.group.WORLD, {"activation": "gelu", "sequence_parallel": True}
            found = parallel_mlp(x, w, None, w2, None, group, **options)
        else:
            found = block(x, w, w2, sequence_parallel=True)
        found.backward(shard(dy, 0))
        for mine, truth in zip([found, *(t.grad for t in ours)], expected, strict=True):
            assert (mine - truth).norm() / truth.norm() < 2e-6
