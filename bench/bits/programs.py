"""What `bench bits` computes on each rank: ops over a group and gradient buckets, forward and backward.

The numbers depend on the program, the tensor and the rank alone. Their magnitudes lie far apart, so that a
sum in another order rounds otherwise. Shards are cut into chunks however small they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.comm import schedule
from tpkernels.groups.state import ParallelState
from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)

Dim = int | Literal["tokens"] | None  # split over ranks; "tokens": the first, under sequence parallelism
IDS = "ids"  # the operand with ids of the vocabulary, without gradient
TOKENS = 8  # of a rank
FEATURES = 24
SPLIT = 8  # of a rank, of what is split: features between two layers, rows of a vocabulary
CHUNK_BYTES, USUAL_CHUNK_BYTES = 64, schedule.LEAST_BYTES  # four chunks a shard, instead of one
BUCKET_BYTES = 1024
POWERS = 5  # magnitudes from 2**-5 to 2**5 times a normal number


class Form(NamedTuple):
    """How an op is called; least_bytes: of a chunk."""

    name: str
    dtype: torch.dtype
    sequence_parallel: bool
    tokens: int = TOKENS  # of a rank
    least_bytes: int = CHUNK_BYTES


FORMS = (
    Form("fp32", torch.float32, False),
    Form("fp32 sequence-parallel", torch.float32, True),
    Form("bf16 sequence-parallel", torch.bfloat16, True),
)
# so little that all ranks swap their full partial sums
SWAPPED = Form("fp32 swapped", torch.float32, False, tokens=1, least_bytes=USUAL_CHUNK_BYTES)
OF_ALL_TOKENS = (Form("fp32", torch.float32, False), Form("bf16", torch.bfloat16, False))

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
        """Of this rank alone."""
        return self.same(f"{name} of rank {self.group.rank()}", *shape)


Program = Callable[[Place], Results]


@dataclass(frozen=True)
class OpProgram:
    """An op over a group, with sizes and split dimensions of its operands and of its result.

    run: takes this rank's shards, the group, and whether it is sequence-parallel
    operands: by name, letters for sizes: T tokens, F features, B features between two layers, V vocabulary
    """

    run: Callable[..., Tensor]
    operands: Mapping[str, tuple[str, Dim]]
    result: tuple[str, Dim]

    def shards(self, form: Form, scales: Mapping[str, float], place: Place) -> list[Tensor]:
        """Return this rank's shards of the operands, and of the gradient of the result."""
        split = place.ranks * SPLIT
        sizes = {"T": form.tokens * place.ranks, "F": FEATURES, "B": split, "V": split}
        found = []
        for name, (letters, dim) in (*self.operands.items(), ("y", self.result)):
            full = place.same(name, *(sizes[letter] for letter in letters))
            if name == IDS:
                full = (full * 2**POWERS).abs().long() % split
            else:
                full = (full * scales.get(name, 1.0)).to(form.dtype)
            if dim == "tokens":
                dim = 0 if form.sequence_parallel else None
            shard = full if dim is None else full.chunk(place.ranks, dim)[place.group.rank()].contiguous()
            found.append(shard)
        return found


def _linear_cross_entropy(reduction: Literal["mean", "none"]) -> Callable[..., Tensor]:
    return lambda hidden, w, ids, group, split: linear_cross_entropy(
        hidden, w, ids, group, reduction=reduction, sequence_parallel=split, chunk_tokens=5
    )


_HEAD: dict[str, tuple[str, Dim]] = {"hidden": ("TF", "tokens"), "w": ("VF", 0), IDS: ("T", None)}
OPS: Mapping[str, OpProgram] = {
    "column_linear": OpProgram(
        lambda x, w, b, group, split: column_linear(
            x, w, b, group, activation="gelu_tanh", sequence_parallel=split
        ),
        {"x": ("TF", "tokens"), "w": ("BF", 0), "b": ("B", 0)},
        ("TB", 1),
    ),
    "row_linear": OpProgram(
        lambda h, w, b, group, split: row_linear(h, w, b, group, sequence_parallel=split),
        {"h": ("TB", 1), "w": ("FB", 1), "b": ("F", None)},
        ("TF", "tokens"),
    ),
    "parallel_mlp": OpProgram(
        lambda x, up, b, down, group, split: parallel_mlp(
            x, up, b, down, None, group, sequence_parallel=split
        ),
        {"x": ("TF", "tokens"), "up": ("BF", 0), "b": ("B", 0), "down": ("FB", 1)},
        ("TF", "tokens"),
    ),
    "gated_mlp": OpProgram(
        lambda x, up, gate, down, group, split: parallel_mlp(
            x, up, None, down, None, group, w_gate_shard=gate, sequence_parallel=split
        ),
        {"x": ("TF", "tokens"), "up": ("BF", 0), "gate": ("BF", 0), "down": ("FB", 1)},
        ("TF", "tokens"),
    ),
    "embedding": OpProgram(
        lambda ids, w, group, split: vocab_embedding(ids, w, group, sequence_parallel=split),
        {IDS: ("T", None), "w": ("VF", 0)},
        ("TF", "tokens"),
    ),
    "cross_entropy": OpProgram(
        lambda logits, ids, group, split: vocab_cross_entropy(logits, ids, group, label_smoothing=0.1),
        {"logits": ("TV", 1), IDS: ("T", None)},
        ("T", None),
    ),
    "linear_cross_entropy mean": OpProgram(_linear_cross_entropy("mean"), _HEAD, ("", None)),
    "linear_cross_entropy none": OpProgram(_linear_cross_entropy("none"), _HEAD, ("T", None)),
}


def of_ops(names: Sequence[str], forms: Sequence[Form], scales: Mapping[str, float], place: Place) -> Results:
    """Yield results and gradients of these ops in each form.

    scales: of operands that lie before an activation or a softmax, which large numbers saturate
    """
    for name, form in product(names, forms):
        with _chunks_of(form.least_bytes):
            *operands, dy = OPS[name].shards(form, scales, place)
            leaves = [operand.requires_grad_() for operand in operands if operand.is_floating_point()]
            y = OPS[name].run(*operands, place.group, form.sequence_parallel)
            found = [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]
        gradients = [f"d{operand}" for operand in OPS[name].operands if operand != IDS]
        for what, tensor in zip(("y", *gradients), found, strict=True):
            yield f"{name}, {form.name}: {what}", tensor


def buckets(place: Place) -> Results:
    return _gradient_buckets(place, "all_reduce")


def sharded_buckets(place: Place) -> Results:
    return _gradient_buckets(place, "reduce_scatter")


PROGRAMS: dict[str, Program] = {
    "column": partial(of_ops, ["column_linear"], FORMS, {"w": 2**-10, "b": 2**-5}),
    "row": partial(of_ops, ["row_linear"], (*FORMS, SWAPPED), {}),
    "mlp": partial(of_ops, ["parallel_mlp", "gated_mlp"], FORMS, {"up": 2**-6, "gate": 2**-6, "b": 2**-5}),
    "embedding": partial(of_ops, ["embedding"], FORMS, {}),
    "cross_entropy": partial(of_ops, ["cross_entropy"], OF_ALL_TOKENS, {}),
    "linear_cross_entropy": partial(
        of_ops,
        ["linear_cross_entropy mean", "linear_cross_entropy none"],
        FORMS,
        {"hidden": 2**-5, "w": 2**-5},
    ),
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


def _gradient_buckets(place: Place, reduce: Literal["all_reduce", "reduce_scatter"]) -> Results:
    """Two steps of two microbatches each; the first step learns the order of buckets."""
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
