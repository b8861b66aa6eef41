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
from tests.training.small import TINY, config_for, trainer_for
from tpkernels.cli.bits_schedule import drawn, imposed
from tpkernels.comm import schedule
from tpkernels.comm.transports import select

UNCUT_BYTES = 2**17
LONG = [(2, 50), (4, 10)]
Digits = tuple[list[tuple[str, str]], str]  # loss and gradient norm of each step; a hash of the weights


def trained(path: Path, tensor: int, transport: str, seed: int, steps: int, mutant: bool = False) -> Digits:
    """Each step under another schedule."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = TINY.with_sizes(num_kv_heads=4)
    options = {"accumulate": 2, "sequence_parallel": True, "dtype": torch.float32}
    config = config_for(path, model=model, steps=steps, **options)
    digits = []
    with ExitStack() as stack:
        stack.enter_context(patch.object(select, "requested_transport", transport))
        # other tests cut even tiny shards in these processes, and transports cut unlike each other
        stack.enter_context(patch.object(schedule, "LEAST_BYTES", UNCUT_BYTES))
        stack.enter_context(order_of_arrival() if mutant else nullcontext())
        trainer = trainer_for(config, tensor)
        for step in range(steps):
            with imposed(drawn(seed + step, "train", world), rank):
                report = trainer.step()
            digits.append((report.loss.hex(), report.norm.hex()))
    weights = hashlib.sha256()
    for parameter in trainer.model.parameters():
        weights.update(parameter.detach().contiguous().numpy().tobytes())
    return digits, weights.hexdigest()


@pytest.mark.parametrize(
    ("tensor", "steps"), [(2, 3), (4, 2), *(pytest.param(*many, marks=pytest.mark.sweep) for many in LONG)]
)
def test_steps_under_other_loads_and_over_another_transport_have_equal_digits(ranks4, text, tensor, steps):
    over_c10d = ranks4.run(trained, text, tensor, "c10d", 1, steps)
    over_shared = ranks4.run(trained, text, tensor, "shared", 1001, steps)
    for (digits, weights), (others, other_weights) in zip(over_c10d, over_shared, strict=True):
        assert len(set(digits)) == steps
        assert digits == others
        assert weights == other_weights


def test_a_sum_in_the_order_of_arrival_has_other_digits(ranks4, text):
    (sound, _), *_ = ranks4.run(trained, text, 4, "c10d", 1, 3)
    (faulty, _), *_ = ranks4.run(trained, text, 4, "c10d", 1, 3, True)
    assert faulty != sound
