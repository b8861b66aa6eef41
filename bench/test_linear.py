"""Linear layers against naive `F.linear` and the strongest library compositions.

On a GPU the shapes of Llama-3 8B and 70B and GPT-3 175B; on a CPU one small layer of each kind, which shows
that the harness works, and nothing about speed on a GPU.
"""

from __future__ import annotations

import sys

import pytest
import torch
import triton
from pytest_benchmark.fixture import BenchmarkFixture

from bench.cases.linear import case_of, passes_of
from bench.measure import Comparison, interleave, seconds_on_cpu, seconds_on_gpu
from bench.shapes import SMOKE, Shape, all_shapes, shapes_of, this_gpu
from tpkernels.tuning import steps

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SHAPES = list(all_shapes()) if ON_GPU else shapes_of(SMOKE, tensor=1, tokens=64)
ROUNDS = 21 if ON_GPU else 9


CASES = [(shape, pass_) for shape in SHAPES for pass_ in passes_of(shape)]


@pytest.mark.parametrize(("shape", "pass_"), CASES, ids=lambda part: str(part))
def test_linear(benchmark: BenchmarkFixture, shape: Shape, pass_: str) -> None:
    torch.manual_seed(0)
    case = case_of(shape, pass_, DTYPE, DEVICE)
    benchmark.group = case.name
    case.check()
    clock = seconds_on_gpu if ON_GPU else seconds_on_cpu
    seconds = interleave(case.ways, ROUNDS + 3, clock)
    seconds = {name: rounds[3:] for name, rounds in seconds.items()}  # the first rounds warm up
    comparison = Comparison(seconds["ours"], seconds["naive"])
    benchmark.extra_info |= comparison.as_info() | {
        "flops": case.flops,
        "traffic": case.traffic,
        "dtype": str(DTYPE),
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "backend": steps.backend,
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
    }
    gpu = this_gpu()
    if gpu is not None:
        benchmark.extra_info["roofline"] = round(
            gpu.floor(case.flops, case.traffic) / min(seconds["ours"]), 3
        )
    for name in seconds.keys() - {"ours", "naive"}:
        against = Comparison(seconds["ours"], seconds[name])
        benchmark.extra_info[f"ratio_to_{name}"] = round(against.ratio, 3)
    print(f"\n{case.name}: {comparison}")
    benchmark.pedantic(case.ways["ours"], rounds=3)  # type: ignore[no-untyped-call]
