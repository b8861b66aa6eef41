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
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.cli.op_programs import IDS, OP_PROGRAMS, OpProgram
from tpkernels.comm import schedule, tensor_parallel
from tpkernels.comm.calls import CALLS_OF
from tpkernels.comm.transports.c10d import MESSAGE, PointToPoint
from tpkernels.groups.state import ParallelState

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
    # few rows: over c10d they travel with the header
    Form("fp32 few rows", torch.float32, True, least_bytes=USUAL_CHUNK_BYTES),
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


def of_ops(names: Sequence[str], forms: Sequence[Form], scales: Mapping[str, float], place: Place) -> Results:
    """Yield results and gradients of these op programs in each form.

    scales: of operands that lie before an activation or a softmax, which large numbers saturate
    """
    for name, form in product(names, forms):
        op = OP_PROGRAMS[name]
        with _chunks_of(form.least_bytes):
            full = _operands(op, form, scales, place)
            found = op.results(full, place.group, form.sequence_parallel)
        gradients = [f"d{operand}" for operand in op.operands if operand != IDS]
        for what, tensor in zip(("y", *gradients), found, strict=True):
            yield f"{name}, {form.name}: {what}", tensor


def _operands(op: OpProgram, form: Form, scales: Mapping[str, float], place: Place) -> list[Tensor]:
    """Return full ones; the last is the gradient of the result."""
    split = place.ranks * SPLIT
    sizes = {"T": form.tokens * place.ranks, "F": FEATURES, "B": split, "O": FEATURES, "V": split}
    full = []
    for name, shape in op.shapes(sizes).items():
        numbers = place.same(name, *shape)
        if name == IDS:
            full.append((numbers * 2**POWERS).abs().long() % split)
        else:
            full.append((numbers * scales.get(name, 1.0)).to(form.dtype))
    return full


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
    message = MESSAGE if least_bytes == USUAL_CHUNK_BYTES else PointToPoint(schedule.MOST_CHUNKS)
    for calls in CALLS_OF.values():
        calls.kinds.clear()  # which hold transports
    with (
        patch.object(schedule, "LEAST_BYTES", least_bytes),
        patch.object(tensor_parallel, "MESSAGE", message),
    ):
        yield


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
