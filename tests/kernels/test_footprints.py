"""What is known of compiled kernels without a GPU, and what follows for one."""

import pytest
import torch

from tpkernels.gate import expectations
from tpkernels.kernels.footprints import (
    REGISTERS,
    TABLE,
    Footprint,
    compiled_footprint,
    expected_shared_memory,
)
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import H100, MI300
from tpkernels.kernels.tiles import KERNELS, candidates

BF16 = torch.bfloat16
TILE = MatmulTile(128, 128, 64, num_warps=4, num_stages=3, parts=8, per_processor=2)
LIMIT = H100.shared_memory


def rows(minor):
    """Kernel, tile, epilogue and budget of all that is compiled from descriptors for Hopper in bf16."""
    for name, budget in expectations.read(TABLE)[minor].rows["sm_90"].items():
        kernel, form, *rest = name.split("/")
        if form == "descriptor" and kernel in (*KERNELS, "dgrad_pairs") and rest[0] == "bf16":
            yield kernel, MatmulTile.named(rest[1]), rest[2], budget


@pytest.mark.parametrize("minor", ["3.6", "3.7", "3.8", "3.9"])
def test_shared_memory_is_what_was_compiled(minor):
    """But for barriers, and for what pairs of matrices are aligned to."""
    found = list(rows(minor))
    assert len(found) > 60
    for kernel, tile, epilogue, budget in found:
        if tile.consumers:
            continue
        expected = expected_shared_memory(
            "dgrad" if kernel == "dgrad_pairs" else kernel,
            BF16,
            tile,
            result=4 if tile.splits > 1 or "fp32" in epilogue else 2,
            reads=kernel == "dglu"
            or (kernel == "dgrad" and epilogue not in ("none", "=fp32"))
            or (epilogue == "+=bf16" and tile.splits == 1),
        )
        slack = 1024 if kernel == "dgrad_pairs" else 64
        assert expected <= budget.shared <= expected + slack, (kernel, tile.name, epilogue)


def test_footprint_says_what_stands_in_the_way():
    def of(tile=TILE, target=H100, **figures):
        return Footprint(**({"shared": 100_000, "registers": 200} | figures)).obstacle(tile, target)

    one = MatmulTile(128, 128, 64, num_warps=4, num_stages=3)
    assert of() is None
    assert of(shared=LIMIT, tile=one) is None
    assert of(shared=LIMIT + 1, tile=one) == "232,449 bytes of shared memory, of 232,448"
    assert of(shared=115_712) is None
    assert of(shared=115_713) == "2 blocks of 115,713 bytes do not fit a processor"
    assert of(registers=255) is None  # 256 of them are given out
    assert of(registers=257) == f"67,584 registers for 2 of its blocks, of {REGISTERS:,}"
    assert (of(spills=16), of(spills=17)) == (None, "17 spills")
    assert of(registers=512, target=MI300, shared=60_000) is None, "whose registers are others"


def test_compiled_footprint_is_of_the_epilogue_or_of_the_least():
    def of(epilogue, **changed):
        case = {"architecture": "sm_90", "triton": "3.7", "dtype": BF16, "tile": TILE} | changed
        return compiled_footprint("dglu", "descriptor", epilogue=epilogue, **case)

    swiglu, geglu = of("swiglu+h"), of("geglu+h")
    assert (swiglu.shared, swiglu.registers) == (102_424, 216)
    assert (geglu.shared, geglu.registers) == (102_424, 232)
    assert of("another") == swiglu, "needed at least"
    assert of("swiglu+h", dtype=torch.float16) == swiglu
    assert of("swiglu+h", architecture="sm_100") is None
    assert of("swiglu+h", triton="3.5") is None
    assert of("swiglu+h", tile=candidates("glu", "descriptor", BF16, H100)[0]) is None
