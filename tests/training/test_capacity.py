"""What cannot fit is refused before anything is allocated, and what may fit is not."""

import pytest
import torch

from tests.training.small import CPU, config_for, trainer_for
from tpkernels.models.config import model_config
from tpkernels.training import capacity
from tpkernels.training.capacity import least_bytes, memory_of_machine, require_room
from tpkernels.training.measures import largest_memory


def seen_and_needed(config, tensor):
    """What a rank held after a step, and what was said before."""
    trainer = trainer_for(config, tensor)
    trainer.step()
    memory = largest_memory(trainer)
    data = torch.distributed.get_world_size() // tensor
    return memory.weights + memory.gradients + memory.optimizer, least_bytes(config, tensor, data)


@pytest.mark.parametrize("tensor", [1, 2])
def test_no_more_is_counted_than_a_run_holds(tensor, text, ranks2):
    config = config_for(text, dtype=torch.float32)
    elements = config.batch * config.tokens
    activations = 16 * elements + 4 * config.model.num_layers * elements * config.model.hidden_size
    for held, needed in ranks2.run(seen_and_needed, config, tensor):
        assert held / 2 < needed <= held + activations


def config_of(tmp_path, *, batch=4, tokens=16, **sizes):
    config = config_for(tmp_path / "text.txt", dtype=torch.float32)
    model = model_config("gpt2-small", max_positions=None, **sizes)
    return type(config)(model=model, data=config.data, steps=1, batch=batch, tokens=tokens)


@pytest.mark.parametrize(
    "huge",
    [
        {"vocab_size": 9999999999999},
        {"num_layers": 10**9},
        {"ffn_hidden_size": 10**400},
        {"batch": 10**12},
        {"tokens": 10**12},
    ],
    ids=str,
)
def test_huge_sizes_are_refused_with_the_memory_they_need(huge, tmp_path):
    with pytest.raises(
        ValueError, match=r"^a rank needs at least [\d,.]+ GiB .* this machine has [\d.]+ GiB"
    ):
        require_room(config_of(tmp_path, **huge), 1, 1, local=1, device=CPU)


def test_ranks_of_a_machine_share_its_memory(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    needed = least_bytes(config, 1, 2) + capacity.PROCESS
    monkeypatch.setattr(capacity, "memory_of_machine", lambda: 2 * needed)
    require_room(config, 1, 2, local=2, device=CPU)
    with pytest.raises(ValueError, match=r"^3 ranks need at least"):
        require_room(config, 1, 2, local=3, device=CPU)


def test_memory_of_this_machine_is_plausible():
    assert 2**28 < memory_of_machine() < 2**50
