"""What ranks run in tests of ops over a group as citizens of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck

from tests.ops.parallel_behaviour import operands_of, with_gradients
from tests.ops.parallel_cases import Setting, leaf, prepare, shard
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.tensor_parallel.registered_column import (
    registered_column_linear,
    registered_column_linear_backward,
)
from tpkernels.ops.tensor_parallel.row_linear import (
    registered_row_linear,
    registered_row_linear_backward,
    row_linear,
)

K, N, TOKENS = 8, 12, 4


def registered_operators_pass_opcheck(names: list[str]) -> list[str]:
    """The problems that opcheck finds in some calls of the operators, forward and backward."""
    name = str(dist.group.WORLD.group_name)
    ranks = dist.get_world_size()

    def random(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(*shape, requires_grad=grad)

    def short(tensor: Tensor) -> Tensor:
        return tensor.detach().bfloat16()

    x, w, b = random(TOKENS, K), random(N, K), random(N)
    h, w2 = random(TOKENS * ranks, N), random(K, N)
    dy, dy_shard = random(TOKENS * ranks, N, grad=False), random(TOKENS, K, grad=False)
    z = random(TOKENS * ranks, N, grad=False)
    plain = [t.detach() for t in (x, w, h, w2)]
    column = ("gelu", True, True, True, False)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "column": (registered_column_linear, (x, [w], [b], [True], name, *column)),
        "columns": (registered_column_linear, (x, [w, w], [b], [False, True], name, "none", *[True] * 4)),
        "whole column": (registered_column_linear, (x, [w], [], [False], name, "none", *[False] * 4)),
        "column backward": (
            registered_column_linear_backward,
            ([True, True, False], [dy], plain[0], [plain[1]], [z], [False], name, *column),
        ),
        "wide column backward": (
            registered_column_linear_backward,
            ([True, True, True], [short(dy)], short(x), [short(w)], [short(z)], [True], name, *column),
        ),
        "row": (registered_row_linear, (h, w2, random(K), name, True, True)),
        "whole row": (registered_row_linear, (h, w2, None, name, False, False)),
        "row backward": (
            registered_row_linear_backward,
            (dy_shard, plain[2], plain[3], [True, True, True], False, name, True, True),
        ),
        "wide row backward": (
            registered_row_linear_backward,
            (short(dy_shard), short(h), short(w2), [True, True, False], True, name, True, True),
        ),
    }
    problems = []
    for case in names:
        try:
            opcheck(*calls[case])
        except Exception as error:  # whatever it says is the answer
            problems.append(f"{case}: {error}")
    return problems


def compiled_mlp_differs_by(gated: bool) -> float:
    """parallel_mlp under torch.compile against eager, which keeps less: y and gradients."""
    prepare(Setting())
    torch._dynamo.reset()

    def mlp(x: Tensor, w: Tensor, w2: Tensor) -> Tensor:
        gate = {"w_gate_shard": w.flip(0)} if gated else {}
        return parallel_mlp(x, w, None, w2, None, dist.group.WORLD, sequence_parallel=True, **gate)

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    operands = operands_of(1)
    eager, ours = (with_gradients(function, operands) for function in (mlp, compiled))
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, eager, strict=True))


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
