"""A trace of one step with the names of its parts, and a run that goes on as if it had not been traced."""

import json

import pytest
import torch
from torch.profiler import profile

from tests.training.test_training import config_for
from tpkernels import create_parallel_state, plan_groups
from tpkernels.training.profile import StepProfile, phase
from tpkernels.training.trainer import Trainer

PHASES = ("forward", "backward", "clipping: norm of the gradients", "optimizer step", "bucket 0 of 1")


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 120)) * 20)
    return config_for(text, accumulate=2)


def traced(config, folder):
    state = create_parallel_state(plan_groups(world_size=2, tensor=1))
    losses = []
    for with_profile in (False, True):
        trainer = Trainer(config, state, torch.device("cpu"))
        if with_profile:
            trainer.step_context = StepProfile(
                folder, torch.distributed.get_rank(), done=0, steps=config.steps
            )
        losses.append([trainer.step().loss for _ in range(config.steps)])
    return losses, trainer.step_context.outcome()


def test_each_rank_writes_the_parts_of_one_step(config, tmp_path, ranks2):
    folder = tmp_path / "traces"
    (folder / "step-00000004-rank-1.json" / "in the way").mkdir(parents=True)  # where nothing can be written
    (first, said_first), (second, said_second) = ranks2.run(traced, config, folder)
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
