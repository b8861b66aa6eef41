"""The trace of a step, with the names of its phases."""

import json

import torch
from torch.profiler import profile

from tests.training.small import config_for, losses_of, trainer_for
from tpkernels.training.profile import StepProfile, phase

PHASES = ("forward", "backward", "clipping: norm of the gradients", "optimizer step", "bucket 0 of 1")


def run_twice(config, folder):
    losses = []
    for with_profile in (False, True):
        trainer = trainer_for(config, 1)
        if with_profile:
            rank = torch.distributed.get_rank()
            trainer.step_context = StepProfile(folder, rank, done=0, steps=config.steps)
        losses.append(losses_of(trainer, config.steps))
    return losses, trainer.step_context.outcome()


def test_each_rank_writes_the_phases_of_one_step(text, tmp_path, ranks2):
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


def test_the_step_is_one_after_warming_up_or_the_last(tmp_path):
    assert StepProfile(tmp_path, 0, done=2, steps=10).step == 6
    assert StepProfile(tmp_path, 0, done=8, steps=10).step == 10


def test_on_gpus_phases_are_ranges_of_nvtx_too(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))

    @phase("second")
    def second():
        said.append("work")

    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace, phase("first"):
        second()
    assert said == ["tpkernels: first", "tpkernels: second", "work", "end", "end"]
    assert {"tpkernels: first", "tpkernels: second"} <= {event.name for event in trace.events()}
