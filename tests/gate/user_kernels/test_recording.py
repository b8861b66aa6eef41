"""What `check --init` learns of the launches that a script makes, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpkernels.gate.user_kernels import children
from tpkernels.gate.user_kernels.config import RECORDING
from tpkernels.gate.user_kernels.init import kernels_of
from tpkernels.gate.user_kernels.table import own_kernel

KERNELS = """
import torch
import triton
import triton.language as tl

assert torch.cuda.is_available()

@triton.jit
def helper(x):
    return inner(x)

@triton.jit
def inner(x):
    return x

@triton.autotune([triton.Config({"BLOCK": size}, num_warps=size // 32) for size in (64, 128)], key=["n"])
@triton.heuristics({"EVEN": lambda given: given["n"] % 64 == 0})
@triton.jit
def scale_kernel(
    x, y, index, bias, n, step, factor,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr = tl.float32,
):
    raise AssertionError("nothing is launched")

@triton.jit
def back_kernel(dy):
    pass

@triton.jit
def odd_kernel(x, name):
    pass

def scale(x, index, factor):
    y = torch.empty_like(x)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    grid = lambda given: (triton.cdiv(x.numel(), given["BLOCK"]), processors)
    scale_kernel[grid](x, y, index, None, x.numel(), x.stride(-1), factor)
    return y

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        assert x.is_cuda and x.device.type == "cuda" and not x.is_cpu
        return scale(x, index, 0.5)

    @staticmethod
    def backward(ctx, dy):
        assert dy.is_cuda
        back_kernel[1,](torch.empty(3, device=dy.device, dtype=torch.bfloat16))
        return dy, None
"""
SCRIPT = """
import torch
from kernels import Scale, odd_kernel

def main():
    x = torch.randn(4, 101, device="cuda").cuda().requires_grad_()
    Scale.apply(x, torch.tensor([3, 7], device="cuda:0")).sum().backward()
    Scale.apply(torch.randn(2, 64, device="cuda")[:, ::2], torch.tensor([1], dtype=torch.int32).to("cuda"))
    odd_kernel[(1,)](x, ("a", "tuple"))
    assert x.sum() is None, "results are not there"

main()
"""


@pytest.fixture(scope="module")
def answer(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("team")
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "launches.py").write_text(SCRIPT)
    (told,) = children.answers(RECORDING, folder, [{"run": str(folder / "launches.py")}])
    assert isinstance(told, dict), told
    return {**told, "folder": folder}


def test_a_launch_says_what_a_table_needs(answer):
    table = answer["launches"][0]["table"]
    assert table["signature"] == {"x": "*fp32", "y": "*fp32", "index": "*i64", "n": "i32", "factor": "fp32"}
    first = {"EVEN": False, "BLOCK": 64, "KIND": "tl.float32", "bias": "None", "step": 1}
    assert table["constants"] == first, "the first config, what Triton compiles in, and defaults"
    assert (table["grid"], table["num_warps"], table["values"]) == ([7, 132], 2, {"n": 404, "factor": 0.5})
    assert (table["shapes"]["x"], table["fill"]) == ([4, 101], {"index": [3, 8]})
    assert own_kernel("scale", {"kernel": "kernels:scale_kernel", **table, "fill": {}})


def test_strides_and_a_backward_are_seen(answer):
    _, strided, back = (one["table"] for one in answer["launches"])
    assert (strided["shapes"]["x"], strided["strides"]["x"]) == ([2, 32], [64, 2])
    assert strided["signature"]["step"] == "i32"
    assert back["signature"] == {"dy": "*bf16"}


def test_what_no_table_can_say_is_named(answer):
    assert answer["unsaid"] == {"kernels:odd_kernel": "name is a tuple"}


def test_a_script_that_compares_results_ends_and_its_launches_count(answer):
    assert answer["ended"] == "AssertionError: results are not there"


def test_kernels_are_found_in_sources_with_who_launches_them(answer):
    found = {one.name: one.host for one in kernels_of(Path(answer["folder"]))}
    assert found == {
        **{"scale_kernel": "by scale()", "back_kernel": "by backward()", "odd_kernel": "by main()"},
        **{"helper": "by no function here"},
    }
