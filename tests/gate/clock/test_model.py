"""From cycles to time: waves, clock, memory; and that the error it states is the validation's."""

import re
from dataclasses import dataclass, replace
from math import hypot, log
from pathlib import Path

import pytest

from tpkernels.gate.clock.cost import Cost, Stretch
from tpkernels.gate.clock.model import ERROR, Board, TooFast, predict
from tpkernels.gate.clock.workload import Product
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.workload import of_entry

PAGE = Path(__file__).parents[3] / "docs" / "clock-validation.md"


PRODUCT = Product(128, 256, 64)


@dataclass(frozen=True)
class Work:
    """132 tiles of 128x256, 16 steps each, unless said."""

    name: str = "work"
    product: Product | None = PRODUCT
    shape: tuple[int, int, int] = (128 * 12, 256 * 11, 64 * 16)
    tiles: int = 132
    traffic: int = 10**6
    least: int = 0
    unit: int = 1
    persistent: bool = True
    group: int = 8


COST = Cost(Stretch(1100.0, {}, 0), Stretch(4000.0, {}, 0), 1024.0, 500.0, 1, 65_536, 0)
BOARD = Board(overhead=0.0)


def test_a_wave_takes_its_cycles_at_the_clock_that_power_allows_and_a_tile_more_nearly_another():
    found = predict(COST, Work(), BOARD)
    cycles = 500 + 16 * 1100 + 4000
    assert found.busy == pytest.approx(16 * 1024 / cycles)
    assert found.clock == pytest.approx(1.30e9 * found.busy ** (-1 / 3))
    assert found.seconds == pytest.approx(cycles / found.clock)
    assert found.tflops == pytest.approx(132 * 16 * 2 * 128 * 256 * 64 / found.seconds / 1e12)
    assert (found.idle, found.waves, found.error) == (0, 1, ERROR)
    assert found.of_peak == pytest.approx(found.tflops / 989.4)
    one, two = (predict(COST, replace(Work(), tiles=tiles), BOARD) for tiles in (132, 133))
    assert two.seconds > 1.4 * one.seconds
    assert two.idle == pytest.approx(1 - 133 / 264)
    assert two.bound == "last wave"
    assert Board().clock(0.01) == Board().clock(0.2) == 1.98e9


def test_fixed_shares_of_two_blocks_wait_for_the_longer_one():
    cost = replace(COST, resident=2)
    shared = predict(cost, replace(Work(), tiles=3 * 132), BOARD)  # two blocks of an SM: two tiles and one
    taken = predict(cost, replace(Work(), tiles=3 * 132, persistent=False), BOARD)
    assert shared.seconds > 1.1 * taken.seconds


def test_rows_are_bound_by_memory_or_by_what_their_blocks_wait_for():
    blocks = replace(Work(), product=None, tiles=10**5, traffic=10**10)
    cost = Cost(None, Stretch(100.0, {"scoreboard: LDG": 80.0}, 1), 0.0, 0.0, 4, 10**5, 0)
    assert predict(cost, blocks, BOARD).bound == "memory"
    assert predict(cost, blocks, BOARD).seconds == pytest.approx(10**10 / BOARD.memory)
    slow = replace(cost, edge=replace(cost.edge, cycles=10**5))
    assert predict(slow, blocks, BOARD).bound == "scoreboard: LDG"


def test_stores_cannot_hide_under_a_few_steps():
    """An edge of no cycles, beside 4 steps and 40: L2 moves what a tile reads and writes at one rate."""
    cost = replace(COST, step=Stretch(1229.0, {}, 0), edge=Stretch(0.0, {}, 0), start=0.0)
    assert PRODUCT.bytes == 49_152
    for steps, edge in (
        (4, (4 * 49_152 + 65_536) / 40 - 4 * 1229),
        (40, (40 * 49_152 + 65_536) / 40 - 40 * 1229),
    ):
        found = predict(cost, replace(Work(), shape=(128 * 12, 256 * 11, 64 * steps)), BOARD)
        assert found.seconds * found.clock == pytest.approx(steps * 1229 + edge)
        assert edge == pytest.approx(1638, abs=10)


def test_a_time_below_the_bytes_of_the_launch_is_an_error():
    """Of rows of which the clock has counted a quarter; and of a product."""
    rows = replace(Work(), product=None, tiles=10**5, traffic=4 * 10**9, least=4 * 10**9)
    cost = Cost(None, Stretch(100.0, {}, 1), 0.0, 0.0, 4, 40_000, 0)
    assert predict(cost, rows, BOARD).seconds > 4e9 / BOARD.sheet
    told = (
        r"work: 331\.7 us are too few for 4,000,000,000 bytes, .* 1,194\.0 us .* counted 1,000,000,000 bytes"
    )
    with pytest.raises(TooFast, match=told):
        predict(replace(cost, bytes=10_000), rows, BOARD)
    with pytest.raises(TooFast):
        predict(COST, replace(Work(), least=10**9), BOARD)


@pytest.mark.parametrize("name", ["embedding_fwd/pointer/bf16/4x512", "cross_entropy_grad/pointer/bf16/2048"])
def test_a_launch_moves_all_its_tensors_unless_ids_choose_rows(name):
    work = of_entry(entry_specs()[name].entry(), (8192, 16032, 4096))
    assert work.least == (0 if "embedding" in name else work.traffic)
    assert work.traffic > 8192 * 4096


@pytest.mark.parametrize(
    ("down", "rows_and_cols"),
    [(12, 1536 + 2816), (24, 2 * (8 * 128 + 2816))],
    ids=["once_where_a_wave_has_all", "once_a_wave"],
)
def test_products_read_rows_and_columns(down, rows_and_cols):
    work = replace(Work(), shape=(128 * down, 256 * 11, 1024), tiles=11 * down)
    found = predict(COST, work, replace(BOARD, memory=1e9))
    assert found.bound == "memory"
    assert found.seconds == pytest.approx((rows_and_cols * 1024 * 2 + 11 * down * COST.bytes) / 1e9)


@pytest.mark.parametrize(
    ("name", "shape", "tiles"),
    [
        ("linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/none", (8192, 4096, 3584), 64 * 16),
        ("glu/descriptor/bf16/128x128x64-w8-s4-p2/swiglu+gu", (8192, 4096, 3584), 64 * 32),
        ("dgrad/descriptor/bf16/128x256x64-w8-s3-p4-flat/none", (8192, 3584, 4096), 64 * 14),
        ("wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat-k2/+=fp32", (4096, 3584, 4096), 2 * 32 * 14),
    ],
)
def test_layers_are_products_as_each_kernel_computes_them(name, shape, tiles):
    work = of_entry(entry_specs()[name].entry(), (8192, 4096, 3584))
    assert (work.shape, work.tiles, work.persistent) == (shape, tiles, True)


def test_the_stated_error_is_that_of_what_was_kept_back():
    rows = re.findall(r"^\| kept back \| .*? \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    errors = [log(int(model) / int(measured)) for measured, model in rows]
    assert len(errors) == 25
    mean = sum(errors) / len(errors)
    spread = (sum((error - mean) ** 2 for error in errors) / len(errors)) ** 0.5
    assert pytest.approx(hypot(mean, spread), abs=0.005) == ERROR
