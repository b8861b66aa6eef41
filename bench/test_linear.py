"""Linear layers against naive `F.linear` and the strongest library compositions.

On a GPU the shapes of Llama-3 8B and 70B and GPT-3 175B; on a CPU one small layer of each kind, which shows
that the harness works, and nothing about speed on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from bench.cases import rivals, scaled
from bench.cases.linear import case_of, passes_of
from bench.conftest import Bench
from bench.shapes import GPU_SET, SMOKE, Shape, all_shapes, shapes_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SHAPES = list(all_shapes()) if ON_GPU else shapes_of(SMOKE, tensor=1, tokens=64)
ROUNDS = 21 if ON_GPU else 51


def chosen(shape: Shape) -> list[pytest.MarkDecorator]:
    if shape.model is SMOKE:
        return [pytest.mark.smoke]
    return [pytest.mark.gpu_set] if shape in GPU_SET else []


CASES = [
    pytest.param(shape, pass_, marks=chosen(shape), id=f"{shape}-{pass_}")
    for shape in SHAPES
    for pass_ in passes_of(shape)
]


SCALED = [
    pytest.param(shape, pass_, marks=chosen(shape) if ON_GPU else [], id=f"{shape}-fp8-{pass_}")
    for shape in SHAPES
    for pass_ in scaled.PASSES
]


@pytest.mark.skipif(not ON_GPU, reason="on a CPU torch computes what fp8 would, at no speed of its own")
@pytest.mark.parametrize(("shape", "pass_"), SCALED)
def test_linear_in_fp8(bench: Bench, shape: Shape, pass_: str) -> None:
    torch.manual_seed(0)
    bench.case(scaled.case_of(shape, pass_, DTYPE, DEVICE), ROUNDS)


RIVALS = [
    pytest.param(shape, marks=chosen(shape) if ON_GPU else [], id=f"{shape}-{step}")
    for shape in SHAPES
    if (step := rivals.step_of(shape))
]


@pytest.mark.skipif(not ON_GPU, reason="on a CPU kernels are interpreted, at no speed of their own")
@pytest.mark.parametrize("shape", RIVALS)
def test_fused_kernel(bench: Bench, shape: Shape) -> None:
    torch.manual_seed(0)
    bench.case(rivals.case_of(shape, DTYPE, DEVICE), ROUNDS)


@pytest.mark.parametrize(("shape", "pass_"), CASES)
def test_linear(bench: Bench, shape: Shape, pass_: str) -> None:
    torch.manual_seed(0)
    bench.case(case_of(shape, pass_, DTYPE, DEVICE), ROUNDS)
