"""From a profiler's events to spans: phases, transfers, ranks; on made-up events and on a real step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tpkernels.training.step_trace import Event, seconds_at_once, spans_of, traced, union

NODE = "autograd::engine::evaluate_function: MmBackward"


def event(name, start, stop, *, thread=1, on_device=False, number=0, launched_by=0):
    return Event(name, start, stop, thread, on_device, number, launched_by)


def summary(spans):
    return [(span.doing, span.phase, span.start, span.stop) for span in sorted(spans, key=lambda s: s.start)]


def test_operators_have_the_phase_that_they_ran_in():
    events = [
        event("aten::mm", 0.0, 1.0),
        event("aten::mm_inner", 0.2, 0.9),
        event(NODE, 2.0, 3.0),
        event("aten::mm", 2.1, 2.9),
        event("aten::mm", 4.0, 4.5),  # of the second part of a batch
        event(NODE, 5.0, 6.0),
        event("aten::mm", 5.0, 6.0),
        event("aten::add_", 6.5, 7.0),
        event("python", 0.0, 7.0),
        event("aten::copy_", 3.2, 3.3, thread=9),  # gloo's own
    ]
    assert summary(spans_of(0, events, on_gpu=False)) == [
        ("computes", "forward", 0.0, 1.0),
        ("computes", "backward", 2.1, 2.9),
        ("computes", "forward", 4.0, 4.5),
        ("computes", "backward", 5.0, 6.0),
        ("computes", "optimizer", 6.5, 7.0),
    ]


def test_transfers_that_overlap_are_one():
    events = [event(NODE, 0.0, 1.0), event("aten::mm", 0.0, 1.0)]
    events += [event("gloo:send", 0.5, 2.0), event("gloo:recv", 0.6, 1.5), event("gloo:all_reduce", 3.0, 3.5)]
    flights = [span for span in spans_of(3, events, on_gpu=False) if span.doing == "transfers"]
    assert [(span.rank, span.start, span.stop) for span in flights] == [(3, 0.5, 2.0), (3, 3.0, 3.5)]


def test_kernels_have_the_phase_of_what_launched_them():
    events = [
        event("aten::mm", 0.0, 0.1, number=1),
        event(NODE, 0.1, 0.2, thread=2),
        event("aten::mm", 0.11, 0.19, thread=2, number=2),
        event("aten::add_", 0.3, 0.31, number=3),
        event("nccl:all_reduce", 0.15, 0.16, thread=2, number=4),
        event("cudaLaunchKernel", 0.35, 0.36, number=1, launched_by=3),  # counts for itself
        event("gemm", 1.0, 2.0, on_device=True, launched_by=1),
        event("gemm", 2.5, 3.0, on_device=True, launched_by=2),
        event("ncclDevKernel_AllReduce", 2.6, 2.9, on_device=True, launched_by=4),
        event("Memset (Device)", 3.2, 3.3, on_device=True),
        event("add", 3.5, 4.0, on_device=True, launched_by=3),
        event("unlinked", 4.5, 5.0, on_device=True, launched_by=77),
    ]
    assert summary(spans_of(0, events, on_gpu=True)) == [
        ("computes", "forward", 1.0, 2.0),
        ("computes", "backward", 2.5, 3.0),
        ("transfers", "", 2.6, 2.9),
        ("computes", "optimizer", 3.5, 4.0),
        ("computes", "optimizer", 4.5, 5.0),
    ]


def test_a_step_without_backward_or_events_is_no_mistake():
    assert spans_of(0, [], on_gpu=False) == []
    assert spans_of(0, [event("python", 0.0, 1.0)], on_gpu=False) == []
    assert [span.doing for span in spans_of(0, [event("gloo:send", 0.0, 1.0)], on_gpu=False)] == ["transfers"]
    # operators only launch kernels, so that their times say nothing; the profiler may not be let in
    events = [event(NODE, 0.0, 1.0), event("aten::mm", 0.0, 1.0), event("nccl:all_reduce", 0.0, 1.0)]
    assert spans_of(0, events, on_gpu=True) == []


def test_union_passes_over_short_pauses():
    pieces = [event("", 3.0, 4.0), event("", 0.0, 1.0), event("", 1.05, 2.0), event("", 0.2, 0.3)]
    assert union(pieces, 0.1) == [(0.0, 2.0), (3.0, 4.0)]
    assert union(pieces, 0.0) == [(0.0, 1.0), (1.05, 2.0), (3.0, 4.0)]


def test_hidden_time_is_counted_on_each_rank_for_itself():
    spans = []
    for rank, busy in enumerate((4.0, 1.0)):
        events = [event(NODE, 0.0, busy), event("aten::mm", 0.0, busy), event("gloo:send", 3.0, 5.0)]
        spans += spans_of(rank, events, on_gpu=False)
    assert seconds_at_once(spans) == (4.0, 1.0)


def step():
    x = torch.randn(200, 200, requires_grad=True)
    (x @ x).sum().backward()
    dist.all_reduce(x.grad)
    return float(torch.ones(3).sum())


def trace_a_step():
    result, spans = traced(step)
    return result, [(span.rank, span.doing, span.phase) for span in spans]


def test_first_rank_gets_the_spans_of_all(ranks2):
    (one, spans), (other, none) = ranks2.run(trace_a_step)
    assert one == other == 3.0
    assert none == []
    for rank in (0, 1):
        for phase in ("forward", "backward", "optimizer"):
            assert (rank, "computes", phase) in spans
        assert (rank, "transfers", "") in spans


def only_the_first_rank_records():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpkernels.training.step_trace.SHOWN_RANKS", 1)
        return trace_a_step()


def test_of_many_ranks_the_first_are_shown(ranks2):
    (_, spans), _ = ranks2.run(only_the_first_rank_records)
    assert {rank for rank, *_ in spans} == {0}
