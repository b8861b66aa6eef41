"""The rival of our trainer learns what ours learns, or timing them side by side would mean nothing."""

from dataclasses import replace

import pytest

from bench.cases.training import demo_config, time_training


def test_torchs_own_parallelism_learns_the_same(ranks2):
    config = demo_config()
    config = replace(config, model=config.model.with_sizes(hidden_size=32, num_layers=2), tokens=16, warmup=1)
    for answer in ranks2.run(time_training, config, 4, 1):
        assert len(answer.losses) == 4
        assert answer.losses[-1][0] < answer.losses[0][0]
        for ours, torchs in answer.losses:
            assert ours == pytest.approx(torchs, rel=1e-6)
        assert {name: len(seconds) for name, seconds in answer.seconds.items()} == {"ours": 1, "torch": 1}
