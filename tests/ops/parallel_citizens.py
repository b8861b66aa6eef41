"""What ranks run in tests of ops over a group as citizens of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from tests.ops.parallel_behaviour import operands_of, with_gradients
from tests.ops.parallel_cases import Setting, leaf, prepare, shard
from tpkernels.dispatch.operators import Operator
from tpkernels.ops.tensor_parallel.column_linear import column_forward, column_gradients, column_linear
from tpkernels.ops.tensor_parallel.operands import Layout
from tpkernels.ops.tensor_parallel.parallel_mlp import mlp_forward, mlp_gradients, parallel_mlp
from tpkernels.ops.tensor_parallel.row_linear import row_forward, row_gradients, row_linear

K, N, TOKENS = 8, 12, 4


def operators_pass_opcheck(names: list[str]) -> list[str]:
    """The problems that opcheck finds in some calls of the operators, forward and backward."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    tokens, plain = Layout(group, True, True), Layout(group, False, False)

    def short(tensor: Tensor) -> Tensor:
        return tensor.bfloat16()

    x, w, b = torch.randn(TOKENS, K), torch.randn(N, K), torch.randn(N)
    h, w2, b2 = torch.randn(TOKENS * ranks, N), torch.randn(K, N), torch.randn(K)
    z, dh, dy = torch.randn_like(h), torch.randn_like(h), torch.randn_like(x)
    calls: dict[str, tuple[Operator[..., Any], tuple[Any, ...]]] = {
        "column": (column_forward, (x, [w], [b], tokens, "gelu", False, True)),
        "columns": (column_forward, (x, [w, w], [None, b], tokens, "none", ranks > 1, True)),
        "plain column": (column_forward, (x, [w], [None], plain, "none", False, False)),
        "column backward": (
            column_gradients,
            ([True, True, False], [dh], x, [w], [z], [None], tokens, "gelu", False),
        ),
        "wide column backward": (
            column_gradients,
            ([True] * 3, [short(dh)], short(x), [short(w)], [short(z)], [w], tokens, "gelu", False),
        ),
        "row": (row_forward, (h, w2, b2, tokens)),
        "plain row": (row_forward, (h, w2, None, plain)),
        "row backward": (row_gradients, ([True] * 3, dy, h, w2, [None], tokens)),
        "wide row backward": (
            row_gradients,
            ([True, True, False], short(dy), short(h), short(w2), [w2], tokens),
        ),
        "mlp": (mlp_forward, (x, b, b2, [w, w2], tokens, "gelu", None, True)),
        "gated mlp": (mlp_forward, (x, None, b2, [w, w, w2], plain, "none", "swiglu", False)),
        "mlp backward": (
            mlp_gradients,
            ([True, True, False, False, True], dy, x, [w, w2], [z], [None, w2], tokens, "gelu", None),
        ),
        "gated mlp backward": (
            mlp_gradients,
            ([True, False, *[True] * 4], dy, x, [w, w, w2], [z, h], [None] * 3, tokens, "none", "swiglu"),
        ),
    }
    problems = []
    for case in names:
        try:
            operator, arguments = calls[case]
            opcheck(operator.overload, operator.packed(*arguments))
        except Exception as error:  # whatever it says is the answer
            problems.append(f"{case}: {error}")
    return problems


def columns(x: Tensor, w: Tensor, w2: Tensor, **options: Any) -> Tensor:
    """Two weights that share x."""
    y, other = column_linear(x, [w, w2.T.contiguous()], [None, w[:, 0]], dist.group.WORLD, **options)
    return y * other


def row(x: Tensor, w: Tensor, w2: Tensor, **options: Any) -> Tensor:
    return row_linear(x @ w.T, w2, w2[:, 0], dist.group.WORLD, **options)


def mlp(x: Tensor, w: Tensor, w2: Tensor, *, gated: bool, **options: Any) -> Tensor:
    gate, bias = (w.flip(0), None) if gated else (None, w[:, 0])
    return parallel_mlp(x, w, bias, w2, w2[:, 0], dist.group.WORLD, w_gate_shard=gate, **options)


def unlike_compiled(function: Callable[..., Tensor], **options: Any) -> list[str]:
    """Which of y, gradients and bytes saved for backward are others under torch.compile than eagerly."""
    prepare(Setting())
    torch._dynamo.reset()
    compiled = torch.compile(partial(function, **options), fullgraph=True, dynamic=True, backend="aot_eager")
    found = []
    for run in (partial(function, **options), compiled):
        leaves = [leaf(t) for t in operands_of(1)]
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = run(*leaves)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        results = {"y": y.detach(), "saved bytes": torch.tensor(sum(saved.values()))}
        found.append(results | dict(zip(("dx", "dw", "dw2"), gradients, strict=True)))
    eager, ours = found
    return [
        f"{name}: {ours[name]}, not {truth}" for name, truth in eager.items() if not ours[name].equal(truth)
    ]


def sixteen_bit_main_grads() -> float:
    """A main_grad of the weight's 16 bits takes the gradient that autograd would have got, once rounded."""
    prepare(Setting())
    group = dist.group.WORLD
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        x, w, w2 = (t.to(dtype) for t in operands_of(3))
        grads = []
        for fused in (False, True):
            leaves = [leaf(t) for t in (x, w, w2)]
            into = [torch.zeros_like(t) for t in (w, w2)]
            h = column_linear(
                leaves[0],
                leaves[1],
                None,
                group,
                sequence_parallel=True,
                main_grad=into[0] if fused else None,
            )
            y = row_linear(
                h, leaves[2], None, group, sequence_parallel=True, main_grad=into[1] if fused else None
            )
            y.backward(torch.ones_like(y))
            grads.append(into if fused else [t.grad for t in leaves[1:]])
        for plain, fused_grad in zip(*grads, strict=True):
            assert fused_grad.dtype == dtype
            worst = max(worst, float((plain.float() - fused_grad.float()).norm() / plain.float().norm()))
    return worst


def autocast_dtypes() -> list[tuple[torch.dtype, ...]]:
    """Of y and of the gradients of fp32 inputs, in a region of bfloat16."""
    prepare(Setting())
    group = dist.group.WORLD
    x, w, w2 = operands_of(4)

    def mlp(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        return parallel_mlp(x, w, None, w2, None, group, sequence_parallel=True)

    def pair(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        h = column_linear(x, w, None, group, activation="gelu_tanh", sequence_parallel=True)
        return row_linear(h, w2, None, group, sequence_parallel=True)

    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for function in (pair, mlp):
            results = with_gradients(function, [x, w, w2])
            exact = with_gradients(
                lambda *t, f=function: f(*t).double(), [t.bfloat16().float() for t in (x, w, w2)]
            )
            for ours, truth in zip(results, exact, strict=True):
                assert float((ours.double() - truth.double()).norm() / truth.double().norm()) < 2e-2
            found.append(tuple(t.dtype for t in results))
    return found


def uneven_shards_differ_by() -> float:
    """Ranks with more and fewer features between the two products: the numbers of the whole."""
    prepare(Setting())
    torch.manual_seed(5)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = [3 + 2 * other for other in range(ranks)]
    x, dy = torch.randn(8, 6), torch.randn(8, 6)
    w, w2 = torch.randn(sum(sizes), 6), torch.randn(6, sum(sizes))
    named = {"x": x, "w": w, "w2": w2}
    whole = {name: leaf(t) for name, t in named.items()}
    y = torch.nn.functional.gelu(whole["x"] @ whole["w"].T) @ whole["w2"].T
    y.backward(dy)
    worst = 0.0
    for fused in (False, True):
        ours = [leaf(shard(x, 0)), leaf(w.split(sizes)[rank]), leaf(w2.split(sizes, 1)[rank])]
        if fused:
            found = parallel_mlp(
                ours[0], ours[1], None, ours[2], None, dist.group.WORLD, activation="gelu",
                sequence_parallel=True,
            )  # fmt: skip
        else:
            h = column_linear(
                ours[0], ours[1], None, dist.group.WORLD, activation="gelu", sequence_parallel=True
            )
            found = row_linear(h, ours[2], None, dist.group.WORLD, sequence_parallel=True)
        found.backward(shard(dy, 0))
        expected = [
            shard(y.detach(), 0),
            shard(whole["x"].grad, 0),
            whole["w"].grad.split(sizes)[rank],
            whole["w2"].grad.split(sizes, 1)[rank],
        ]
        for mine, truth in zip([found.detach(), *(t.grad for t in ours)], expected, strict=True):
            worst = max(worst, float((mine - truth).norm() / truth.norm()))
    return worst
