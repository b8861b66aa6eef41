"""A checkpoint that other numbers of ranks took and passed on is the same to the last bit."""

import warnings
from unittest.mock import patch

import pytest
import torch

from tests.products import once
from tests.training.small import config_for, losses_of, trainer_for
from tpkernels.buckets import gradients as buckets_module
from tpkernels.interop import dcp


def begin(config, tensor, folder, steps):
    trainer = trainer_for(config, tensor)
    losses_of(trainer, steps)
    trainer.save(folder)
    return losses_of(trainer, 2)


def pass_on(config, tensor, taken, given):
    """Take a checkpoint, give another; what comes after it."""
    trainer = trainer_for(config, tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random streams of other ranks: nothing is drawn
        trainer.resume(dcp.latest(taken))
    trainer.save(given)
    return losses_of(trainer, 2)


ROUTES = {  # ranks and tensor-parallel ranks: at home, and abroad
    "tp1_tp2_tp1": ((1, 1), (2, 2)),
    "dp2_dp1_dp2": ((2, 1), (1, 1)),
    "tp2_tp2dp2_tp2": ((2, 2), (4, 2)),
    "tp2_tp4_tp2": ((2, 2), (4, 4)),
}


@once(route=ROUTES, dtype=[torch.float32, torch.bfloat16, torch.float64], steps=[3, 0])
def test_there_and_back_goes_on_to_the_digit(route, dtype, steps, text, tmp_path, request):
    (ranks, tensor), (others, other_tensor) = route
    home, abroad = (request.getfixturevalue(f"ranks{count}") for count in (ranks, others))
    config = config_for(text, dtype=dtype)
    undisturbed = home.run(begin, config, tensor, tmp_path / "a", steps)[0]
    elsewhere = abroad.run(pass_on, config, other_tensor, tmp_path / "a", tmp_path / "b")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # sums are taken in another order
    assert elsewhere == [pytest.approx(undisturbed, rel=tolerance)] * others
    assert home.run(pass_on, config, tensor, tmp_path / "b", tmp_path / "c") == [undisturbed] * ranks


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


def test_checkpoints_do_not_depend_on_sizes_of_buckets(text, tmp_path, ranks2):
    """They hold full tensors, so that runs go on from those that were made with buckets of other sizes."""
    config = config_for(text, dtype=torch.float32)
    few, undisturbed = ranks2.run(in_buckets_from, 2**40, begin, config, 1, tmp_path / "a", 1)[0]
    for many, losses in ranks2.run(in_buckets_from, 1, pass_on, config, 1, tmp_path / "a", tmp_path / "b"):
        assert losses == undisturbed
        assert (few, many) == (1, 4)
