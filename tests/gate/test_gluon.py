"""What the gate sees of warp-specialised kernels, by the example of a small one. Gluon needs Triton 3.7."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.gate.test_ahead_of_time import compiling, printed
from tpkernels.gate.ahead_of_time import Entry, Facts
from tpkernels.gate.expectations import violations
from tpkernels.gate.recording import HAS_GLUON, MetaOperands, recorded
from tpkernels.kernels import launch
from tpkernels.kernels.target import H100

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="Gluon is of another form before Triton 3.7")


def ring(name: str = "ring", **options: int) -> Entry:
    """The entry of the example's kernel, as the programs that compile it know its module."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tests.gate.gluon_ring import ring_kernel

    def block(matrix: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
        layout = NVMMASharedLayout.get_default_for([rows, cols], bfloat16)
        return TensorDescriptor.from_tensor(matrix, [rows, cols], layout)

    def call(of: MetaOperands) -> None:
        x, w = block(of.matrix(2048, 1024), 128, 64), block(of.matrix(128, 1024), 128, 64)
        u, y = block(of.matrix(2048, 128), 128, 128), block(of.matrix(2048, 128), 128, 128)
        start: Callable[..., object] = launch.on(torch.device("meta"), ring_kernel, (1,))
        start(x, w, u, y, 16, 1024, num_warps=8, **options)

    of = MetaOperands(torch.bfloat16, 2048, 1024, 128, chunks=1)
    return replace(recorded(name, call, of, H100, ("sm_90",)), module="gluon_ring")


PROGRAM = """
import json
import sys
import tests.gate.gluon_ring
sys.modules["tpkernels.kernels.gluon_ring"] = tests.gate.gluon_ring
from tests.gate.test_gluon import ring
from tpkernels.gate.ahead_of_time import compile_entry
print(json.dumps(compile_entry(ring(), "sm_90").as_json()))
"""


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts.from_json(json.loads(printed(compiling(PROGRAM))))


def test_gluon_kernel_is_recorded_and_compiled(facts):
    entry = ring()
    assert (entry.function, entry.form, entry.options) == ("ring_kernel", "descriptor", {"num_warps": 8})
    assert entry.arguments["x"] == (
        "tensordesc<bf16[128, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, "
        "transposed=False, fp4_padded=False, cga_layout=[])>"
    )
    assert (facts.spills, facts.stack, facts.in_flight, facts.narrow_offsets) == (0, 0, 1, ())
    assert facts.aligned == entry.aligned == {"K", "tiles"}
    assert 2 * (2 * 128 * 64 * 2 + 2 * 128 * 128) + 128 * 128 * 2 < facts.shared < 170_000
    assert all(facts.count(name) for name in ("HGMMA", "UTMALDG", "UTMASTG"))
    assert [*violations(entry, "sm_90", facts)] == []


def test_registers_of_a_role_and_threads_with_those_that_fill_it_up(facts):
    assert facts.role_registers == (240, 24)
    assert (facts.threads, facts.registers) == (12 * 32, 168)  # a role of one warp takes the room of four
