"""Programs of our operators for the machine, with small integers: products and sums are exact in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.nn import functional

from bench.streams.device import MachineError, Program, current_device
from bench.streams.record import Machine, group_among, record
from bench.streams.search import run_so_far
from tpkernels.comm import schedule
from tpkernels.comm.carveout import IN_FLIGHT
from tpkernels.comm.groups import start_all_reduce
from tpkernels.comm.side_stream import SideStream
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports import c10d, symmetric
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)
from tpkernels.ops.matmul import PLAIN
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.parallel import split_of
from tpkernels.ops.vocab import vocabulary

SHARD, NARROW, WIDE = 16, 16, 64  # rows of a rank; features of a matrix, and of a rank's shard of another
CALLS = 4  # of each operator: two slots, each used twice
EXACT_FP8 = Recipe.rowwise(power_of_two=True)  # of small integers
OperandShard = str  # "rows", "cols" or "whole"


@dataclass(frozen=True)
class Case:
    """An operator over a group, and its unsharded computation."""

    op: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    splits: tuple[OperandShard, ...]  # of its inputs
    result: OperandShard
    shapes: Callable[[int], list[tuple[int, ...]]]  # of the inputs, by the number of ranks
    large: tuple[int, ...] = ()  # inputs of 2 and 3: gates of their products are open, silu(g) = g in fp32


def _linear(ranks: int) -> list[tuple[int, ...]]:
    return [(SHARD * ranks, NARROW), (WIDE * ranks, NARROW), (WIDE * ranks,)]


def _row_linear(ranks: int) -> list[tuple[int, ...]]:
    return [(SHARD * ranks, WIDE * ranks), (NARROW, WIDE * ranks), (NARROW,)]


def _mlp(ranks: int) -> list[tuple[int, ...]]:
    features = WIDE * ranks
    return [(SHARD * ranks, NARROW), (features, NARROW), (features,), (NARROW, features), (NARROW,)]


def _gated_mlp(ranks: int) -> list[tuple[int, ...]]:
    return [(SHARD * ranks, NARROW), *[(WIDE * ranks, NARROW)] * 2, (NARROW, WIDE * ranks)]


def _rows(ranks: int) -> list[tuple[int, ...]]:
    return [(SHARD * ranks, NARROW * ranks)]


def _two_layers(x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor, b_down: Tensor) -> Tensor:
    return functional.linear(functional.linear(x, w_up, b_up).relu(), w_down, b_down)


def _swiglu(x: Tensor, w_up: Tensor, w_gate: Tensor, w_down: Tensor) -> Tensor:
    return functional.linear(functional.silu(x @ w_gate.t()) * (x @ w_up.t()), w_down)


def _gated(
    group: ProcessGroup,
    x: Tensor,
    w_up: Tensor,
    w_gate: Tensor,
    w_down: Tensor,
    quantize: Recipe | None = None,
) -> Tensor:
    return parallel_mlp(
        x, w_up, None, w_down, None, group, w_gate_shard=w_gate, sequence_parallel=True, quantize=quantize
    )


def _mlp_of(sequence_parallel: bool) -> Callable[..., Tensor]:
    def op(group: ProcessGroup, *tensors: Tensor) -> Tensor:
        x, w_up, b_up, w_down, b_down = tensors
        return parallel_mlp(
            x, w_up, b_up, w_down, b_down, group, activation="relu", sequence_parallel=sequence_parallel
        )

    return op


def _of(linear: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    return lambda group, *tensors: linear(*tensors, group, **options)


def _mapping(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda group, x: function(x, group)


def _itself(x: Tensor) -> Tensor:
    return x


CASES = {
    "column, sequence-parallel": Case(
        _of(column_linear, sequence_parallel=True),
        functional.linear,
        ("rows", "rows", "rows"),
        "cols",
        _linear,
    ),
    "column, gathered rows saved": Case(
        _of(column_linear, sequence_parallel=True, save_gathered=True),
        *(functional.linear, ("rows", "rows", "rows"), "cols", _linear),
    ),
    "column in fp8": Case(
        _of(column_linear, sequence_parallel=True, quantize=EXACT_FP8),
        *(functional.linear, ("rows", "rows", "rows"), "cols", _linear),
    ),
    "column": Case(_of(column_linear), functional.linear, ("whole", "rows", "rows"), "cols", _linear),
    "row, sequence-parallel": Case(
        _of(row_linear, sequence_parallel=True),
        functional.linear,
        ("cols", "cols", "whole"),
        "rows",
        _row_linear,
    ),
    "row in fp8": Case(
        _of(row_linear, sequence_parallel=True, quantize=EXACT_FP8),
        *(functional.linear, ("cols", "cols", "whole"), "rows", _row_linear),
    ),
    "row": Case(_of(row_linear), functional.linear, ("cols", "cols", "whole"), "whole", _row_linear),
    "mlp, sequence-parallel": Case(
        _mlp_of(True), _two_layers, ("rows", "rows", "rows", "cols", "whole"), "rows", _mlp
    ),
    "mlp": Case(_mlp_of(False), _two_layers, ("whole", "rows", "rows", "cols", "whole"), "whole", _mlp),
    "gated mlp": Case(_gated, _swiglu, ("rows", "rows", "rows", "cols"), "rows", _gated_mlp, large=(0, 2)),
    "gather of tokens": Case(
        _mapping(partial(mappings.gather_from_sequence_region, tensor_parallel_output_grad=False)),
        *(_itself, ("rows",), "whole", _rows),
    ),
    "gather of features": Case(_mapping(mappings.gather_from_region), _itself, ("cols",), "whole", _rows),
}


def split(value: Tensor, how: OperandShard, rank: int, ranks: int) -> Tensor:
    if how == "whole":
        return value
    return value.chunk(ranks, dim=0 if how == "rows" else -1)[rank].contiguous()


def _numbers(shape: Sequence[int], seed: int, least: int = -2, most: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(least, most + 1, tuple(shape), generator=generator).float()


@lru_cache(maxsize=64)
def _inputs(case: Case, ranks: int, call: int) -> tuple[list[Tensor], Tensor]:
    """Return full inputs of a call, and the full gradient of its result."""
    inputs = [
        _numbers(shape, 100 * call + index, *((2, 3) if index in case.large else ()))
        for index, shape in enumerate(case.shapes(ranks))
    ]
    return inputs, _numbers(case.whole(*inputs).shape, 100 * call + 99)


def expected(case: Case, rank: int, ranks: int, calls: Sequence[int]) -> list[Tensor]:
    """Return a rank's expected results of those calls: the output, and the gradient of each input."""
    found = []
    for call in calls:
        inputs, dy = _inputs(case, ranks, call)
        leaves = [value.clone().requires_grad_() for value in inputs]
        y = case.whole(*leaves)
        gradients = torch.autograd.grad(y, leaves, dy)
        found.append(split(y.detach(), case.result, rank, ranks))
        found += [split(each, how, rank, ranks) for each, how in zip(gradients, case.splits, strict=True)]
    return found


def program_of(
    name: str,
    machine: Machine,
    transport: str,
    *,
    captured: bool = False,
    rounds: int = 1,
    backward: bool = True,
) -> tuple[Program, list[list[Tensor]]]:
    """Return the program that ranks enqueue, and each rank's expected results.

    captured: capture calls in a graph that is replayed, after two eager calls
    rounds: of each collective, or of products through memory
    """
    case, ranks = CASES[name], machine.ranks
    eager = range(2 if captured else CALLS)
    replayed = range(2, 2 + CALLS) if captured else range(0)

    def body(group: ProcessGroup) -> list[Tensor]:
        rank = group.rank()

        def shards(call: int) -> list[Tensor]:
            inputs, dy = _inputs(case, ranks, call)
            hows = (*case.splits, case.result)
            return [split(each, how, rank, ranks) for each, how in zip((*inputs, dy), hows, strict=True)]

        *inputs, dy = (shard.to("cuda") for shard in shards(0))
        leaves = [value.requires_grad_() for value in inputs]

        def step() -> list[Tensor]:
            y = case.op(group, *leaves)
            return [y.detach(), *(torch.autograd.grad(y, leaves, dy) if backward else ())]

        def feed(call: int) -> None:
            with torch.no_grad():
                for there, value in zip((*leaves, dy), shards(call), strict=True):
                    there.copy_(value)

        results = []
        for call in eager:
            feed(call)
            results += step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = step()
            for call in replayed:
                feed(call)
                graph.replay()
                results += [output.clone() for output in outputs]
        return results

    with _in_chunks(rounds):
        program = record(machine, body, transport)
    calls, results = [*eager, *replayed], 1 + len(case.splits)
    wanted = [expected(case, rank, ranks, calls) for rank in range(ranks)]
    return program, wanted if backward else [of_rank[::results] for of_rank in wanted]


def gathers_in_flight(machine: Machine, *, multiplied: bool = False) -> tuple[Program, list[list[Tensor]]]:
    """Return a program of two gathers at once through one exchange; from the second on each has a barrier.

    multiplied: by a kernel that waits for their rows
    """
    ranks, cols = machine.ranks, NARROW
    up, gate = _numbers((WIDE, cols), 1000), _numbers((WIDE, cols), 1001, 2, 3)

    def rows_of(number: int) -> Tensor:
        return _numbers((SHARD * ranks, cols), number, 2, 3)

    def body(group: ProcessGroup) -> list[Tensor]:
        results, tp = [], split_of("gathers", group, True)
        ups = [weight.to("cuda") for weight in (up, gate)]
        for call in range(CALLS):
            pending = []
            for number in (2 * call, 2 * call + 1):
                shard = split(rows_of(number), "rows", group.rank(), ranks).to("cuda")
                pending.append(tp.gather("gathers", "rows", shard, keeps=not multiplied))
            for each in pending:
                h = PLAIN.unit(each, ups, None, "swiglu", False, up.dtype)[0] if multiplied else each.all()
                results.append(h)
        return results

    with _in_chunks(1):
        program = record(machine, body)
    gathered = [rows_of(number) for number in range(2 * CALLS)]
    wanted = [_swiglu(x, up, gate, torch.eye(WIDE)) for x in gathered] if multiplied else gathered
    return program, [wanted] * ranks


def sums_in_flight(machine: Machine) -> tuple[Program, list[list[Tensor]]]:
    """Return a program of two sums at once through one exchange: copies push one, a kernel the other."""
    ranks = machine.ranks
    weight = _numbers((NARROW, WIDE), 2000)

    def terms_of(rank: int, number: int) -> Tensor:
        return _numbers((SHARD * ranks, WIDE), 2100 + 10 * number + rank)

    def body(group: ProcessGroup) -> list[Tensor]:
        results, tp, w = [], split_of("sums", group, True), weight.to("cuda")
        for call in range(CALLS):
            pending = []
            for number in (2 * call, 2 * call + 1):
                a = terms_of(group.rank(), number).to("cuda")
                terms = PLAIN.terms([(a, w)], True, a.dtype)
                by_copies = replace(terms, pairs=())
                pending.append(tp.reduce_scatter("sums", terms if number % 2 else by_copies))
            results += [each.wait() for each in pending]
        return results

    with _in_chunks(1):
        program = record(machine, body)
    sums = [
        torch.stack([terms_of(rank, number) @ weight.t() for rank in range(ranks)]).sum(0)
        for number in range(2 * CALLS)
    ]
    return program, [[split(total, "rows", rank, ranks) for total in sums] for rank in range(ranks)]


def without_reference(
    name: str, machine: Machine, transport: str, *, captured: bool = False
) -> tuple[Program, None]:
    """Return a program of operators with inexact numbers: all orders must give the same results."""
    op, shapes = INEXACT[name]

    def body(group: ProcessGroup) -> list[Tensor]:
        rank, ranks = group.rank(), group.size()
        numbers = (_numbers(shape, seed) for seed, shape in enumerate(shapes(ranks)))
        ways = ((each, "rows" if each.shape[0] > each.shape[1] else "cols") for each in numbers)
        shards = [split(each, along_the_longer, rank, ranks) for each, along_the_longer in ways]
        leaves = [shard.to("cuda").requires_grad_() for shard in shards]

        def step() -> list[Tensor]:
            y = op(group, *leaves)
            return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

        results = [each for _ in range(2 if captured else CALLS) for each in step()]
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = step()
            for _ in range(CALLS):
                graph.replay()
                results += [output.clone() for output in outputs]
        return results

    with _in_chunks(1), patch.object(vocabulary, "_is_compared", lambda *_: False):
        return record(machine, body, transport), None


def _of_a_vocabulary(group: ProcessGroup, table: Tensor, head: Tensor) -> Tensor:
    """Compute the loss of each token twice, from embeddings by a fused loss and from logits.

    Ids are not compared between ranks, because the host would read them.
    """
    ids = torch.arange(SHARD * group.size(), device="cuda") * 7 % (WIDE * group.size())
    hidden = vocab_embedding(ids, table, group, sequence_parallel=True)
    loss = linear_cross_entropy(hidden, head, ids, group, sequence_parallel=True, reduction="none")
    logits = column_linear(hidden, head, None, group, sequence_parallel=True)
    return loss + vocab_cross_entropy(logits, ids, group)


def _shapes_of_vocabulary(ranks: int) -> list[tuple[int, ...]]:
    return [(WIDE * ranks, NARROW)] * 2


INEXACT: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[tuple[int, ...]]]]] = {
    "gated mlp in fp8": (partial(_gated, quantize=EXACT_FP8), _gated_mlp),
    "vocabulary": (_of_a_vocabulary, _shapes_of_vocabulary),
}


def two_streams(machine: Machine, transport: str) -> tuple[Program, list[list[Tensor]]]:
    """Return a program of calls of one group, alternating between two unordered streams."""
    case, ranks = CASES["column, sequence-parallel"], machine.ranks

    def body(group: ProcessGroup) -> list[Tensor]:
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        calls = []
        for call in range(2 * CALLS):
            inputs, _ = _inputs(case, ranks, call)
            shards = [
                split(each, how, group.rank(), ranks) for each, how in zip(inputs, case.splits, strict=True)
            ]
            calls.append([shard.to("cuda") for shard in shards])
        streams[1].wait_stream(streams[0])
        results = []
        for call, tensors in enumerate(calls):
            with torch.cuda.stream(streams[call % 2]):
                results.append(case.op(group, *tensors))
        streams[0].wait_stream(streams[1])
        return results

    with _in_chunks(1):
        program = record(machine, body, transport)
    return program, [
        [
            split(case.whole(*_inputs(case, ranks, call)[0]), case.result, rank, ranks)
            for call in range(2 * CALLS)
        ]
        for rank in range(ranks)
    ]


class BucketModel:
    """Gradient buckets of a parameter each, as `csrc/bucket_launch.cpp` enqueues them on a GPU.

    The engine itself cannot run here: to C++ these tensors lie on a CPU, which has no streams.
    """

    def __init__(self, parameters: Sequence[Tensor], group: ProcessGroup) -> None:
        self._group, self._side = group, SideStream(torch.device("cuda", 0))
        self._works: list[Work] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._launch)

    def _launch(self, parameter: Tensor) -> None:
        current = torch.cuda.current_stream()
        self._side.wait_for(current)
        if not self._works:
            IN_FLIGHT.begin(self._group, torch.device("cuda", 0))
        assert parameter.grad is not None, "the hook comes after it"
        with self._side.entered():
            work = start_all_reduce(self._group, parameter.grad, dist.ReduceOp.SUM, None)
        self._works.append(work)

    def finish(self) -> None:
        """Have the current stream wait for all buckets."""
        with self._side.entered():
            for work in self._works:
                work.wait()
        self._side.let(torch.cuda.current_stream())
        if self._works:
            IN_FLIGHT.end(self._group)
        self._works.clear()


def buckets_beside_backward(machine: Machine, tensor: int = 1) -> tuple[Program, list[list[Tensor]]]:
    """Return a program of two column-parallel layers whose gradients leave in buckets during backward.

    tensor: ranks of a tensor-parallel group; each of its ranks has a data-parallel group beside it
    """
    case, ranks = CASES["column, sequence-parallel"], machine.ranks
    replicas = ranks // tensor

    def shards(rank: int, layer: int) -> list[Tensor]:
        """Of a rank: operands of a layer, and the gradient of its result."""
        (x, *weights), dy = _inputs(case, tensor, layer)
        x = _numbers(x.shape, 500 + rank // tensor)  # each replica has its own tokens
        hows = (*case.splits, case.result)
        return [split(t, how, rank % tensor, tensor) for t, how in zip((x, *weights, dy), hows, strict=True)]

    def body(world: ProcessGroup) -> list[Tensor]:
        rank = world.rank()
        first = rank // tensor * tensor
        tp = group_among(range(first, first + tensor))
        dp = group_among(range(rank % tensor, ranks, tensor))
        layers = [[shard.to("cuda") for shard in shards(rank, layer)] for layer in range(2)]
        layers = [[x.requires_grad_(), *others] for x, *others in layers]  # its gradient is reduce-scattered
        parameters = [t.requires_grad_() for _, *weights, _ in layers for t in weights]
        buckets = BucketModel(parameters, dp)
        results = []
        for _ in range(2):
            outputs = [case.op(tp, *operands) for *operands, _ in layers]
            torch.autograd.backward(outputs, [dy for *_, dy in layers])
            buckets.finish()
            results += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = None
        return results

    with _in_chunks(1):
        program = record(machine, body, "c10d")
    wanted = []
    for rank in range(ranks):
        sums = []
        for layer in range(2):
            (x, *weights), dy = _inputs(case, tensor, layer)
            total = [torch.zeros_like(weight) for weight in weights]
            for replica in range(replicas):
                leaves = [weight.clone().requires_grad_() for weight in weights]
                y = case.whole(_numbers(x.shape, 500 + replica), *leaves)
                for term, gradient in zip(total, torch.autograd.grad(y, leaves, dy), strict=True):
                    term += gradient
            sums += [
                split(t, how, rank % tensor, tensor) for t, how in zip(total, case.splits[1:], strict=True)
            ]
        wanted.append(sums * 2)
    return program, wanted


def rank_that_never_comes(machine: Machine) -> str:
    """Return the error by which the last rank names rank 0, which makes one call less than the others."""
    case, ranks, told = CASES["column, sequence-parallel"], machine.ranks, []

    def body(group: ProcessGroup) -> list[Tensor]:
        rank = group.rank()

        def call() -> Tensor:
            inputs, _ = _inputs(case, ranks, 0)
            shards = [split(t, how, rank, ranks) for t, how in zip(inputs, case.splits, strict=True)]
            return case.op(group, *[shard.to("cuda") for shard in shards])

        results = [call() for _ in range(2 if rank == 0 else 3)]
        if rank == ranks - 1:  # its peers have enqueued all that they will
            run_so_far(current_device().program)
            try:
                results.append(call())
            except RuntimeError as error:
                told.append(str(error))
        return results

    with _in_chunks(1), patch.object(symmetric, "LOOK_CALLS", 1):
        record(machine, body)
    if not told:
        raise MachineError("rank 0 never came, and the host of another rank has not been told")
    return told[0]


TRANSPORTS = "c10d", "symmetric", "symmetric-rounds"
Recorded = tuple[Program, list[list[Tensor]] | None]  # and each rank's results, if they are exact


def all_programs() -> dict[str, Callable[[], Recorded]]:
    """Return programs of every operator, transport and mode, for 2, 4 and 8 ranks."""
    found: dict[str, Callable[[], Recorded]] = {}
    for ranks in (2, 4, 8):
        machine = Machine(ranks)
        for captured, name in product((False, True), CASES):
            for transport, rounds in _ways_of(name):
                told = _named(name, transport, ranks, rounds, captured=captured)
                found[told] = partial(program_of, name, machine, transport, captured=captured, rounds=rounds)
        for captured, name in product((False, True), INEXACT):
            for transport in ["symmetric"] if "fp8" in name else TRANSPORTS:
                told = _named(name, transport, ranks, captured=captured)
                found[told] = partial(without_reference, name, machine, transport, captured=captured)
        for name, multiplied in (("gathers in flight", False), ("products in flight", True)):
            program = partial(gathers_in_flight, machine, multiplied=multiplied)
            found[_named(name, "symmetric", ranks)] = program
        found[_named("sums in flight", "symmetric", ranks)] = partial(sums_in_flight, machine)
        for tensor in (1, 2)[: ranks // 2]:
            name = "buckets" if tensor == 1 else "buckets beside tensor-parallel groups"
            found[_named(name, "c10d", ranks)] = partial(buckets_beside_backward, machine, tensor)
        for transport in TRANSPORTS:
            found[_named("two streams", transport, ranks)] = partial(two_streams, machine, transport)
    return found


def _ways_of(name: str) -> list[tuple[str, int]]:
    """Return the transports of an operator, each with the rounds of its products."""
    ways = [("c10d", 1), ("c10d", 2), ("symmetric", 1), ("symmetric-rounds", 2)]
    if name.startswith("gather of"):
        return ways[:2]  # over c10d alone
    return ways[2:3] if "fp8" in name else ways  # words travel as rows do; kernels wait for them otherwise


def _named(name: str, transport: str, ranks: int, rounds: int = 1, *, captured: bool = False) -> str:
    in_rounds = "" if transport == "symmetric" else f", {rounds} rounds"
    return f"{name}/{transport}{in_rounds}/{'captured' if captured else 'eager'}/{ranks} ranks"


@contextmanager
def _in_chunks(rounds: int) -> Iterator[None]:
    """Split small matrices into chunks and rounds, as large ones."""
    with (
        patch.object(schedule, "LEAST_BYTES", 256),
        # as of real sizes: backward gathers x again
        patch.object(TensorParallel, "fits_in_message", lambda self, shard: False),
        patch.object(c10d, "collective_rounds", lambda rows, features, *_: rounds if features else 1),
    ):
        yield
