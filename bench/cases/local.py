"""Ops of one rank against torch's own: linear, gated unit, MLP, norms, and those over a vocabulary.

    python -m bench.cases.local [--rounds N] [PATTERN ...]

prints our time as a multiple of torch's, on a CPU, at a small size and at eight times as large ones. Ways are
interleaved, and of each the second lowest round counts: on a shared machine higher ones tell of others' work.
PATTERN: part of a case's name
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from bench.case import Case, Work
from bench.cases.differentiated import Function, differentiated
from tpkernels import ops

PASSES = ("forward", "forward_backward", "inference")


class _BareLinear(torch.autograd.Function):
    """What an op in Python costs at least: the same products, and no more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.T @ x, dy.sum(0)


class Local:
    """Makes cases of one dtype on one device.

    compiles: torch's way, compiled, is a further way
    """

    def __init__(
        self, dtype: torch.dtype, device: str, pass_: str = "forward_backward", *, compiles: bool = False
    ) -> None:
        self.dtype, self.device, self.pass_, self.compiles = dtype, device, pass_, compiles

    def case(
        self, work: Work, ours: Function, naive: Function, operands: Sequence[Tensor], **others: Function
    ) -> Case:
        if self.compiles:
            others["compiled"] = torch.compile(naive)
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
            pass_=self.pass_,
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
            bare=lambda *operands: _BareLinear.apply(*operands),  # type: ignore[no-untyped-call]
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


def on_cpu(pass_: str, group: ProcessGroup) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names and cases: small, and eight times as large by tokens or by what is as wide."""
    local = Local(torch.float32, "cpu", pass_)
    products = {"": (64, 96, 256), " tokens x8": (512, 96, 256), " widths x8": (64, 272, 724)}
    norms = {"": (256, 256), " tokens x8": (2048, 256), " features x8": (256, 2048)}
    ids = {"": (256, 64, 2048), " tokens x8": (2048, 64, 2048), " columns x8": (256, 64, 16384)}
    tables: list[tuple[Mapping[str, tuple[int, ...]], list[Callable[..., Case]]]] = [
        ({" tiny": (4, 16, 16)}, [local.linear]),
        (products, [local.linear, local.linear_gelu, local.swiglu, local.mlp, local.gated_mlp]),
        (norms, [local.rms_norm, local.layer_norm]),
        (ids, [partial(build, group) for build in (local.embedding, local.loss, local.head)]),
    ]
    for sizes, builds in tables:
        for build in builds:
            word = getattr(build, "func", build).__name__
            for which, size in sizes.items():
                yield f"{word}{which} {pass_}", partial(build, *size)


def second_lowest(seconds: list[float]) -> float:
    return sorted(seconds)[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cases.local")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    for pass_ in PASSES:
        for name, build in on_cpu(pass_, group):
            if all(pattern in name for pattern in options.patterns):
                torch.manual_seed(0)
                taken = {way: second_lowest(s) for way, s in build().time(options.rounds).items()}
                ours = taken.pop("ours")
                ratios = ", ".join(f"{ours / other:.2f} of {way}" for way, other in taken.items())
                print(f"{name:40} {1e6 * ours:9.1f} us  {ratios}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
