"""Pages of docs and tables of bench hold today's figures: else they are to be written anew."""

from __future__ import annotations

import csv
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bench import fp8_loss, predicted, shapes, waves, which_kernels
from bench.cases.predicted_link import Constants
from bench.predicted import _between, efficiency, model_of, predict_link
from bench.published_overlap import FITTED, KEPT_BACK, PUBLISHED
from bench.shapes import MODELS, RATED_GPUS, all_shapes, shapes_of
from tests.gate.test_budgets import entries_of
from tpkernels.cli.tuning import SplitModel, model_calls
from tpkernels.gate import expectations
from tpkernels.gate.expectations import REGISTER_UNIT
from tpkernels.kernels.footprints import TABLE
from tpkernels.kernels.triton_versions import triton_version
from tpkernels.planning import step_time

DOCS = Path(__file__).parents[2] / "docs"
MINORS = ("3.6", "3.7")  # in the order of the columns of measured-kernels.md


def kernels_of(page: str) -> dict[tuple[str, str], dict[str, list[str]]]:
    """(architecture, entry) -> cells by column, each with the values of every Triton."""
    rows, architecture, columns = {}, "", []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            architecture, columns = line.removeprefix("## "), []
        elif cells[0] == "entry":
            columns = cells
        elif "registers" in columns and len(cells) == len(columns) and cells[0] != "---":
            values = (cell.split(" / ") for cell in cells)
            of_each = (found * len(MINORS) if len(found) == 1 else found for found in values)
            rows[architecture, cells[0]] = dict(zip(columns, of_each, strict=True))
    return rows


def test_page_of_kernels_agrees_with_the_budgets(monkeypatch):
    page = (DOCS / "measured-kernels.md").read_text()
    rows = kernels_of(page)
    for i, minor in enumerate(MINORS):
        kept = expectations.read(TABLE)[minor]
        compiled = {entry.name for entry in entries_of(minor, monkeypatch)}
        ours = {key: row for key, row in rows.items() if key[1] in compiled}
        assert ours.keys() == kept.keys(), "write it anew, see bench/kernel_table.py"
        for (architecture, name), row in ours.items():
            budget = kept.of(architecture, name)
            told = [int(row[column][i].replace(",", "")) for column in ("registers", "shared", "spills")]
            rounded = -(-told[0] // REGISTER_UNIT) * REGISTER_UNIT
            assert [rounded, *told[1:]] == [budget.registers, budget.shared, budget.spills], name
            if minor == MINORS[-1] and architecture == "sm_90":
                cycles = [
                    f"{budget.cycles[one].cycles:,.0f}" if one in budget.cycles else "-"
                    for one in ("step", "edge")
                ]
                assert [row[column][-1] for column in ("cycles of a step", "of an edge")] == cycles, name
    assert page.endswith("\n".join(waves.table()) + "\n"), "write it anew, see bench/kernel_table.py"


@pytest.mark.sweep  # plans hundreds of layouts; `published` is of the same model
def test_page_of_overlap_has_todays_wins():
    _, wins = predicted._wins()
    told = (DOCS / "overlap-predicted.md").read_text()
    assert wins in told, "write the table anew: python -m bench predicted wins"


@pytest.mark.sweep  # records thirty calls
def test_page_of_overlap_has_todays_times_of_heads():
    _, heads = predicted._heads()
    told = (DOCS / "overlap-predicted.md").read_text()
    assert heads in told, "write the table anew: python -m bench predicted heads"


def test_page_of_overlap_has_todays_model_of_published_times():
    _, published = predicted._published()
    told = (DOCS / "overlap-predicted.md").read_text()
    assert published.split("\n", 2)[2] in told, "write the table anew: python -m bench predicted published"


def test_published_times_lie_where_the_command_line_says_and_half_of_the_sources_were_kept_back():
    ratios = {}
    for each in PUBLISHED:
        ratios.setdefault(each.way, []).append(each.microseconds / model_of(each))
    said = {way: (round(min(found), 2), round(max(found), 2)) for way, found in ratios.items()}
    assert said == step_time.PUBLISHED
    sources = {use: {each.source for each in PUBLISHED if each.use == use} for use in (FITTED, KEPT_BACK)}
    counts = {use: sum(each.use == use for each in PUBLISHED) for use in sources}
    assert counts[KEPT_BACK] >= counts[FITTED] >= 30
    assert not sources[FITTED] & sources[KEPT_BACK]


@pytest.mark.parametrize("case", predicted.CASES)
def test_a_link_without_noise_hides_what_tapering_leaves(case):
    """Products and messages of equal length: 5 % of the products are never hidden."""
    kernels = ("linear",) if "forward" in case else ("dgrad", "wgrad")
    products = {kernel: {128: 0.01, 1024: 0.08, 2048: 0.16} for kernel in kernels}
    seconds = predict_link(case, Constants(products, 0.001, 0.005, 0.16, 0.0005, 0.02, 0.01))
    assert seconds["floor"] < seconds["ours"] < seconds["naive"]
    assert 0.85 < efficiency(seconds) <= 1


def test_a_product_between_two_sizes_lies_between_their_times():
    assert [_between({100: 1.0, 200: 3.0}, rows) for rows in (150, 50, 400)] == [2.0, 0.5, 6.0]


def test_page_of_fp8_shows_the_losses_that_were_measured():
    found = json.loads(fp8_loss.LOSSES.read_text())
    assert fp8_loss.table(found) in (DOCS / "fp8-figures.md").read_text()
    assert [len(losses) for losses in found.values()] == [300] * len(fp8_loss.WAYS)
    assert f"]({fp8_loss.PICTURE.name})" in (DOCS / "fp8.md").read_text()


def test_differences_of_losses_are_of_the_last_steps():
    found = {name: [9.0] * 10 + [float(number)] * 50 for number, name in enumerate(fp8_loss.WAYS)}
    found["bf16"][-1] = 4.0
    assert fp8_loss.table(found).splitlines()[2:] == [
        "| fp32 | 0.0000 | 0.0000 | 1.0600, 4.0000 |  |",
        "| bf16 | 4.0000 | 1.0600 |  | 1.0600, 4.0000 |",
        "| fp8 rowwise | 2.0000 | 2.0000 | 1.0200, 2.0000 | 2.0000, 2.0000 |",
        "| fp8 blockwise | 3.0000 | 3.0000 | 1.9800, 2.0000 | 3.0000, 3.0000 |",
    ]


def test_ways_of_fp8_differ_in_how_they_compute(ranks1):
    options = Namespace(steps=2, batch=2, seed=1)
    ways = fp8_loss.WAYS.values()
    found = [ranks1.run(fp8_loss.losses_of, fp8_loss.config_of(way, options))[0][1] for way in ways]
    assert len(set(found)) == len(ways)
    assert found == pytest.approx([found[0]] * len(ways), rel=2e-3)


def test_table_of_shapes_is_what_the_models_ask_for_and_its_bounds_follow_from_the_data_sheet():
    text = Path(shapes.__file__).with_name("shapes.csv").read_text()
    assert text.splitlines() == list(shapes.table()), "write it anew: python -m bench.shapes"
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == len(set(map(str, all_shapes()))) == 96
    proj = ("gpt3-175b", "8", "proj")
    row = next(row for row in rows if (row["model"], row["tensor"], row["layer"]) == proj)
    assert (row["out_features"], row["in_features"]) == ("12288", "1536")
    assert float(row["gflop"]) == pytest.approx(2 * 4096 * 12288 * 1536 / 1e9, abs=0.05)
    assert float(row["h100_us"]) == pytest.approx(1e3 * float(row["gflop"]) / 989, abs=0.1)
    assert RATED_GPUS["h100"].floor(1.0, 3.35e12) == 1.0  # little work, much memory
    for model in MODELS:
        for full, shard in zip(shapes_of(model, 1, 4096), shapes_of(model, 8, 4096), strict=True):
            assert shard.flops * 8 == full.flops


@pytest.mark.skipif(triton_version() != (3, 7), reason="the page is of Triton 3.7")
def test_page_of_chosen_kernels_has_the_tiles_of_today_and_costs_that_are_kept():
    """Of the products three rows, as one function writes all."""
    page = (DOCS / "which-kernels.md").read_text().splitlines()
    assert [row for row in which_kernels.kernel_table() if row not in page] == []
    rows = {tuple(row.split(" | ")[:2]): row for row in page if row.startswith("| 8 |")}
    calls_of_model = [*model_calls(SplitModel("llama3-8b", 8, 8192), torch.bfloat16, True)]
    for record, arguments in calls_of_model[:3]:
        row = which_kernels.problem_row(8, record, record.problem(*arguments))
        assert rows[tuple(row.split(" | ")[:2])] == row
