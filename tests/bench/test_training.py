"""The rival of our trainer learns what ours learns, or timing them side by side would mean nothing."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from bench.cases import training
from bench.cases.training import CHECKED, demo_config, training_case


def next_losses(config, rate_of_torch):
    """Of the step after those that are checked."""
    honest = training.learning_rate
    with patch.object(training, "learning_rate", lambda *a, **k: rate_of_torch * honest(*a, **k)):
        case = training_case(config)
        return [float(case.ways[name]()[0]) for name in ("ours", "naive")]


@pytest.fixture
def small():
    config = demo_config()
    return replace(config, model=config.model.with_sizes(hidden_size=32, num_layers=2), tokens=16, warmup=1)


def test_torchs_own_parallelism_learns_the_same(ranks2, small):
    for ours, torchs in ranks2.run(next_losses, small, 1):
        assert ours == pytest.approx(torchs, rel=1e-6)
        assert ours < 5.5  # and they do learn
    assert CHECKED > 1


def test_rival_that_learns_otherwise_is_not_timed(ranks2, small):
    with pytest.raises(Exception, match="result 0 of ours is off by"):
        ranks2.run(next_losses, small, 0.5)
