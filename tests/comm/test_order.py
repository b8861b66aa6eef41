"""Slots are free when rows land in them: all orders of events in small cases, with and without barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tpkernels.comm.schedule import reusable_after
from tpkernels.comm.transports.order import CallOrder

Program = tuple[tuple[str, int], ...]  # of the host: ("begin", call) and ("read", call)
Rule = Callable[[CallOrder], tuple[int, bool]]
Step = tuple[str, int, int]  # what, of which call, to which rank


def programs(calls: int) -> Iterator[Program]:
    """All that hosts can do: calls begin in order, and are read before the next one in their slot begins."""

    def continued(done: Program, begun: int, unread: frozenset[int]) -> Iterator[Program]:
        if begun == calls and not unread:
            yield done
        if begun < calls and all(call > reusable_after(begun + 1) for call in unread):
            yield from continued((*done, ("begin", begun + 1)), begun + 1, unread | {begun + 1})
        for call in sorted(unread):
            yield from continued((*done, ("read", call)), begun, unread - {call})

    yield from continued((), 0, frozenset())


def streams_of(program: Program, rank: int, ranks: int, rule: Rule, pushes_by: str) -> list[list[Step]]:
    """What one rank enqueues: in the stream that computes, and in the one beside it.

    pushes_by: "copies" of the second stream, or "kernels" of the first
    """
    computing: list[Step] = []
    beside: list[Step] = []
    order = CallOrder()
    for what, call in program:
        if what == "read":
            computing += [("start", call, rank), ("read", call, rank)]
            order.released(call)
            continue
        epoch, needs_barrier = rule(order)
        assert epoch == call
        pushing = computing
        if pushes_by == "copies":
            pushing = beside
            computing.append(("event", call, rank))
            beside.append(("follow", call, rank))
        if needs_barrier:
            pushing.append(("arrive", call, rank))
            pushing.append(("leave", call, rank))
        pushing += [("push", call, (rank - step) % ranks) for step in range(ranks)]
    return [computing, beside]


def mishap(
    program: Program,
    ranks: int,
    rule: Rule,
    pushes_by: str,
    before_in_slot: Callable[[int], int] = reusable_after,
    readers_follow_barriers: bool = True,
) -> str:
    """What happens in some order of events, if anything does: rows are overwritten, or nobody can go on.

    A kernel that reads takes all processors from its start on, and a barrier starts only where there is one.
    before_in_slot: the call that was the last in the slot of a call
    readers_follow_barriers: whether kernels that read a call start once its barrier is over
    """
    queues = [q for rank in range(ranks) for q in streams_of(program, rank, ranks, rule, pushes_by)]
    places = {step: (index, at) for index, queue in enumerate(queues) for at, step in enumerate(queue)}
    pushed: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, queue in enumerate(queues):
        for at, (what, call, to) in enumerate(queue):
            if what == "push":
                pushed.setdefault((call, to), []).append((index, at))

    def enabled(step: Step, done: Sequence[int]) -> bool:
        """Whether what a step waits for is done; `done` counts the steps of each queue."""
        what, call, rank = step
        if what == "follow":
            index, at = places["event", call, rank]
            return done[index] > at
        if what == "start":
            barrier = places.get(("leave", call, rank))
            return not readers_follow_barriers or barrier is None or done[barrier[0]] > barrier[1]
        if what == "arrive":
            computing = 2 * rank
            return done[computing] == 0 or queues[computing][done[computing] - 1][0] != "start"
        if what == "leave":
            arrivals = (places["arrive", call, peer] for peer in range(ranks))
            return all(done[index] > at for index, at in arrivals)
        if what == "read":  # waits for the flags of all
            return all(done[index] > at for index, at in pushed[call, rank])
        return True

    def lands_in_use(step: Step, done: Sequence[int]) -> bool:
        what, call, to = step
        before = places.get(("read", before_in_slot(call), to))
        return what == "push" and before is not None and done[before[0]] <= before[1]

    start = (0,) * len(queues)
    seen, ahead = {start}, [start]
    while ahead:
        done = ahead.pop()
        able = [
            index
            for index, queue in enumerate(queues)
            if done[index] < len(queue) and enabled(queue[done[index]], done)
        ]
        if not able and any(done[index] < len(queue) for index, queue in enumerate(queues)):
            return "stuck"
        for index in able:
            if lands_in_use(queues[index][done[index]], done):
                return "overwritten"
            following = (*done[:index], done[index] + 1, *done[index + 1 :])
            if following not in seen:
                seen.add(following)
                ahead.append(following)
    return ""


def never(order: CallOrder) -> tuple[int, bool]:
    return order.begin()[0], False


def if_the_call_before_is_unread(order: CallOrder) -> tuple[int, bool]:
    """Forgets whether the other rank had read the call before that."""
    unread = order.read < order.begun
    return order.begin()[0], unread


MORE = [pytest.param(ranks, calls, marks=pytest.mark.sweep) for ranks, calls in ((2, 5), (3, 4))]


def always(order: CallOrder) -> tuple[int, bool]:
    return order.begin()[0], True


@pytest.mark.parametrize("pushes_by", ["copies", "kernels"])
@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 3), *MORE])
def test_no_order_of_events_overwrites_rows_that_are_still_to_be_read(ranks, calls, pushes_by):
    assert {mishap(p, ranks, CallOrder.begin, pushes_by) for p in programs(calls)} == {""}


@pytest.mark.parametrize("pushes_by", ["copies", "kernels"])
@pytest.mark.parametrize("rule", [never, if_the_call_before_is_unread])
def test_a_rule_that_lacks_a_barrier_shows(rule, pushes_by):
    found = {p: mishap(p, 2, rule, pushes_by) for p in programs(4)}
    assert set(found.values()) == {"", "overwritten"}
    assert all(needed(p) != needed(p, rule) for p, what in found.items() if what)


def test_a_reader_that_starts_before_the_barrier_of_its_call_takes_the_processor_that_it_needs():
    found = {mishap(p, 2, CallOrder.begin, "copies", readers_follow_barriers=False) for p in programs(4)}
    assert found == {"", "stuck"}


def needed(program: Program, rule: Rule = CallOrder.begin) -> list[int]:
    """The calls that need a barrier."""
    order, found = CallOrder(), []
    for what, call in program:
        if what == "read":
            order.released(call)
        elif rule(order)[1]:
            found.append(call)
    return found


def test_calls_need_a_barrier_only_while_two_are_in_flight():
    plain = tuple(step for call in range(1, 9) for step in (("begin", call), ("read", call)))
    assert needed(plain) == []
    assert mishap(plain, 2, never, "copies") == ""
    program = [("begin", 1), ("read", 1), ("begin", 2), ("begin", 3), ("read", 3), ("read", 2)]
    program += [step for call in (4, 5, 6) for step in (("begin", call), ("read", call))]
    assert needed(tuple(program)) == [3, 4]


@pytest.mark.parametrize("pushes_by", ["copies", "kernels"])
@pytest.mark.parametrize("slots", [(1,), (1, 0, 1)])
def test_a_replayed_graph_uses_slots_again_at_once_and_needs_a_barrier_in_each_call(slots, pushes_by):
    used = [slot for _replay in range(3) for slot in slots]  # of calls 1, 2, ...
    program = tuple(step for call in range(1, len(used) + 1) for step in (("begin", call), ("read", call)))

    def before_in_slot(call: int) -> int:
        earlier = [other for other in range(1, call) if used[other - 1] == used[call - 1]]
        return max(earlier, default=0)

    assert mishap(program, 2, always, pushes_by, before_in_slot) == ""
    assert mishap(program, 2, CallOrder.begin, pushes_by, before_in_slot) == "overwritten"


def test_a_call_that_nobody_reads_is_followed_by_a_barrier_and_then_by_a_refusal():
    order = CallOrder()
    for call in (1, 2):
        order.begin()
        order.released(call)
    assert order.begin() == (3, False)  # and nobody reads it
    assert order.begin() == (4, True)
    order.released(4)
    assert "expected call 3 to be released before call 5 begins" in order.refusal()
    order.released(3)
    assert order.refusal() == ""
    assert order.read == 4
