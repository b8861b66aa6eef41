"""A checkpoint that other numbers of ranks took and passed on is the same to the last bit."""

from unittest.mock import patch

import pytest
import torch

from tests.training.test_training import config_for
from tpkernels import create_parallel_state, plan_groups
from tpkernels.buckets import gradients as buckets_module
from tpkernels.interop import dcp
from tpkernels.training.trainer import Trainer

STEPS = 3


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 120)) * 20)
    return config_for(text, dtype=torch.float32)


def trainer_for(config, tensor):
    world = torch.distributed.get_world_size()
    state = create_parallel_state(plan_groups(world_size=world, tensor=tensor))
    return Trainer(config, state, torch.device("cpu"))


def losses_after(trainer):
    return [trainer.step().loss for _ in range(STEPS)]


def begin(config, tensor, folder):
    trainer = trainer_for(config, tensor)
    losses_after(trainer)
    trainer.save(folder)
    return losses_after(trainer)


def pass_on(config, tensor, taken, given):
    """Take a checkpoint, give another; what comes after it."""
    trainer = trainer_for(config, tensor)
    trainer.resume(dcp.latest(taken))
    trainer.save(given)
    return losses_after(trainer)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("ranks1", 1), ("ranks2", 2)), (("ranks2", 1), ("ranks1", 1)), (("ranks2", 2), ("ranks4", 2))],
    ids=["tp1_tp2_tp1", "dp2_dp1_dp2", "tp2_tp2dp2_tp2"],
)
def test_there_and_back_goes_on_to_the_digit(first, second, config, tmp_path, request):
    (home, tensor), (abroad, other_tensor) = first, second
    home, abroad = request.getfixturevalue(home), request.getfixturevalue(abroad)
    undisturbed = home.run(begin, config, tensor, tmp_path / "a")[0]
    elsewhere = abroad.run(pass_on, config, other_tensor, tmp_path / "a", tmp_path / "b")[0]
    assert elsewhere == pytest.approx(undisturbed, rel=1e-5)  # sums are taken in another order
    for losses in home.run(pass_on, config, tensor, tmp_path / "b", tmp_path / "c"):
        assert losses == undisturbed


def in_buckets_from(smallest, run, *arguments):
    """(how many buckets there were, what `run` gives)"""
    made = []
    with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
        lay_out = buckets_module.lay_out_buckets
        with patch.object(
            buckets_module, "lay_out_buckets", lambda *given: made.append(lay_out(*given)) or made[-1]
        ):
            losses = run(*arguments)
    return len(made[-1].elements), losses


def test_checkpoints_do_not_depend_on_sizes_of_buckets(config, tmp_path, ranks2):
    """They hold full tensors, so that runs go on from those that were made with buckets of other sizes."""
    few, undisturbed = ranks2.run(in_buckets_from, 2**40, begin, config, 1, tmp_path / "a")[0]
    for many, losses in ranks2.run(in_buckets_from, 1, pass_on, config, 1, tmp_path / "a", tmp_path / "b"):
        assert losses == undisturbed
        assert (few, many) == (1, 4)
