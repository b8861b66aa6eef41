"""Tests ops over a group on each transport: against float64, by delayed calls, and in a captured graph.

Ops over a group as programs: `qualify` compares them with float64, `bench bits` runs them delayed.

A program takes full operands, the same on all ranks, and each rank takes its shards of them. Letters are
sizes: T tokens, F features, B features between two layers, O out_features, V rows of the vocabulary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.cli.qualify_world import Check, QualifyWorld
from tpkernels.comm.transports import select
from tpkernels.comm.transports.symmetric import EPOCHS, LOOK_CALLS
from tpkernels.gate.numerics import BOUND, relative_error
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


@dataclass(frozen=True)
class OpProgram:
    """An op over a group, with sizes and split dimensions of its operands and of its result.

    run: takes this rank's shards, the group, and whether it is sequence-parallel
    """

    run: Callable[..., Tensor]
    operands: Mapping[str, tuple[str, Dim]]
    result: tuple[str, Dim]

    def shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the full shape of each operand, by name, and of the result as "y"."""
        letters = {name: its for name, (its, _) in self.operands.items()} | {"y": self.result[0]}
        return {name: tuple(sizes[letter] for letter in its) for name, its in letters.items()}

    def dims(self, sequence_parallel: bool) -> list[int | None]:
        """Return the dimension of each operand, and of the result, that is split over ranks."""
        split = [dim for _, dim in self.operands.values()] + [self.result[1]]
        tokens = 0 if sequence_parallel else None
        return [tokens if dim == "tokens" else dim for dim in split]

    def results(self, leaves: Sequence[Tensor], dy: Tensor, group: ProcessGroup, split: bool) -> list[Tensor]:
        """Run forward and backward; return this rank's result, then the gradients of its operands."""
        wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
        y = self.run(*leaves, group, split)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


def shards(full: Sequence[Tensor], dims: Sequence[int | None], group: ProcessGroup) -> list[Tensor]:
    """Return this rank's shard of each full tensor; for dim None the full tensor."""
    ranks, rank = group.size(), group.rank()
    return [
        tensor.detach() if dim is None else tensor.detach().chunk(ranks, dim)[rank].contiguous()
        for tensor, dim in zip(full, dims, strict=True)
    ]


def _column(x: Tensor, w: Tensor, b: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return column_linear(x, w, b, group, activation="gelu_tanh", sequence_parallel=split)


def _row(h: Tensor, w: Tensor, b: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return row_linear(h, w, b, group, sequence_parallel=split)


def _mlp(x: Tensor, up: Tensor, b: Tensor, down: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return parallel_mlp(x, up, b, down, None, group, sequence_parallel=split)


def _gated_mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return parallel_mlp(x, up, None, down, None, group, w_gate_shard=gate, sequence_parallel=split)


def _embedding(ids: Tensor, w: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return vocab_embedding(ids, w, group, sequence_parallel=split)


def _cross_entropy(logits: Tensor, ids: Tensor, group: ProcessGroup, split: bool) -> Tensor:
    return vocab_cross_entropy(logits, ids, group, label_smoothing=0.1)


def _linear_cross_entropy(
    reduction: Literal["mean", "none"],
    hidden: Tensor,
    w: Tensor,
    ids: Tensor,
    group: ProcessGroup,
    split: bool,
) -> Tensor:
    return linear_cross_entropy(
        hidden, w, ids, group, reduction=reduction, sequence_parallel=split, chunk_tokens=5
    )


_HEAD: dict[str, tuple[str, Dim]] = {"hidden": ("TF", "tokens"), "w": ("VF", 0), IDS: ("T", None)}
OP_PROGRAMS: Mapping[str, OpProgram] = {
    "column_linear": OpProgram(_column, {"x": ("TF", "tokens"), "w": ("BF", 0), "b": ("B", 0)}, ("TB", 1)),
    "row_linear": OpProgram(_row, {"h": ("TB", 1), "w": ("OB", 1), "b": ("O", None)}, ("TO", "tokens")),
    "parallel_mlp": OpProgram(
        _mlp, {"x": ("TF", "tokens"), "up": ("BF", 0), "b": ("B", 0), "down": ("OB", 1)}, ("TO", "tokens")
    ),
    "gated_mlp": OpProgram(
        _gated_mlp,
        {"x": ("TF", "tokens"), "up": ("BF", 0), "gate": ("BF", 0), "down": ("OB", 1)},
        ("TO", "tokens"),
    ),
    "embedding": OpProgram(_embedding, {IDS: ("T", None), "w": ("VF", 0)}, ("TF", "tokens")),
    "cross_entropy": OpProgram(_cross_entropy, {"logits": ("TV", 1), IDS: ("T", None)}, ("T", None)),
    "linear_cross_entropy mean": OpProgram(partial(_linear_cross_entropy, "mean"), _HEAD, ("", None)),
    "linear_cross_entropy none": OpProgram(partial(_linear_cross_entropy, "none"), _HEAD, ("T", None)),
}


DTYPES = (torch.float32, torch.bfloat16)
TIMES_BOUND = 4.0  # two products, an activation and a sum over ranks round once each
IN_TURN, IN_A_ROW = 3, LOOK_CALLS + 8  # calls of each problem; a row spans a check of the host
LAST_ROW = EPOCHS + 8  # of the last problem: flags wrap around
CALLS_QUICK, AT_ONCE = 32, 8
BEGIN, END = 0.4, 0.85  # fractions of the time at which kernels and delayed calls end
DELAYS = (0.0, 0.0, 0.0, 5e-4, 2e-3)  # seconds of a rank before a call
REPLAYS = 20


def _exact_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, w, b), approximate="tanh")


def _exact_mlp(x: Tensor, up: Tensor, b: Tensor, down: Tensor) -> Tensor:
    return functional.linear(_exact_up(x, up, b), down)


@dataclass(frozen=True)
class TriedOp:
    """An op program, and its exact computation on full operands."""

    program: OpProgram
    exact: Callable[..., Tensor]
    sequence_parallel: bool = True

    @property
    def dims(self) -> list[int | None]:
        return self.program.dims(self.sequence_parallel)


OPS = {
    "column_linear": TriedOp(OP_PROGRAMS["column_linear"], _exact_up),
    "row_linear": TriedOp(OP_PROGRAMS["row_linear"], functional.linear),
    "parallel_mlp": TriedOp(OP_PROGRAMS["parallel_mlp"], _exact_mlp),
    "parallel_mlp of all tokens": TriedOp(OP_PROGRAMS["parallel_mlp"], _exact_mlp, sequence_parallel=False),
}
SIZES = ("small", "large")  # a shard is sent as one chunk, or as four


def operands_of(name: str, size: str, ranks: int, draw: random.Random, dtype: torch.dtype) -> list[Tensor]:
    """Return full operands, the same on all ranks; the last is the gradient of the result."""
    if size == "small":
        rows, width, out = draw.randint(9, 40), 8 * draw.randint(4, 12), 8 * draw.randint(4, 12)
    else:  # at least 512 KiB in bf16; rows that four chunks divide
        rows, width, out = 4 * draw.randint(128, 136), 8 * draw.randint(64, 68), 8 * draw.randint(64, 68)
    rows, between = ranks * rows, ranks * 8 * draw.randint(2, 6)
    make = torch.Generator().manual_seed(draw.getrandbits(48))

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make).mul_(shape[-1] ** -0.25).to(dtype)

    sizes = {"T": rows, "F": width, "B": between, "O": out}
    return [random_tensor(*shape) for shape in OPS[name].program.shapes(sizes).values()]


def results_of(world: QualifyWorld, name: str, full: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return this rank's result, then the gradients of its operands."""
    op = OPS[name]
    *leaves, dy = _shards(world, full, op.dims, group)
    return op.program.results(leaves, dy, group, op.sequence_parallel)


def exact_of(world: QualifyWorld, name: str, full: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    op = OPS[name]
    leaves = [operand.double().requires_grad_() for operand in full[:-1]]
    y = op.exact(*leaves)
    results: list[Tensor] = [y.detach(), *torch.autograd.grad(y, leaves, full[-1].double())]
    return _shards(world, results, [op.dims[-1], *op.dims[:-1]], group)


def _shards(
    world: QualifyWorld, full: Sequence[Tensor], dims: Sequence[int | None], group: ProcessGroup
) -> list[Tensor]:
    return [shard.to(world.device) for shard in shards(full, dims, group)]


def check_transports(world: QualifyWorld) -> Iterator[Check]:
    transports = world.transports()
    possible = [name for name, obstacle in transports.items() if not obstacle]
    for transport, obstacle in transports.items():
        if obstacle:
            yield Check("transports", transport, "left out", obstacle)
            continue
        end = BEGIN + (END - BEGIN) * (possible.index(transport) + 1) / len(possible)
        with world.computing(), world.group_over(transport) as group:
            sound = world.check("transports", transport, partial(_against_float64, world, group))
            yield sound
            if sound.status == "right":
                yield _delayed_calls(world, transport, group, end)


def _against_float64(world: QualifyWorld, group: ProcessGroup) -> str:
    draw, worst = random.Random(world.seed), 0.0
    for name, size, dtype in product(OPS, SIZES, DTYPES):
        full = operands_of(name, size, world.ranks, draw, dtype)
        pairs = zip(results_of(world, name, full, group), exact_of(world, name, full, group), strict=True)
        for what, (actual, exact) in enumerate(pairs):
            part = relative_error(actual, exact) / (TIMES_BOUND * BOUND[dtype])
            if not part < 1:
                raise ArithmeticError(
                    f"{name} in {dtype}: {_word(what)} is off by {part:.3g} times what is allowed "
                    f"against float64, of shape {tuple(exact.shape)}"
                )
            worst = max(worst, part)
    return f"{', '.join(OPS)}, forward and backward: at most {worst:.2f} of what is allowed against float64"


def _word(what: int) -> str:
    return f"the gradient of operand {what - 1}" if what else "the result"


def _order(problems: int, quick: bool) -> list[int]:
    """Return the problem of each call.

    In turn they need more exchanges than stay open, so that these close and open. In a row an exchange goes
    through its slots again and again, and at last through all numbers that its flags can hold.
    """
    in_turn = list(range(problems))
    if quick:
        return (in_turn * CALLS_QUICK)[:CALLS_QUICK]
    in_rows = [problem for problem in in_turn for _ in range(IN_A_ROW)]
    return in_turn * IN_TURN + in_rows + [problems - 1] * (LAST_ROW - IN_A_ROW)


def _delayed_calls(world: QualifyWorld, transport: str, group: ProcessGroup, end: float) -> Check:
    """Check that each call has the bits of the first call with its operands, whatever ranks are late."""
    draw, delay = random.Random(world.seed + 1), random.Random(f"{world.seed} {world.rank}")
    problems = [
        (name, operands_of(name, size, world.ranks, draw, dtype))
        for name, size, dtype in product(OPS, SIZES, DTYPES)
    ]
    first: list[list[Tensor] | None] = [None] * len(problems)
    order, done, began = _order(len(problems), world.quick), 0, time.monotonic()
    wanted = len(order)

    def some_calls() -> bool:
        for number in range(done, min(done + AT_ONCE, wanted)):
            problem = order[number]
            name, full = problems[problem]
            _delay(world, delay)
            found = results_of(world, name, full, group)
            expected = first[problem] = first[problem] or found
            for what, (ours, once) in enumerate(zip(found, expected, strict=True)):
                if not torch.equal(ours, once):
                    raise ArithmeticError(
                        f"call {number} of {name} in {ours.dtype}: {_word(what)} differs from call "
                        f"{problem}, which was the same, {_apart(ours, once)}"
                    )
        return world.late(end)

    while done < wanted:
        faults, late = world.all_do(some_calls)
        done = min(done + AT_ONCE, wanted)
        if faults:
            return Check("calls", transport, "wrong", "; ".join(faults), time.monotonic() - began)
        if late[0]:
            break
    cut_short = "" if done == wanted else f" (of {wanted}: the time was over; --seconds gives more)"
    said = f"{done} delayed calls{cut_short}, forward and backward, have the bits of the first"
    numbers: dict[str, float] = {"calls": done}
    if transport != "c10d":  # which has no slots
        numbers["of one exchange"] = used = select.exchanges_of("qualify", group, "").most_calls()
        said += f"; one exchange was used {used} times"
        if done == wanted and not world.quick and used <= EPOCHS:
            faults = [f"{said}, and its flags begin again after {EPOCHS}"]
    seconds = round(time.monotonic() - began, 2)
    return Check(
        "calls", transport, "wrong" if faults else "right", "; ".join(faults) or said, seconds, numbers
    )


def _apart(ours: Tensor, once: Tensor) -> str:
    most = float((ours.double() - once.double()).abs().max())
    return f"in {int((ours != once).sum())} of {ours.numel()} values, by up to {most:.2e}"


def _delay(world: QualifyWorld, draw: random.Random) -> None:
    time.sleep(draw.choice(DELAYS))
    if world.on_gpu:
        torch.cuda._sleep(draw.randrange(2_000_000))  # about a millisecond at most


def check_graphs(world: QualifyWorld) -> Iterator[Check]:
    """Check that a captured graph, replayed on other numbers, has the bits of eager calls."""
    for transport, obstacle in world.transports().items():
        if obstacle or not world.on_gpu:
            yield Check("graphs", transport, "left out", obstacle or "CUDA graphs are of GPUs")
            continue
        with world.computing(), world.group_over(transport) as group:
            yield world.check("graphs", transport, partial(_replayed, world, group))


def _replayed(world: QualifyWorld, group: ProcessGroup) -> str:
    draw = random.Random(world.seed + 2)
    for (name, op), size in product(OPS.items(), SIZES):
        full = operands_of(name, size, world.ranks, draw, torch.bfloat16)[:-1]
        inputs = _shards(world, full, op.dims[:-1], group)
        with torch.no_grad():
            stream = torch.cuda.Stream(world.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # choose kernels, open memory
                    op.program.run(*inputs, group, op.sequence_parallel)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = op.program.run(*inputs, group, op.sequence_parallel)
            for replay in range(REPLAYS):
                inputs[0].mul_(-0.75).add_(0.01)
                _delay(world, draw)
                graph.replay()
                replayed = captured.clone()
                eager = op.program.run(*inputs, group, op.sequence_parallel)
                if not torch.equal(replayed, eager):
                    raise ArithmeticError(
                        f"replay {replay} of {name} differs from an eager call {_apart(replayed, eager)}"
                    )
    return f"{', '.join(OPS)}: {REPLAYS} replays have the bits of eager calls"
