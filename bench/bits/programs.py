"""What `bench bits` computes on each rank: ops over a group and gradient buckets, forward and backward.

The numbers depend on the program, the tensor and the rank alone. Their magnitudes lie far apart, so that a
sum in another order rounds otherwise. Shards are cut into chunks however small they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.comm import schedule
from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)
from tpkernels.runtime.state import ParallelState

TOKENS = 8  # of a rank, where tokens are split
FEATURES = 24
SPLIT = 8  # of a rank, of what is split: features between two layers, rows of a vocabulary
CHUNK_BYTES, USUAL_CHUNK_BYTES = 64, schedule.LEAST_BYTES  # four chunks a shard, instead of one
BUCKET_BYTES = 1024
POWERS = 5  # magnitudes from 2**-5 to 2**5 times a normal number

REDUCTIONS: tuple[Literal["mean", "none"], ...] = ("mean", "none")
FORMS: dict[str, tuple[torch.dtype, bool]] = {  # the dtype, and whether tokens are split
    "fp32": (torch.float32, False),
    "fp32 sequence-parallel": (torch.float32, True),
    "bf16 sequence-parallel": (torch.bfloat16, True),
}

Results = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Place:
    """A rank in its groups, and what it calls in the middle of a backward."""

    group: ProcessGroup  # of all ranks
    grid: ParallelState  # the same ranks as tensor-parallel and data-parallel groups
    pause: Callable[[], None]

    @property
    def ranks(self) -> int:
        return self.group.size()

    def same(self, name: str, *shape: int) -> Tensor:
        """Equal on all ranks."""
        make = torch.Generator().manual_seed(crc32(name.encode()))
        powers = torch.randint(-POWERS, POWERS + 1, shape, generator=make)
        return torch.randn(shape, generator=make) * 2.0**powers

    def own(self, name: str, *shape: int) -> Tensor:
        """This rank's shard."""
        return self.same(f"{name} of rank {self.group.rank()}", *shape)

    def ids(self, name: str, count: int, below: int) -> Tensor:
        make = torch.Generator().manual_seed(crc32(name.encode()))
        return torch.randint(below, (count,), generator=make)

    def tokens(self, name: str, split: bool) -> Tensor:
        """(tokens of a rank, features) or (tokens, features)"""
        if split:
            return self.own(name, TOKENS, FEATURES)
        return self.same(name, TOKENS * self.ranks, FEATURES)


Program = Callable[[Place], Results]


def column(place: Place) -> Results:
    for form, (dtype, split) in FORMS.items():
        operands = {
            "x": place.tokens("x", split),
            "w": place.own("w", SPLIT, FEATURES) / 1024,
            "b": place.own("b", SPLIT) / 32,
        }

        def run(x: Tensor, w: Tensor, b: Tensor, split: bool = split) -> Tensor:
            return column_linear(x, w, b, place.group, activation="gelu_tanh", sequence_parallel=split)

        yield from _with_gradients(form, run, operands, dtype)


def row(place: Place) -> Results:
    def results(form: str, dtype: torch.dtype, split: bool, tokens: int) -> Results:
        operands = {
            "x": place.own("x", tokens, SPLIT),
            "w": place.own("w", FEATURES, SPLIT),
            "b": place.same("b", FEATURES),
        }

        def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return row_linear(x, w, b, place.group, sequence_parallel=split)

        return _with_gradients(form, run, operands, dtype)

    for form, (dtype, split) in FORMS.items():
        yield from results(form, dtype, split, TOKENS * place.ranks)
    with _chunks_of(USUAL_CHUNK_BYTES):  # so little that all ranks swap their full partial sums
        yield from results("fp32 swapped", torch.float32, False, place.ranks)


def mlp(place: Place) -> Results:
    for form, (dtype, split) in FORMS.items():
        operands = {
            "x": place.tokens("x", split),
            "up": place.own("up", SPLIT, FEATURES) / 64,
            "gate": place.own("gate", SPLIT, FEATURES) / 64,
            "down": place.own("down", FEATURES, SPLIT),
        }

        def run(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, split: bool = split) -> Tensor:
            return parallel_mlp(
                x, up, None, down, None, place.group, w_gate_shard=gate, sequence_parallel=split
            )

        yield from _with_gradients(form, run, operands, dtype)


def embedding(place: Place) -> Results:
    ids = place.ids("ids", TOKENS * place.ranks, SPLIT * place.ranks)
    for form, (dtype, split) in FORMS.items():

        def run(w: Tensor, split: bool = split) -> Tensor:
            return vocab_embedding(ids, w, place.group, sequence_parallel=split)

        yield from _with_gradients(form, run, {"w": place.own("w", SPLIT, FEATURES)}, dtype)


def cross_entropy(place: Place) -> Results:
    tokens = TOKENS * place.ranks
    target = place.ids("target", tokens, SPLIT * place.ranks)
    for form, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():

        def run(logits: Tensor) -> Tensor:
            return vocab_cross_entropy(logits, target, place.group, label_smoothing=0.1)

        yield from _with_gradients(form, run, {"logits": place.own("logits", tokens, SPLIT)}, dtype)


def linear_cross_entropy_(place: Place) -> Results:
    target = place.ids("target", TOKENS * place.ranks, SPLIT * place.ranks)
    for form, (dtype, split) in FORMS.items():
        operands = {
            "hidden": place.tokens("hidden", split) / 32,
            "w": place.own("w", SPLIT, FEATURES) / 32,
        }
        for reduction in REDUCTIONS:

            def run(
                hidden: Tensor,
                w: Tensor,
                split: bool = split,
                reduction: Literal["mean", "none"] = reduction,
            ) -> Tensor:
                return linear_cross_entropy(
                    hidden,
                    w,
                    target,
                    place.group,
                    reduction=reduction,
                    sequence_parallel=split,
                    chunk_tokens=5,
                )

            yield from _with_gradients(f"{form} {reduction}", run, operands, dtype)


def buckets(place: Place) -> Results:
    return _gradient_buckets(place, "all_reduce")


def sharded_buckets(place: Place) -> Results:
    return _gradient_buckets(place, "reduce_scatter")


PROGRAMS: dict[str, Program] = {
    "column": column,
    "row": row,
    "mlp": mlp,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy_,
    "buckets": buckets,
    "sharded_buckets": sharded_buckets,
}
OF_TRANSPORTS = [name for name in PROGRAMS if not name.endswith("buckets")]  # the others are the backend's


@contextmanager
def _chunks_of(least_bytes: int) -> Iterator[None]:
    before, schedule.LEAST_BYTES = schedule.LEAST_BYTES, least_bytes
    try:
        yield
    finally:
        schedule.LEAST_BYTES = before


def run_program(name: str, place: Place) -> dict[str, Tensor]:
    """All results and gradients of this rank, by name."""
    with _chunks_of(CHUNK_BYTES):
        return dict(PROGRAMS[name](place))


def _with_gradients(
    form: str, run: Callable[..., Tensor], operands: dict[str, Tensor], dtype: torch.dtype
) -> Results:
    leaves = {name: operand.to(dtype).requires_grad_() for name, operand in operands.items()}
    y = run(**leaves)
    yield f"{form}: y", y.detach()
    make = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=make).to(y.dtype))
    for name, leaf in leaves.items():
        assert leaf.grad is not None, "each operand has a gradient"
        yield f"{form}: d{name}", leaf.grad


def _gradient_buckets(place: Place, reduce: Literal["all_reduce", "reduce_scatter"]) -> Results:
    """Two steps, of which the first learns the order of buckets; two microbatches each."""
    grid = place.grid
    groups = {
        "one group": (place.group, None),
        "two groups": (grid.process_group("dp"), grid.process_group("tp")),
    }
    for form, (group, tensor_parallel_group) in groups.items():
        model = _model(place)
        if tensor_parallel_group is not None:
            for name, parameter in model.named_parameters():
                parameter.sequence_parallel = name.endswith("bias")  # type: ignore[attr-defined]
        made = GradientBuckets(
            model,
            group,
            bucket_bytes=BUCKET_BYTES,
            reduce=reduce,
            tensor_parallel_group=tensor_parallel_group,
        )
        for step in range(2):
            made.zero()
            with made.no_sync():
                _backward(place, model, f"microbatch 0 of {step}")
            _backward(place, model, f"microbatch 1 of {step}")
            made.finish()
            reduced = made.gradient_shards() if reduce == "reduce_scatter" else made.buckets
            for number, bucket in enumerate(reduced):
                yield f"{form}: bucket {number} of step {step}", bucket.detach().clone()
        made.detach()


def _model(place: Place) -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, FEATURES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(place.same(name, *parameter.shape) / 8)
    return model


def _backward(place: Place, model: nn.Module, name: str) -> None:
    """With a pause before the gradients of each layer, which its bucket waits for."""
    y = place.own(name, TOKENS, FEATURES)
    for layer in model.children():
        y = functional.gelu(layer(y))
        y.register_hook(lambda _: place.pause())
    y.square().mean().backward()
