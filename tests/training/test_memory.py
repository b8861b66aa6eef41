"""The report on memory: bytes that can be reckoned, and the rank that had most."""

import pytest
import torch

from tests.training.test_training import config_for
from tpkernels import create_parallel_state, plan_groups
from tpkernels.training.measures import _peak_of_process, largest_memory
from tpkernels.training.trainer import Trainer


def reported(config):
    state = create_parallel_state(plan_groups(world_size=2, tensor=1))
    trainer = Trainer(config, state, torch.device("cpu"))
    trainer.step()
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    return largest_memory(trainer), elements, _peak_of_process()


def test_bytes_are_those_of_the_plan_and_the_worst_rank_is_named(tmp_path, ranks2):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 120)) * 20)
    config = config_for(text, dtype=torch.bfloat16)
    (memory, elements, peak), (other, _, other_peak) = ranks2.run(reported, config)
    assert memory == other
    assert memory.rank == (peak < other_peak)
    assert memory.peak == pytest.approx(max(peak, other_peak), rel=0.01)
    assert memory.weights == 2 * elements
    padded = memory.gradients // 4
    assert elements <= padded < elements + 64 * 50  # each parameter begins at a multiple of 64
    assert 0 <= memory.optimizer - 12 * padded // 2 < 100  # this rank's half; each bucket counts its steps
    assert memory.line().startswith(
        f"memory of rank {memory.rank}, the largest: weights {memory.weights / 2**20:.2f} MiB, gradients "
    )
    assert "peak resident set of the process" in memory.line()
