"""Faults of our own code, taken away or turned line by line while ranks' host code is recorded."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from bench.streams import cases, models
from bench.streams.cases import buckets_beside_backward, gathers_in_flight, program_of, sums_in_flight
from bench.streams.device import Program
from bench.streams.record import Machine, record
from tpkernels.comm import schedule
from tpkernels.comm.carveout import CollectivesInFlight
from tpkernels.comm.side_stream import StreamOrder
from tpkernels.comm.transports.c10d import Collectives, Launches
from tpkernels.comm.transports.in_memory import Mailboxes
from tpkernels.comm.transports.order import CallOrder
from tpkernels.comm.transports.symmetric import SymmetricDelivery, SymmetricExchange
from tpkernels.ops.matmul import Plain
from tpkernels.ops.quantized.products import Quantized
from tpkernels.ops.tensor_parallel import flag_waits
from tpkernels.ops.tensor_parallel.flag_waits import FlagKernels
from tpkernels.reserved_sms import ReservedSms

Recorded = tuple[Program, list[list[Tensor]]]


def edited(owner: Any, name: str, old: str, new: str) -> Any:
    """A patch: the method or function with one piece of its source in other words."""
    function = owner.__dict__[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times"
    scope: dict[str, Any] = {}
    source = source.replace(old, new)
    cell = f"def outer(__class__):\n{textwrap.indent(source, '    ')}\n    return {name}\n"
    module = inspect.getmodule(function)
    assert module is not None, "sources lie in modules"
    exec(
        compile(cell, f"<planted in {name}>", "exec"), module.__dict__ | {"__name__": module.__name__}, scope
    )
    changed = scope["outer"](owner)
    # the globals of the module itself, so that other patches reach it
    rebound = type(changed)(
        changed.__code__, module.__dict__, changed.__name__, changed.__defaults__, changed.__closure__
    )
    rebound.__kwdefaults__ = changed.__kwdefaults__
    return patch.object(owner, name, rebound)


def _program(name: str, transport: str = "symmetric", **options: Any) -> Callable[[], Recorded]:
    return partial(program_of, name, Machine(2), transport, **options)


_IN_TWO: dict[str, Any] = {"transport": "symmetric-rounds", "rounds": 2}
_column = partial(_program, "column, sequence-parallel")
_row = partial(_program, "row, sequence-parallel")
_gated = partial(_program, "gated mlp")
_MLP = "mlp, sequence-parallel"


def _buckets(ranks: int, tensor: int) -> Callable[[], Recorded]:
    return partial(buckets_beside_backward, Machine(ranks), tensor)


def _two_streams() -> Recorded:
    return cases.two_streams(Machine(2), "symmetric")  # which faults are planted in


def _never_comes() -> Recorded:
    """A program of nothing: what is found is found while it is recorded."""
    cases.rank_that_never_comes(Machine(2))
    return record(Machine(1), lambda group: []), [[]]


_in_flight = partial(gathers_in_flight, Machine(2))
_D, _X = SymmetricDelivery, SymmetricExchange


class Fault(NamedTuple):
    """What is planted, and the program that is to show it."""

    planted: Callable[[], Any]
    recorded: Callable[[], Recorded]


def _lost(owner: Any, name: str, old: str, recorded: Callable[[], Recorded], new: str = "pass") -> Fault:
    return Fault(lambda: edited(owner, name, old, new), recorded)


_ROWS = "landing.copy_(sent, non_blocking=True)"
_WAITS = "partial(kernels.wait_for, delivery, round.rows)"
_FLAGS = "self._raise(words, range(first_chunk, first_chunk + chunks))"

FAULTS = {
    # symmetric: what streams wait for
    "pushes do not wait for rows that are computed": _lost(
        _D, "_push", "exchange.side.wait_for(current)", _column()
    ),
    "who sent goes on while rows are being pushed": _lost(_D, "end", "exchange.side.let(current)", _column()),
    "a capture ends while pushes are under way": _lost(
        _D, "end", "exchange.side.let(current)", _column(captured=True)
    ),
    "pushed rows are not held": _lost(
        _D, "_push", "self._held.append(outgoing)", _program("row"), "self._held.append(outgoing[:0].clone())"
    ),
    "a flag is raised before its rows": _lost(
        _D,
        "_put",
        f"{_ROWS}\n        {_FLAGS}",
        _column(),
        f"{_FLAGS}\n        {_ROWS}",
    ),
    "only the first flag of a push is raised": _lost(
        _D, "_raise", "write(words, chunk, word)", _column(), "chunk or write(words, chunk, word)"
    ),
    # symmetric in rounds: products between pushes
    "a round is multiplied before its rows are there": _lost(
        Mailboxes, "gather", _WAITS, _column(**_IN_TWO), "None"
    ),
    "a captured round is multiplied before its rows are there": _lost(
        Mailboxes, "gather", _WAITS, _column(**_IN_TWO, captured=True), "None"
    ),
    "only the first chunk of a round is awaited": _lost(
        FlagKernels,
        "wait_for",
        "chunks = delivery.exchange.chunk_numbers(rows)",
        partial(program_of, "column, sequence-parallel", Machine(4), **_IN_TWO),  # two ranks a round
        "chunks = delivery.exchange.chunk_numbers(rows)[:1]\n"
        "    rows = slice(rows.start, rows.start + delivery.exchange._chunk_rows)",
    ),
    "a round is pushed before it is computed": _lost(
        _D, "_push", "exchange.side.wait_for(current)", _row(**_IN_TWO)
    ),
    "a round is freed while it is being pushed": _lost(
        _D, "_push", "self._held.append(outgoing)", _row(**_IN_TWO), "self._held.append(outgoing[:0].clone())"
    ),
    "a round does not wait for the barrier of its call": _lost(
        _D, "before_kernels_wait", "current.wait_event(self._barrier)", _column(**_IN_TWO, captured=True)
    ),
    # symmetric: slots that are used again
    "no barrier while two calls are in flight": _lost(
        CallOrder, "begin", "self.begun > SLOTS and not (followed and self._follows)", _in_flight, "False"
    ),
    "a barrier only if the call before was late": _lost(
        CallOrder, "begin", "followed and self._follows", _in_flight, "self._follows"
    ),
    "no barrier of captured calls": _lost(
        _X,
        "_delivery",
        "needs_barrier or word is None",
        _column(captured=True, backward=False),
        "needs_barrier",
    ),
    "no barrier before a kernel that stores into slots": _lost(
        _D, "before_kernels_push", "self.exchange.barrier(1)", _row(captured=True, backward=False)
    ),
    "one slot for all calls": Fault(lambda: patch.object(schedule, "SLOTS", 1), _column()),
    "flags of all calls are alike": _lost(
        _X, "_delivery", "flag_of(epoch, code) & ~_COUNTED", _column(), "flag_of(1, 0)"
    ),
    "a replay does not count": _lost(
        _X, "_delivery", "flag_of(1, 0), _COUNTED", _column(captured=True), "0, _COUNTED"
    ),
    "the awaited word is written in the stream that pushes": _lost(
        _X,
        "_delivery",
        "self.handle.stream_write_value32(self.awaited_words[slot], 0, word)",
        _column(),
        "self.side.entered().__enter__(); "
        "self.handle.stream_write_value32(self.awaited_words[slot], 0, word); "
        "self.side.entered().__exit__(None, None, None)",
    ),
    "rows stay in a slot that is written again": _lost(
        FlagKernels,
        "copy_of",
        "return self._summed(",
        _in_flight,
        "self._summed(delivery, slots, None, slice(0, delivery.plan.rows), tree=False)\n"
        "    return delivery.memory\n    self._summed(",
    ),
    # kernels that wait for rows
    **{
        f"{kernel} does not wait for its rows": _lost(owner, name, wait, _program(program), not_told)
        for kernel, owner, name, wait, program, not_told in (
            ("glu", Plain, "unit", "wait=wait", "gated mlp", "wait={}"),
            ("dglu", Plain, "unit_gradients", "g, u, unit, wait=wait", "gated mlp", "g, u, unit, wait={}"),
            ("dgrad_act", Plain, "unit_gradients", "sums, wait=wait", _MLP, "sums, wait={}"),
            ("scaled_linear", Quantized, "_product_into", "wait=wait", "column in fp8", "wait={}"),
        )
    },
    "kernels wait for flags of the other slot": _lost(
        flag_waits, "_arrivals", "delivery.flags", _gated(), "exchange.flags[1 - delivery.slot]"
    ),
    "kernels multiply rows of the other slot": _lost(
        Plain,
        "each",
        "compute(slice(0, tokens), full,",
        _gated(),
        "compute(slice(0, tokens), delivery.exchange.memories[1 - delivery.slot],",
    ),
    "a tile waits for the rows of another tile": _lost(
        models,
        "_as_rows_arrive",
        "range(t // chunk_rows, (rows.stop - 1) // chunk_rows + 1)",
        _gated(),
        "range(*[index // col_tiles * block_rows // chunk_rows + end for end in (0, 1)])",
    ),
    "a tile waits for the first of its chunks": _lost(
        models, "_as_rows_arrive", "(rows.stop - 1) // chunk_rows + 1", _gated(), "t // chunk_rows + 1"
    ),
    "a call is released before its rows are read": _lost(
        Mailboxes,
        "gather",
        "delivery.keep(shard)",
        partial(gathers_in_flight, Machine(2), multiplied=True),
        "delivery.keep(shard), delivery.end()",
    ),
    # processors
    "a kernel waits for rows behind a barrier without a processor": _lost(
        _D, "before_kernels_wait", "current.wait_event(self._barrier)", _in_flight
    ),
    "calls in two streams are not ordered": _lost(
        StreamOrder, "current", "current.wait_stream(last)", _two_streams
    ),
    # collectives
    "rows are read before their collective has ended": _lost(
        Launches, "_wait", "work.wait()", _column(transport="c10d")
    ),
    "rows of a later round are not awaited": _lost(
        Collectives,
        "gather",
        "return Gather(full, arriving,",
        _column(transport="c10d", rounds=2),
        "return Gather(full, arriving[:1] + [(rows, None) for rows, _ in arriving[1:]],",
    ),
    "slots are summed before they are there": _lost(
        Collectives, "reduce", "Reduce(terms, waits,", _row(transport="c10d"), "Reduce(terms, (),"
    ),
    "own rows are not kept": _lost(
        Collectives, "gather", "full[own].copy_(shard)", _column(transport="c10d", rounds=2)
    ),
    "products leave no processors to a collective in flight": _lost(
        CollectivesInFlight, "begin", "settings.begin(reservation)", _column(transport="c10d", rounds=2)
    ),
    "mm by cuBLAS runs beside a collective": _lost(
        ReservedSms,
        "_write",
        "self._prefer(self._prefer_lt > 0 and not self._pauses)",
        _column(transport="c10d", rounds=2),
    ),
    "reserved SMs are never given back": _lost(
        CollectivesInFlight, "end", "settings.end(reservation)", _column(transport="c10d", rounds=2)
    ),
    "torch's preferred library is never restored": _lost(
        ReservedSms,
        "_prefer",
        "torch._C._set_blas_preferred_backend(kinds.Cublas)",
        _column(transport="c10d", rounds=2),
    ),
    "buckets reserve nothing beside backward": _lost(
        cases.BucketModel,
        "_launch",
        'IN_FLIGHT.begin(self._group, torch.device("cuda", 0))',
        _buckets(2, 1),
        'IN_FLIGHT.begin(self._group, torch.device("cpu"))',
    ),
    "two groups reserve the blocks of one": _lost(
        ReservedSms,
        "_change",
        "self._reserved = max(self._reserved + sign * by.sms, 0)",
        _buckets(4, 2),
        "self._reserved = by.sms * (sign > 0)",
    ),
    "buckets are not awaited": _lost(
        cases.BucketModel, "finish", "self._side.let(torch.cuda.current_stream())", _buckets(2, 1)
    ),
    # streams of the caller
    "a stream is not joined": _lost(cases, "two_streams", "streams[0].wait_stream(streams[1])", _two_streams),
    "a stream begins before its operands are there": _lost(
        cases.BucketModel, "_launch", "self._side.wait_for(current)", _buckets(2, 1)
    ),
    "a result is awaited on another stream than reads it": _lost(
        Launches,
        "_wait",
        "work.wait()",
        _column(transport="c10d"),
        "with torch.Stream():\n            work.wait()",
    ),
    # barriers and ranks that do not come
    "barriers before kernels that push have the channel of pushes": _lost(
        _D,
        "before_kernels_push",
        "self.exchange.barrier(1)",
        partial(sums_in_flight, Machine(2)),
        "self.exchange.barrier(0)",
    ),
    "the host never reads whether a wait has run out": _lost(
        _X, "late", "return self._seen_word[0]", _never_comes, "return 0"
    ),
    "the host is never told whether a wait has run out": _lost(_X, "_delivery", "self.look()", _never_comes),
    "processors are not left for long enough": _lost(
        Launches,
        "_occupy",
        "self._occupies = True",
        _program(_MLP, transport="c10d"),
        "IN_FLIGHT.end(self._call.group)",
    ),
    # captures
    "kernels are loaded in a capture": Fault(
        lambda: edited(_X, "count_by", "kernels.advance(words[0], words[1], 1, 0)", "pass"),
        _column(captured=True),
    ),
}
