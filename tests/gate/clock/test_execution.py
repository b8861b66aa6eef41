"""Kernels of the catalog, executed warp by warp: they copy, multiply and store what their shapes ask for."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from tpkernels.gate.clock.effects import Arrive, AwaitPhase, Copy, Global, InitMbarrier, Put, SetRegisters

FLAT = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
BLOCKWISE = "glu/descriptor/bf16/128x128x64-w8-s4-p2/swiglu+gu"
DGLU = "dglu/descriptor/bf16/128x128x64-w8-s4-p4/swiglu+h"
WGRAD = "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32"
GATHER = "gather_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
POINTER = "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z"
NORM = "norm_fwd/pointer/bf16/8192/rms+residual"
ONE_CONSUMER = "linear/descriptor/bf16/128x256x64-w8-s3-p2-c1/gelu_tanh+bias+z"
TWO_CONSUMERS = "linear/descriptor/bf16/128x128x64-w4-s5-p4-c2/gelu_tanh+bias+z"
BF16 = 2


def numbers(rows: int, cols: int, depth: int) -> dict[str, int]:
    strides = ("xt", "wn", "xk", "wk", "bn", "dyt", "gn", "un", "gt", "ut", "dwn", "rt", "bk", "vector")
    found = {f"stride_{name}": 1 if name in ("vector", "bn", "bk") else depth for name in strides}
    found |= {"T": rows, "N": cols, "K": depth, "rows": rows, "cols": cols, "depth": depth, "depth2": 0}
    return found | {"first_tile": 0, "chunk_rows": rows, "spin_limit": 100}


SHAPES = {
    "one_tile": (128, 256, 512, 1),
    "one_step": (128, 256, 64, 1),
    "less_than_a_step": (128, 256, 16, 1),
    "ragged_depth": (256, 512, 1000, 4),
    "ragged_tiles": (136, 264, 128, 4),
    "several_tiles": (1024, 1024, 256, 5),
    "more_blocks_than_tiles": (128, 256, 128, 132),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_flat_linear_copies_and_multiplies_what_its_tiles_need(kernel, shape: tuple[int, int, int, int]):
    rows, cols, depth, blocks = shape
    tiles = ceil(rows / 128) * ceil(cols / 256)
    steps = ceil(depth / 64)
    done = 0
    for block in range(min(blocks, 6)):
        ran = kernel(FLAT).run(numbers(rows, cols, depth), blocks=blocks, block=block)
        mine = len(range(block, tiles, blocks))
        done += mine
        assert [(warp, counts["HGMMA"]) for warp, counts in ran.by_warp.items()] == [
            (warp, mine * steps * 4) for warp in range(8)
        ]
        expected = sum(one.expected_bytes for one in ran.of(Arrive))
        assert expected == mine * steps * (128 + 256) * 64 * BF16
        assert len(ran.of(Copy)) == mine * steps * 2
        assert len(ran.of(AwaitPhase)) == mine * steps * 8  # each warp waits once a step
        assert len(ran.of(Put)) == mine * 2 * (128 * 256) // (128 * 64)  # z and y
        assert ran.exits == set(range(8))
        assert ran.timed.guessed == 0
    assert done == tiles or blocks > 6


def test_flat_linear_goes_through_its_operands(kernel):
    ran = kernel(FLAT).run(numbers(256, 512, 256), blocks=132, block=3)
    x, w = kernel(FLAT).cubin.parameters[0], kernel(FLAT).cubin.parameters[5]
    by_operand = {offset: [] for offset in (x.offset, w.offset)}
    for copy in ran.of(Copy):
        by_operand[copy.descriptor].append(copy.coordinates)
    assert by_operand == {
        x.offset: [(k, 128) for k in range(0, 256, 64)],
        w.offset: [(k, 256) for k in range(0, 256, 64)],
    }


def test_flat_linear_turns_its_barriers_round(kernel):
    ran = kernel(FLAT).run(numbers(128, 256, 640), blocks=1)
    stages = [one.address for one in ran.of(InitMbarrier)]
    assert [one.count for one in ran.of(InitMbarrier)] == [1] * 4
    waits = [effect for warp, effect in ran.effects if warp == 5 and isinstance(effect, AwaitPhase)]
    assert [(stages.index(one.address), one.parity) for one in waits] == [
        (step % 4, step // 4 % 2) for step in range(10)
    ]
    assert [stages.index(one.mbarrier) for one in ran.of(Copy)[::2]] == [step % 4 for step in range(10)]


@pytest.mark.parametrize(
    ("name", "shape", "operand_elements", "products", "puts"),
    [
        # elements of a step; products of a warp in a step; boxes stored of a tile
        (BLOCKWISE, (128, 128, 512), (128 + 2 * 128) * 64, 8, 6),
        (BLOCKWISE, (128, 128, 40), (128 + 2 * 128) * 64, 8, 6),
        (DGLU, (128, 512, 128), (128 + 128) * 64, 4, 12),  # goes through its columns
    ],
    ids=["glu", "glu_less_than_a_step", "dglu"],
)
def test_products_that_are_not_flat_copy_and_multiply_what_a_tile_needs(
    kernel, name, shape, operand_elements, products, puts
):
    ran = kernel(name).run(numbers(*shape), blocks=1)
    steps = ceil((shape[1] if name == DGLU else shape[2]) / 64)
    loaded_in_the_epilogue = 2 * 128 * 128 * BF16 if name == DGLU else 0  # gate and up
    assert {counts["HGMMA"] for counts in ran.by_warp.values()} == {steps * products}
    expected = sum(one.expected_bytes for one in ran.of(Arrive))
    assert expected == steps * operand_elements * BF16 + loaded_in_the_epilogue
    assert len(ran.of(Put)) == puts
    assert ran.exits == set(range(8))


def test_wgrad_walks_over_the_tokens_and_adds_by_the_copy_engine(kernel):
    ran = kernel(WGRAD).run(numbers(512, 128, 256), blocks=1)
    steps = 512 // 64
    assert {counts["HGMMA"] for counts in ran.by_warp.values()} == {steps * 4}
    assert sum(one.expected_bytes for one in ran.of(Arrive)) == steps * (128 + 256) * 64 * BF16
    assert len(ran.of(Put)) == 128 * 256 // (128 * 32)
    assert all(one.reduce for one in ran.of(Put))


def test_gather_linear_looks_at_its_flag_and_goes_on(kernel):
    ran = kernel(GATHER).run(numbers(128, 256, 512), blocks=1)
    assert len(ran.of(Copy)) == 8 * 2
    assert {counts["HGMMA"] for counts in ran.by_warp.values()} == {8 * 4}
    assert ran.timed.guessed == 8
    assert ran.exits == set(range(8))  # the wait is over, and the warps agree
    assert not any(counts["ATOMG"] for counts in ran.by_warp.values())


@pytest.mark.parametrize("depth", [32, 512, 500], ids=["one_step", "even", "ragged"])
def test_pointer_linear_loads_in_whole_sectors(kernel, depth: int):
    ran = kernel(POINTER).run(numbers(128, 128, depth), blocks=1)
    steps = ceil(depth / 32)
    copied = [one for one in ran.of(Global) if one.shared]
    assert {counts["HGMMA"] for counts in ran.by_warp.values()} == {steps * 2}
    if depth % 32 == 0:
        assert sum(one.bytes for one in copied) == steps * (128 + 128) * 32 * BF16
        assert sum(one.sectors for one in copied) * 32 == sum(one.bytes for one in copied)
    stored = [one for one in ran.of(Global) if one.store]
    assert sum(one.bytes for one in stored) == 2 * 128 * 128 * BF16  # z and y
    assert all(one.bytes == 32 * one.sectors for one in stored)


@pytest.mark.parametrize("width", [8192, 4104, 1024])
def test_norm_reads_and_writes_a_row_once(kernel, width: int):
    ran = kernel(NORM).run(numbers(64, width, width) | {"K": width, "T": 64}, blocks=64, block=8)
    rows = [one for one in ran.of(Global) if one.bytes >= 16]  # and one reciprocal
    loaded = sum(one.bytes for one in rows if not one.store)
    stored = sum(one.bytes for one in rows if one.store)
    assert (loaded, stored) == (3 * width * BF16, 2 * width * BF16)  # x, residual, weight; sum and y
    assert all(one.sectors == ceil(one.bytes / 32) for one in rows)
    assert all(one.exact for one in rows)
    assert ran.exits == set(range(16))


@pytest.mark.parametrize(
    "shape", [(128, 256, 512), (256, 512, 64), (200, 300, 100)], ids=["one", "four", "ragged"]
)
def test_roles_of_one_consumer_go_their_own_ways(kernel, shape: tuple[int, int, int]):
    ran = kernel(ONE_CONSUMER).run(numbers(*shape), blocks=1)
    assert ran.exits == set(range(kernel(ONE_CONSUMER).warps))
    warps = ran.by_warp
    tiles, steps = ceil(shape[0] / 128) * ceil(shape[1] / 256), ceil(shape[2] / 64)
    copying = [warp for warp, counts in warps.items() if counts["UTMALDG"]]
    multiplying = [warp for warp, counts in warps.items() if counts["HGMMA"]]
    assert (len(copying), multiplying) == (1, list(range(8)))
    assert copying[0] >= 8
    assert warps[copying[0]]["UTMALDG"] == tiles * steps * 2
    assert {warps[warp]["HGMMA"] for warp in multiplying} == {tiles * steps * 4}
    assert len(ran.of(Copy)) == tiles * steps * 2
    arrivals = Counter((one.count, one.expected_bytes) for one in ran.of(Arrive))
    # the producer tells of each step's bytes; the consumer, of each stage that it has read
    assert arrivals == {(1, (128 + 256) * 64 * BF16): tiles * steps, (1, 0): tiles * steps}
    assert {one.count for one in ran.of(SetRegisters)} == {24, 240}


def test_two_consumers_take_turns_at_tiles(kernel):
    ran = kernel(TWO_CONSUMERS).run(numbers(512, 128, 256), blocks=1)
    assert ran.exits == set(range(kernel(TWO_CONSUMERS).warps))
    tiles, steps = 4, 4
    multiplying = {warp: counts["HGMMA"] for warp, counts in ran.by_warp.items() if counts["HGMMA"]}
    assert list(multiplying)[:4] == [0, 1, 2, 3]
    assert len(multiplying) == 8
    assert set(multiplying.values()) == {tiles // 2 * steps * 8}
    assert len(ran.of(Copy)) == tiles * steps * 2


@pytest.mark.parametrize("name", [FLAT, ONE_CONSUMER], ids=["flat", "roles"])
def test_a_step_takes_what_its_copies_take_from_l2(kernel, name: str):
    """1024 cycles of products, 49,152 bytes at 40 a cycle."""
    operands = (128 + 256) * 64 * BF16
    short, long = (kernel(name).run(numbers(128, 512, 64 * steps), blocks=1).timed for steps in (16, 32))
    assert (long.cycles - short.cycles) / 32 == pytest.approx(operands / 40, rel=0.01)
    assert long.tensor == 2 * 32 * 1024
    assert long.guessed == 0
    assert 2 * 32 * operands <= long.fetched <= 2 * 32 * operands + 32_768  # the rest is the bias
    assert long.stored == 2 * 2 * 128 * 256 * BF16


def test_execution_is_quick(kernel):
    """A million steps would take too long for a gate."""
    ran = kernel(FLAT).run(numbers(256, 256, 4096), blocks=1)
    assert 50_000 < ran.timed.instructions < 150_000
