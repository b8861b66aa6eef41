"""What no version of Triton may choose: kernels are launched with it, and the gate compiles with it."""

from dataclasses import replace

import pytest
import torch
import triton
from triton.compiler import CompiledKernel

from tpkernels.gate.ahead_of_time import gpu_target
from tpkernels.kernels import launch
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS
from tpkernels.registered.entries import entry_specs

CPU = torch.device("cpu")


class Jitted:
    """Stands for a kernel; a launch returns its options."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: options


class Compiled(Jitted, CompiledKernel):
    def __init__(self):
        """Nothing is compiled."""

    def __del__(self):
        """Nor unloaded."""


def test_a_launch_fixes_what_triton_might_choose():
    assert launch.on(CPU, Jitted(), (1,))(0, num_warps=2) == {"num_warps": 2, **LAUNCH_OPTIONS}
    assert launch.on(CPU, Compiled(), (1,))(0) == {}  # which takes none


def fused(architecture: str, default: bool) -> tuple[bool, bool]:
    """Whether an entry of ours is compiled with fused products and sums, and one that leaves it to Triton."""
    from triton.compiler.compiler import make_backend

    entry = next(iter(entry_specs().values())).entry()
    backend = make_backend(gpu_target(architecture))
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = default
        ours, left = (
            backend.parse_options(one.options).enable_fp_fusion
            for one in (entry, replace(entry, more_options={}))
        )
    return ours, left


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_the_gate_compiles_as_kernels_are_launched(architecture, compiler):
    assert compiler.run(fused, architecture, True) == (True, True)
    assert compiler.run(fused, architecture, False) == (True, False)
