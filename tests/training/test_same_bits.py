"""A run's digits do not depend on who comes first, on what else the machine does, or on the transport."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.cli.planted_bits import order_of_arrival
from tests.models.small import LLAMA
from tpkernels import create_parallel_state, plan_groups
from tpkernels.cli.bits_schedule import drawn, imposed
from tpkernels.comm import schedule
from tpkernels.comm.transports import select
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

UNCUT_BYTES = 2**17
Digits = tuple[list[tuple[str, str]], str]  # loss and gradient norm of each step; a hash of the weights


def trained(path: str, tensor: int, transport: str, seed: int, steps: int, mutant: bool = False) -> Digits:
    """Each step under another schedule."""
    world, rank = dist.get_world_size(), dist.get_rank()
    config = TrainConfig(
        model=LLAMA.with_sizes(vocab_size=256, num_kv_heads=4),
        data=path,
        steps=steps,
        batch=8,
        tokens=8,
        warmup=2,
        seed=5,
        accumulate=2,
        sequence_parallel=True,
    )
    digits = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(select, "requested_transport", transport))
        # other tests cut even tiny shards in these processes, and transports cut unlike each other
        stack.enter_context(patch.object(schedule, "LEAST_BYTES", UNCUT_BYTES))
        stack.enter_context(order_of_arrival() if mutant else nullcontext())
        state = create_parallel_state(plan_groups(world_size=world, tensor=tensor))
        trainer = Trainer(config, state, torch.device("cpu"))
        for step in range(steps):
            with imposed(drawn(seed + step, "train", world), rank):
                report = trainer.step()
            digits.append((report.loss.hex(), report.norm.hex()))
    weights = hashlib.sha256()
    for parameter in trainer.model.parameters():
        weights.update(parameter.detach().contiguous().numpy().tobytes())
    return digits, weights.hexdigest()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(32, 120)) * 20)
    return str(path)


@pytest.mark.parametrize(("tensor", "steps"), [(2, 50), (4, 10)])
def test_steps_under_other_loads_and_over_another_transport_have_equal_digits(ranks4, text, tensor, steps):
    over_c10d = ranks4.run(trained, text, tensor, "c10d", 1, steps)
    over_shared = ranks4.run(trained, text, tensor, "shared", 1001, steps)
    for (digits, weights), (others, other_weights) in zip(over_c10d, over_shared, strict=True):
        assert len(set(digits)) == steps
        assert digits == others
        assert weights == other_weights


def test_a_sum_in_the_order_of_arrival_has_other_digits(ranks4, text):
    (sound, _), *_ = ranks4.run(trained, text, 4, "c10d", 1, 5)
    (faulty, _), *_ = ranks4.run(trained, text, 4, "c10d", 1, 5, True)
    assert faulty != sound
