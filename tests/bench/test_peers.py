"""The table of peers: losses are named as such, and so is a peer that was not measured."""

from unittest.mock import patch

import torch

from bench import peers
from bench.case import Measured, Work
from tests.ranks import RankPool

WORK = Work("llama", "small", "forward_backward", "parallelize_module", torch.float32, world=2)


def test_each_peer_has_a_row_that_says_whether_ours_is_slower():
    ours = [1.0, 1.1, 1.0, 1.1, 1.0]
    seconds = {
        "ours": ours,
        "naive": [2 * each for each in ours],
        "compiled": [each / 2 for each in ours],
        "transformers": [0.5, 2.2, 1.0, 0.5, 2.0],
    }
    assert list(peers.of_case(Measured(WORK, seconds))) == [
        "| llama small | 2 | 1e+03 | parallelize_module | 2.00 (2.00 to 2.00) |  |",
        "| llama small | 2 | 1e+03 | parallelize_module, compiled | 0.50 (0.50 to 0.50) | **slower** |",
        "| llama small | 2 | 1e+03 | transformers | 1.00 (0.50 to 2.00) | even |",
    ]


def test_without_transformers_its_rows_say_so_and_no_rank_starts():
    with patch.object(peers, "find_spec", return_value=None), patch.object(RankPool, "start") as start:
        rows = list(peers.rows(["llama"], 1))
    assert rows == ["| llama | - | - | transformers | not measured | transformers is not installed |"]
    start.assert_not_called()
