"""Ops of one rank against torch's own: linear, gated unit, MLP, norms, and those over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from bench.case import Case, Work
from tpkernels import ops

Function = Callable[..., Tensor]


def differentiated(
    work: Work, ours: Function, naive: Function, operands: Sequence[Tensor], **others: Function
) -> Case:
    """Forward and backward of functions of the same operands, by which all are differentiated."""

    def way(function: Function) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = function(*operands)
            return y.detach(), *torch.autograd.grad(y, operands, torch.ones_like(y))

        return run

    return Case(work, {name: way(f) for name, f in {"ours": ours, "naive": naive, **others}.items()})


class Local:
    """Makes cases of one dtype on one device.

    compiles: torch's way, compiled, is a further way
    """

    def __init__(self, dtype: torch.dtype, device: str, *, compiles: bool = False) -> None:
        self.dtype, self.device, self.compiles = dtype, device, compiles

    def case(
        self, work: Work, ours: Function, naive: Function, operands: Sequence[Tensor], **others: Function
    ) -> Case:
        if self.compiles:
            compiled = cache(lambda: torch.compile(naive))  # imports the compiler, which takes seconds
            others["compiled"] = lambda *given: compiled()(*given)
        return differentiated(work, ours, naive, operands, **others)

    def normal(self, *shape: int) -> Tensor:
        scale = shape[-1] ** 0.5 if len(shape) == 2 else 1.0
        return (torch.randn(shape, device=self.device) / scale).to(self.dtype).requires_grad_()

    def ids(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device)

    def work(self, op: str, naive: str, *sizes: int, flops: int = 0, elements: int = 0) -> Work:
        """elements: read and written in `dtype`"""
        return Work(
            op=op,
            shape="x".join(map(str, sizes)),
            pass_="forward_backward",
            naive=naive,
            dtype=self.dtype,
            device=self.device,
            flops=flops,
            bytes=self.dtype.itemsize * elements,
        )

    def linear(self, tokens: int, features: int, out: int) -> Case:
        return self.case(
            self.work("linear", "F.linear", tokens, features, out),
            ops.linear,
            F.linear,
            [self.normal(tokens, features), self.normal(out, features), self.normal(out)],
        )

    def linear_gelu(self, tokens: int, features: int, out: int) -> Case:
        return self.case(
            self.work("linear_gelu", "F.gelu(F.linear)", tokens, features, out),
            lambda x, weight, bias: ops.linear(x, weight, bias, "gelu_tanh"),
            lambda *operands: F.gelu(F.linear(*operands), approximate="tanh"),
            [self.normal(tokens, features), self.normal(out, features), self.normal(out)],
        )

    def swiglu(self, tokens: int, features: int, out: int) -> Case:
        return self.case(
            self.work("swiglu", "F.silu(F.linear) * F.linear", tokens, features, out),
            ops.swiglu,
            lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
            [self.normal(tokens, features), self.normal(out, features), self.normal(out, features)],
        )

    def mlp(self, tokens: int, features: int, between: int) -> Case:
        return self.case(
            self.work("mlp", "F.linear(F.gelu(F.linear))", tokens, features, between),
            ops.mlp,
            lambda x, up, b_up, down, b_down: F.linear(
                F.gelu(F.linear(x, up, b_up), approximate="tanh"), down, b_down
            ),
            [
                self.normal(tokens, features),
                self.normal(between, features),
                self.normal(between),
                self.normal(features, between),
                self.normal(features),
            ],
        )

    def gated_mlp(self, tokens: int, features: int, between: int) -> Case:
        return self.case(
            self.work("gated_mlp", "F.linear(F.silu(F.linear) * F.linear)", tokens, features, between),
            lambda x, gate, up, down: ops.mlp(x, up, None, down, None, w_gate=gate),
            lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
            [
                self.normal(tokens, features),
                self.normal(between, features),
                self.normal(between, features),
                self.normal(features, between),
            ],
        )

    def rms_norm(self, tokens: int, features: int) -> Case:
        return self.case(
            self.work("rms_norm", "F.rms_norm", tokens, features, elements=5 * tokens * features),
            ops.rms_norm,
            lambda x, weight: F.rms_norm(x, (features,), weight, eps=1e-5),
            [self.normal(tokens, features), self.normal(features)],
        )

    def layer_norm(self, tokens: int, features: int) -> Case:
        return self.case(
            self.work("layer_norm", "F.layer_norm", tokens, features, elements=5 * tokens * features),
            ops.layer_norm,
            lambda x, weight, bias: F.layer_norm(x, (features,), weight, bias),
            [self.normal(tokens, features), self.normal(features), self.normal(features)],
        )

    def embedding(self, group: ProcessGroup, tokens: int, features: int, columns: int) -> Case:
        ids, elements = self.ids(columns, tokens), 4 * tokens * features + columns * features
        return self.case(
            self.work("embedding", "F.embedding", tokens, features, columns, elements=elements),
            lambda table: ops.vocab_embedding(ids, table, group),
            lambda table: F.embedding(ids, table),
            [self.normal(columns, features)],
        )

    def loss(self, group: ProcessGroup, tokens: int, features: int, columns: int) -> Case:
        target, elements = self.ids(columns, tokens), 3 * tokens * columns
        naive = "F.cross_entropy in fp32"
        return self.case(
            self.work("cross_entropy", naive, tokens, features, columns, elements=elements),
            lambda logits: ops.vocab_cross_entropy(logits, target, group).mean(),
            lambda logits: F.cross_entropy(logits.float(), target),
            [self.normal(tokens, columns)],
        )

    def head(self, group: ProcessGroup, tokens: int, features: int, columns: int) -> Case:
        target = self.ids(columns, tokens)
        return self.case(
            self.work(
                "linear_cross_entropy",
                "F.linear and F.cross_entropy in fp32",
                tokens,
                features,
                columns,
                flops=3 * 2 * tokens * features * columns,
                elements=3 * features * (tokens + columns),
            ),
            lambda hidden, weight: ops.linear_cross_entropy(hidden, weight, target, group),
            lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).float(), target),
            [self.normal(tokens, features), self.normal(columns, features)],
        )
