"""Runs whose products are in fp8: they learn, go on to the digit, and say what they were computed with."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch

from tests.segments import tp_invariance
from tests.training.small import config_for, losses_of, trainer_for
from tpkernels.checkpoints import dcp
from tpkernels.ops.quantized import weights
from tpkernels.training import trainer as trainer_module
from tpkernels.training.report import TOLERANCES, loss_tolerance


@pytest.fixture(scope="module")
def config(text):
    options = {"accumulate": 2, "sequence_parallel": True, "dtype": torch.bfloat16, "fp8": "rowwise"}
    return config_for(text, **options)


def losses(config, reusing):
    """And how many weights were quantized in the last step."""
    trainer = trainer_for(config)
    plain = patch.object(trainer_module, "reuse_quantized_weights", nullcontext)
    counted = patch.object(weights, "_quantized", wraps=weights._quantized)
    with nullcontext() if reusing else plain:
        found = losses_of(trainer, config.steps - 1)
        with counted as calls:
            found.append(trainer.step().loss)
    return found, calls.call_count


@pytest.fixture(scope="module")
def learn(config, ranks2):
    """Losses and count of a run; each run once."""
    return cache(lambda fp8, reusing=True: ranks2.run(losses, replace(config, fp8=fp8), reusing)[0])


def saved_then(config, folder):
    trainer = trainer_for(config)
    trainer.step()
    trainer.save(folder)
    return losses_of(trainer, 2)


def resumed(config, folder):
    trainer = trainer_for(config)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.resume(dcp.latest(folder))
    return losses_of(trainer, 2), " ".join(str(each.message) for each in told)


@pytest.mark.parametrize("fp8", ["rowwise", "blockwise", "rowwise+head+wgrad=fp8+gradients=e5m2"])
def test_a_run_learns_as_much_as_without_fp8(fp8, learn):
    (ours, _), (plain, _) = learn(fp8), learn("")
    assert ours != plain
    assert ours == pytest.approx(plain, rel=5e-3)
    assert ours[-1] < ours[0] - 0.05


def test_microbatches_of_a_step_share_weights_in_fp8_and_steps_do_not(config, learn):
    """Both with the bits of quantizing each time: weights change between steps, not within."""
    (ours, count), (plain, each_time) = learn("rowwise"), learn("rowwise", False)
    assert ours == plain
    assert count == 2 * 2 * 7  # rows and columns, 2 blocks of 7 weights
    assert each_time == config.accumulate * count


def test_a_run_goes_on_to_the_digit_and_other_products_are_said(config, tmp_path, ranks2):
    expected = ranks2.run(saved_then, config, tmp_path)
    same = replace(config, fp8="rowwise+gradients=e4m3")  # in other words
    assert ranks2.run(resumed, same, tmp_path) == [(losses, "") for losses in expected]
    for fp8, said in (
        ("blockwise", "with rowwise fp8; this run, with blockwise, goes on"),
        ("", "with none, goes"),
    ):
        told = [text for _, text in ranks2.run(resumed, replace(config, fp8=fp8), tmp_path)]
        assert [said in text for text in told].count(True) == 1  # by one rank of the machine


def test_what_cannot_be_is_refused(config):
    with pytest.raises(ValueError, match="fp8: expected weights in bfloat16 or float32, got float64"):
        replace(config, dtype=torch.float64)
    with pytest.raises(ValueError, match="fp8: expected none with TP-invariance, got rowwise"):
        replace(config, tp_invariant=2)
    with tp_invariance(2), pytest.raises(ValueError, match="fp8: expected none with TP-invariance"):
        replace(config)
    for word in ("tensorwise", "rowwise+head=no", "mxfp8", "blockwise+wgrad=fp8"):
        with pytest.raises(ValueError, match="Recipe: expected"):
            replace(config, fp8=word)


def test_layouts_round_unlike(config):
    assert loss_tolerance(replace(config, dtype=torch.float32)) > TOLERANCES[torch.float32]
    assert loss_tolerance(config) == TOLERANCES[torch.bfloat16]
    assert loss_tolerance(replace(config, dtype=torch.float32, fp8="")) == TOLERANCES[torch.float32]
