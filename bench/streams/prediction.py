"""Predicts a call's time in each way, and which products hide its transfers: a model.

Operators enqueue calls of given sizes, on tensors without numbers, and `times` computes when their tasks run.

Ways to move rows: our operators' transports, and two other ways by patches of our operators.

naive         `F.linear` after a blocking all-gather, or before a blocking reduce-scatter that NCCL sums
decomposed    a product for each rank's rows, once copy engines have brought them; a kernel adds up sums
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.streams.device import Awaited, Program, Step, current_device
from bench.streams.record import Machine, NcclGroup, record
from bench.streams.times import (
    GRAPH,
    HOST,
    LAUNCH,
    NOTHING,
    PRODUCT,
    TRANSFER,
    Host,
    Node,
    Ran,
    times_of,
)
from tpkernels.comm import carveout
from tpkernels.comm.calls import Call
from tpkernels.comm.schedule import Plan, Round, gather_plan, pushing_gather_plan, reduce_plan
from tpkernels.comm.transports import c10d
from tpkernels.comm.transports.base import Exchange
from tpkernels.comm.transports.c10d import c10d_for
from tpkernels.comm.transports.rows import Waits
from tpkernels.comm.transports.symmetric import SymmetricDelivery, SymmetricExchange
from tpkernels.ops import column_linear, parallel_mlp, row_linear
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.flag_waits import KERNEL_SUMS, waits_for
from tpkernels.planning.gpus import RatedGpu
from tpkernels.planning.job import Job
from tpkernels.planning.step_time import DIRECTIONS, IN_ROUNDS, OPERATORS, WAYS, Sizes

TRANSPORTS = {
    **{"naive": "c10d", "c10d": "c10d", "symmetric": "symmetric", "decomposed": "symmetric"},
    **dict.fromkeys(IN_ROUNDS, "symmetric-rounds"),
}


class Decomposed(SymmetricExchange):
    """Pushes rows as our exchange, with one round for each rank's rows."""

    def plan_gather(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        _, *others = gather_plan(rows, ranks, rank, 1, tapered=False).rounds
        pushing = pushing_gather_plan(rows, ranks, rank, self.splits)
        return replace(pushing, rounds=(pushing.rounds[0], *(Round(theirs.rows, ()) for theirs in others)))

    def plan_reduce(self, rows: int, ranks: int, rank: int, shard_bytes: int, overlap: bool) -> Plan:
        return reduce_plan(rows, ranks, rank, 1, tapered=False)

    def _delivery(self, epoch: int, needs_barrier: bool, plan: Plan, call: Call | None) -> SymmetricDelivery:
        made = super()._delivery(epoch, needs_barrier, plan, call)
        return _Delivery(self, epoch, needs_barrier, plan, made._word, call, made._current)


class _Delivery(SymmetricDelivery):
    lasts = True  # rows are not copied

    def keep(self, rows: Tensor) -> None:
        """Keep nothing for a sum: the product writes the rank's own rows to their place."""
        if not self.plan.reduces:
            super().keep(rows)

    def await_rows(self, rows: slice) -> None:
        """Make the current stream wait for rows."""
        first, word = self.flags.data_ptr(), self.awaited.data_ptr()
        awaits = tuple(Awaited(first + 4 * chunk, word) for chunk in self.exchange.chunk_numbers(rows))
        current_device().enqueue("rows are awaited", [[Step(awaits=awaits)]], on_processors=False)


@contextmanager
def going(way: str) -> Iterator[None]:
    """Make operators go this way inside the block, and name transfers by the data that they move."""
    begin_call = parallel.begin_call

    def begin(op: str, what: str, *given: Any) -> Call:
        current_device().moves = what.partition(" in ")[0]  # without the number of rounds
        return begin_call(op, what, *given)

    with ExitStack() as entered:
        entered.enter_context(patch.object(parallel, "begin_call", begin))
        for change in {"naive": _naive, "decomposed": _decomposed}.get(way, list)():
            entered.enter_context(change)
        if way in IN_ROUNDS:
            rounds = int(way.removeprefix("rounds-"))
            entered.enter_context(
                patch.object(c10d, "collective_rounds", lambda _, features, *__: rounds if features else 1)
            )
        yield


def _naive() -> list[Any]:
    start = NcclGroup._start

    def blocking(group: NcclGroup, *given: Any, **named: Any) -> Any:
        if (work := start(group, *given, **named)) is not None:
            work.wait()
        return work

    return [
        patch.object(NcclGroup, "_start", blocking),
        patch.object(parallel, "backend_sums", True),
        patch.object(carveout, "_add", lambda _: None),  # nothing is in flight
    ]


def _decomposed() -> list[Any]:
    found = parallel.exchange_for

    def exchange_for(
        op: str, purpose: str, like: Tensor, rows: int, cols: int, group: Any, features: int, overlap: bool,
        **options: Any,
    ) -> Exchange:  # fmt: skip
        """Use collectives for rows that no product takes as they arrive, and for sums for all ranks."""
        if not features or options.get("to_all"):
            return c10d_for(like, rows, features, group.size(), overlap)
        return found(op, purpose, like, rows, cols, group, features, overlap, **options)

    def waits(op: str, exchange: Exchange, like: Tensor, **options: Any) -> Waits:
        return KERNEL_SUMS if isinstance(exchange, Decomposed) else waits_for(op, exchange, like, **options)

    return [
        patch.object(parallel, "exchange_for", exchange_for),
        patch.object(parallel, "waits_for", waits),
    ]


CALLS = 3  # in a row: the last takes the time of a call among many


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted seconds of a call among many equal ones; in the model all ranks are equally fast."""

    way: str
    direction: str
    seconds: float
    products: float  # if each ran alone
    transfers: float  # if each ran alone
    host: float  # while its thread is busy
    hidden: Mapping[str, Mapping[str, float]]  # transfer -> product -> seconds that both ran
    ran: Sequence[Ran]  # of the last call

    @property
    def exposed(self) -> float:
        """Seconds beyond the products: transfers that nothing hides, waits, launches, sums."""
        return max(0.0, self.seconds - self.products)

    def as_json(self, ranks: int) -> dict[str, Any]:
        spans = [
            {"rank": rank, "queue": ran.task.queue[0], "name": ran.task.name,
             "kind": ran.task.kind, "start": ran.start, "stop": ran.stop}
            for ran in self.ran
            for rank in range(ranks)
        ]  # fmt: skip
        plain = {name: value for name, value in asdict(self).items() if name != "ran"}
        return {"model": True, **plain, "exposed": self.exposed, "spans": spans}


def predict(operator: str, direction: str, way: str, sizes: Sizes, node: Node) -> Predicted:
    """Predict a call. operator: of OPERATORS; direction: forward or backward; way: of WAYS or IN_ROUNDS"""
    program, calls = enqueued(operator, direction, way, sizes, node.gpu.processors)
    *_, before, last = times_of(program, calls, replace(node, host=_host(way, node.host)))
    seconds = max(ran.stop for ran in last) - max(ran.stop for ran in before)
    last = _numbered(sorted((ran for ran in last if ran.task.kind != NOTHING), key=lambda ran: ran.start))

    def total(kind: str) -> float:
        return sum(ran.task.seconds for ran in last if ran.task.kind == kind)

    host = sum(ran.task.seconds for ran in last if ran.task.queue[0] == HOST)
    return Predicted(way, direction, seconds, total(PRODUCT), total(TRANSFER), host, _hidden(last), last)


def block_exposed(job: Job, tensor: int, gpu: RatedGpu) -> float:
    """Return seconds of a block's transfers that its products do not hide, for a tensor group in one node.

    For one microbatch, forward and backward, over c10d and launched by a graph; recomputation is a second
    forward.
    """
    if tensor == 1:
        return 0.0
    tokens, hidden, split = job.tokens_at_once(), job.model.hidden_size, job.sequence_parallel
    of_heads, of_keys = job.model.num_heads * job.head_size, job.kv_heads * job.head_size
    narrowest = max(1, of_keys // tensor)
    calls = {
        "column_linear": Sizes(tokens, hidden, of_heads + 2 * of_keys, tensor, split, narrowest),
        "row_linear": Sizes(tokens, of_heads, hidden, tensor, split),
        "gated_mlp" if job.ups == 2 else "mlp": Sizes(tokens, hidden, job.ffn, tensor, split),
    }
    forwards = 2 if job.recompute == "full" else 1
    return sum(
        forwards * _exposed(operator, "forward", sizes, gpu) + _exposed(operator, "backward", sizes, gpu)
        for operator, sizes in calls.items()
    )


@lru_cache(maxsize=1024)
def _exposed(operator: str, direction: str, sizes: Sizes, gpu: RatedGpu) -> float:
    return predict(operator, direction, "c10d", sizes, Node.of(gpu).with_host(GRAPH)).exposed


@lru_cache(maxsize=2)  # launched by the host, and by a graph
def enqueued(
    operator: str, direction: str, way: str, sizes: Sizes, processors: int, overlap: bool = True
) -> tuple[Program, list[range]]:
    """Return the program of a rank, and the numbers of the tasks of each call."""
    for what, known, name in (
        ("operator", OPERATORS, operator), ("direction", DIRECTIONS, direction),
        ("way", (*WAYS, *IN_ROUNDS), way),
    ):  # fmt: skip
        if name not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, got {name!r}")
    if way in IN_ROUNDS and sizes.ranks % int(way[-1]):
        raise ValueError(f"way: expected rounds that divide {sizes.ranks} ranks, got {way!r}")
    shapes, calls = _shapes(operator, sizes), list[range]()

    def body(group: ProcessGroup) -> list[Tensor]:
        tasks = current_device().program.tasks
        x, *weights = (_empty(*shape).requires_grad_() for shape in shapes)

        def counted(run: Callable[[], Any]) -> Any:
            first, result = len(tasks), run()
            calls.append(range(first, len(tasks)))
            return result

        def forward() -> tuple[Tensor, ...]:
            return _forward(operator, x, weights, group, sizes.sequence_parallel, overlap and way != "naive")

        if direction == "forward":
            return [y for _ in range(CALLS) for y in counted(forward)]
        results = [forward() for _ in range(CALLS)]
        dys = [_empty(*y.shape) for y in results[0]]
        return [
            gradient
            for ys in results
            for gradient in counted(lambda: torch.autograd.grad(ys, (x, *weights), dys))  # noqa: B023
        ]

    exchange = Decomposed if way == "decomposed" else SymmetricExchange
    machine = Machine(sizes.ranks, processors=processors, numbers=False, exchange=exchange)
    with going(way):
        return record(machine, body, TRANSPORTS[way]), calls


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def _shapes(operator: str, sizes: Sizes) -> list[tuple[int, int]]:
    """Return the shapes of a rank's x, and of its weights."""
    tokens, features_in = sizes.tokens, sizes.features_in
    here = tokens // sizes.ranks if sizes.sequence_parallel else tokens
    if operator == "row_linear":
        shard = sizes.shard("features_in")
        return [(tokens, shard), (sizes.features_out, shard)]
    shard = sizes.shard("features_out")
    if operator == "column_linear":
        others = [sizes.narrowest] * 2 if sizes.narrowest else []
        return [(here, features_in), *((width, features_in) for width in (shard - sum(others), *others))]
    ups = 2 if operator == "gated_mlp" else 1
    return [(here, features_in), *[(shard, features_in)] * ups, (features_in, shard)]


def _forward(
    operator: str, x: Tensor, weights: Sequence[Tensor], group: ProcessGroup, split: bool, overlap: bool
) -> tuple[Tensor, ...]:
    if operator == "column_linear":
        return column_linear(x, weights, None, group, sequence_parallel=split, overlap=overlap)
    if operator == "row_linear":
        return (row_linear(x, weights[0], None, group, sequence_parallel=split, overlap=overlap),)
    up, *gate, down = weights
    return (
        parallel_mlp(
            *(x, up, None, down, None, group),
            w_gate_shard=gate[0] if gate else None,
            sequence_parallel=split,
            overlap=overlap,
        ),
    )


def _host(way: str, host: Host) -> Host:
    if way == "naive":
        return replace(host, call=0.0, collective=host.naive_collective, product=host.naive_product)
    return replace(host, product=min(host.product, host.decomposed_product)) if way == "decomposed" else host


def _numbered(ran: Sequence[Ran]) -> list[Ran]:
    """Number tasks with the same name, except flags and launches."""
    names = Counter((each.task.name, each.task.kind) for each in ran)
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for each in ran:
        key = each.task.name, each.task.kind
        counts[key] += 1
        if each.task.kind in (PRODUCT, TRANSFER) and names[key] > 1:
            each = replace(each, task=replace(each.task, name=f"{each.task.name} {counts[key]}"))
        found.append(each)
    return found


def _hidden(ran: Sequence[Ran]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for transfer in (each for each in ran if each.task.kind == TRANSFER):
        beside = found.setdefault(transfer.task.name, defaultdict(float))
        for other in ran:
            if other.task.kind not in (TRANSFER, LAUNCH) and "processors" in map(
                lambda r: r[0], other.task.uses
            ):
                both = min(transfer.stop, other.stop) - max(transfer.start, other.start)
                if both > 0:
                    beside[other.task.name] += both
    return {name: dict(beside) for name, beside in found.items()}
