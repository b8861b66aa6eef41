"""The table of shapes: that it is what the models ask for, and that its bounds are bounds."""

import csv
from pathlib import Path

import pytest

from bench import shapes
from bench.shapes import MODELS, RATED_GPUS, all_shapes, shapes_of, table

TABLE = Path(shapes.__file__).with_name("shapes.csv")
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))


def test_table_is_what_the_models_ask_for():
    assert TABLE.read_text().splitlines() == list(table()), "write it anew: python -m bench.shapes"
    assert len(ROWS) == len(set(map(str, all_shapes()))) == 96


def test_bounds_follow_from_the_data_sheet():
    row = next(
        row for row in ROWS if (row["model"], row["tensor"], row["layer"]) == ("gpt3-175b", "8", "proj")
    )
    assert (row["out_features"], row["in_features"]) == ("12288", "1536")
    assert float(row["gflop"]) == pytest.approx(2 * 4096 * 12288 * 1536 / 1e9, abs=0.05)
    assert float(row["h100_us"]) == pytest.approx(1e3 * float(row["gflop"]) / 989, abs=0.1)
    assert RATED_GPUS["h100"].floor(1.0, 3.35e12) == 1.0  # little work, much memory


def test_ranks_share_the_work_of_a_layer():
    for model in MODELS:
        for whole, part in zip(shapes_of(model, 1, 4096), shapes_of(model, 8, 4096), strict=True):
            assert part.flops * 8 == whole.flops
