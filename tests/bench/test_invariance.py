"""`python -m bench invariance`: exit code 1 if one size's bits differ; and that bytes are counted."""

from dataclasses import replace

import pytest

from bench import invariance
from bench.invariance import DTYPES, MODELS, Row, config_of
from bench.invariance_cost import bytes_sent
from tests.training.invariant_runs import Outcome

ALIKE = Outcome((1.0,), (2.0,), "bits", (0.1,))


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (ALIKE, 0),
        (replace(ALIKE, losses=(1.0 + 2**-52,)), 1),
        (replace(ALIKE, norms=(3.0,)), 1),
        (replace(ALIKE, state="others"), 1),
        (replace(ALIKE, seconds=(7.0,)), 0),
    ],
    ids=["alike", "a_loss", "a_norm", "a_weight", "only_time"],
)
def test_a_difference_is_an_exit_code(odd, code, monkeypatch, capsys):
    def row(pool, config):
        outcome = odd if pool.world_size == 2 and config.sequence_parallel else ALIKE
        return Row(pool.world_size, config.sequence_parallel, outcome, 0.2, 0.1)

    monkeypatch.setattr(invariance, "_row", row)
    sizes = ["--sizes", "1", "2", "--models", "GPT", "--dtypes", "fp32"]
    assert invariance.main(sizes) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 + 1
    assert lines[-1] == ("1 sums differ" if code else "each model's sums are equal")


def test_bytes_that_ranks_send_are_counted(ranks2):
    """Of bf16 sums with fp32 on the wire: twice as many; gathers are as they were."""
    model = MODELS["Llama"].with_sizes(num_layers=1)
    config = config_of(model, DTYPES["bf16"], 2)
    split = replace(config, sequence_parallel=True)
    ((plain, _), (ours, _), (plain_split, _), (ours_split, _)) = (
        ranks2.run(bytes_sent, each, segments)
        for each, segments in ((config, 0), (config, 8), (split, 0), (split, 8))
    )
    assert plain < ours < 2.1 * plain
    assert plain_split < ours_split < 1.6 * plain_split
