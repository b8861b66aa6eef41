"""From a profiler's events to spans of phases and transfers; the trace of a step with its parts' names."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from tests.on_ranks import on_ranks
from tests.training.small import config_for, losses_of, trainer_for
from tpkernels.training.profile import (
    ProfiledEvent,
    StepProfile,
    phase,
    seconds_at_once,
    spans_of,
    traced,
    union,
)

NODE = "autograd::engine::evaluate_function: MmBackward"


def event(name, start, stop, *, thread=1, on_device=False, number=0, launched_by=0):
    return ProfiledEvent(name, start, stop, thread, on_device, number, launched_by)


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


def test_transfers_that_overlap_are_one_and_short_pauses_are_passed_over():
    events = [event(NODE, 0.0, 1.0), event("aten::mm", 0.0, 1.0)]
    events += [event("gloo:send", 0.5, 2.0), event("gloo:recv", 0.6, 1.5), event("gloo:all_reduce", 3.0, 3.5)]
    flights = [span for span in spans_of(3, events, on_gpu=False) if span.doing == "transfers"]
    assert [(span.rank, span.start, span.stop) for span in flights] == [(3, 0.5, 2.0), (3, 3.0, 3.5)]
    pieces = [event("", 3.0, 4.0), event("", 0.0, 1.0), event("", 1.05, 2.0), event("", 0.2, 0.3)]
    assert union(pieces, 0.1) == [(0.0, 2.0), (3.0, 4.0)]
    assert union(pieces, 0.0) == [(0.0, 1.0), (1.05, 2.0), (3.0, 4.0)]


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


@pytest.mark.parametrize("shown", [1, 2])
@on_ranks(2)
def test_first_rank_gets_the_spans_of_all_or_of_the_first_of_many(shown):
    with patch("tpkernels.training.profile.SHOWN_RANKS", shown):
        result, spans = traced(step)
    assert result == 3.0
    found = {(span.rank, span.doing, span.phase) for span in spans}
    if dist.get_rank() == 1:
        assert not found
        return
    assert {rank for rank, *_ in found} == {*range(shown)}
    for rank in range(shown):
        assert {(rank, "computes", phase) for phase in ("forward", "backward", "optimizer")} <= found
        assert (rank, "transfers", "") in found


PHASES = ("forward", "backward", "clipping: norm of the gradients", "optimizer step", "bucket 0 of 1")


def run_twice(config, folder):
    losses = []
    for with_profile in (False, True):
        trainer = trainer_for(config, 1)
        if with_profile:
            trainer.step_context = StepProfile(
                folder, torch.distributed.get_rank(), done=0, steps=config.steps
            )
        losses.append(losses_of(trainer, config.steps))
    return losses, trainer.step_context.outcome()


def test_each_rank_writes_the_parts_of_one_step(text, tmp_path, ranks2):
    folder = tmp_path / "traces"
    (folder / "step-00000004-rank-1.json" / "in the way").mkdir(parents=True)  # where nothing can be written
    (first, said_first), (second, said_second) = ranks2.run(run_twice, config_for(text, accumulate=2), folder)
    for plain, profiled in (first, second):
        assert profiled == plain
    assert said_first == f"profile of step 4: {folder}/step-00000004-rank-*.json"
    assert said_second.startswith("no profile: ")
    events = json.loads((folder / "step-00000004-rank-0.json").read_text())["traceEvents"]
    names = [event["name"].removeprefix("tpkernels: ") for event in events if "dur" in event]
    counts = [sum(name.startswith(part) for name in names) for part in PHASES]
    assert counts == [2, 2, 1, 1, 1]


def test_a_step_that_never_comes_is_told(tmp_path):
    late = StepProfile(tmp_path, 0, done=8, steps=10, step=3)
    assert not late.comes
    assert late.outcome() == "no profile: step 3 did not come; this run began after 8 of 10"
    assert not StepProfile(tmp_path, 0, done=0, steps=10, step=11).comes
    assert StepProfile(tmp_path, 0, done=8, steps=10).step == 10
    assert StepProfile(tmp_path, 0, done=2, steps=10).step == 6


def test_on_gpus_parts_are_ranges_of_nvtx_too(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))

    @phase("second")
    def second():
        said.append("work")

    with profile() as trace, phase("first"):
        second()
    assert said == ["tpkernels: first", "tpkernels: second", "work", "end", "end"]
    assert {"tpkernels: first", "tpkernels: second"} <= {event.name for event in trace.events()}
