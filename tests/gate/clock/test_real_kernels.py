"""The clock's SM on compiled kernels of the catalog."""

import pytest

from tests.gate.clock.assembler import Launch
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.values import Block, Constants, WarpState, initial_values

FLAT = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
ONE_CONSUMER = "linear/descriptor/bf16/128x256x64-w8-s3-p2-c1/gelu_tanh+bias+z"
STEP = (128 + 256) * 64 * 2  # bytes of operands


class Real(Launch):
    def of(self, kernel, tiles, steps, warps):
        self.kernel, self.warps = kernel, warps
        rows, cols, depth = 128, 256 * tiles, 64 * steps
        numbers = {"T": rows, "N": cols, "K": depth, "rows": rows, "cols": cols, "depth": depth, "depth2": 0}
        numbers |= {"stride_xt": depth, "stride_wn": depth, "stride_vector": 1}
        cubin = self.kernel.cubin
        self.registers = cubin.registers
        self.constants = Constants.of(cubin, self.kernel.arguments(numbers), (1, 1, 1), 32 * warps)
        descriptors = [one.offset for one in cubin.parameters if one.size == 128]
        boxes = [128 * 64 * 2, 256 * 64 * 2] * (2 if len(descriptors) > 4 else 1)
        self.boxes = dict(
            zip(descriptors, boxes + [128 * 64 * 2] * (len(descriptors) - len(boxes)), strict=True)
        )
        return run(self.kernel.program, self)

    def states(self, program):
        block = Block(program, self.constants, initial_values(self.kernel.cubin, self.constants))
        return [WarpState(warp, block) for warp in range(self.warps)]


@pytest.mark.parametrize(("name", "warps"), [(FLAT, 8), (ONE_CONSUMER, 12)], ids=["flat", "roles"])
def test_a_step_takes_what_its_copies_take_from_l2(kernel, name, warps):
    """1024 cycles of products, 49,152 bytes at 40 a cycle."""
    short, long = (Real().of(kernel(name), 2, steps, warps) for steps in (16, 32))
    assert (long.cycles - short.cycles) / 32 == pytest.approx(STEP / 40, rel=0.01)
    assert long.tensor == 2 * 32 * 1024
    assert long.guessed == 0
    assert 2 * 32 * STEP <= long.fetched <= 2 * 32 * STEP + 32_768  # the rest is the bias
    assert long.stored == 2 * 2 * 128 * 256 * 2
