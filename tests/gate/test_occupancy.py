"""Blocks an SM and waves, against NVIDIA's tables and counts by hand."""

import pytest

from tpkernels.gate.ahead_of_time import ARCHITECTURES, SHARED_LIMIT
from tpkernels.gate.occupancy import BLOCK_BYTES, PROCESSORS, blocks_by_limit, too_few


@pytest.mark.parametrize(
    ("registers", "threads", "blocks"),
    [(255, 256, 1), (168, 384, 1), (128, 256, 2), (129, 256, 1), (168, 128, 3), (64, 128, 8), (32, 1024, 2)],
)
def test_registers_are_given_to_warps_of_a_quarter(registers, threads, blocks):
    assert blocks_by_limit("sm_90", registers, threads, 0)["registers"] == blocks


def test_every_limit_counts():
    assert blocks_by_limit("sm_90", 32, 128, 106_520) == {
        "registers": 16,
        "bytes of shared memory": 2,
        "threads": 16,
        "number of blocks": 32,
    }
    assert blocks_by_limit("sm_89", 32, 512, 0)["threads"] == 3
    assert blocks_by_limit("gfx942", 32, 256, 0) == {}
    assert blocks_by_limit("sm_90", 32, 0, 0) == {}  # threads not known


def test_a_block_may_have_what_an_sm_has_but_for_the_reserve():
    assert set(PROCESSORS) == {name for name in ARCHITECTURES if name.startswith("sm_")}
    for architecture, processor in PROCESSORS.items():
        assert SHARED_LIMIT[architecture] == processor.shared - BLOCK_BYTES


def test_what_leaves_room_for_too_few_is_named():
    limits = {"registers": 1, "threads": 2, "number of blocks": 32}
    assert [*too_few(2, limits)] == ["2 blocks an SM are launched, its registers hold 1"]
    assert [*too_few(1, limits)] == []
