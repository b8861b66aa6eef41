"""Kernels of others beside their oracles: what is a finding, and what a mistake in the config."""

from __future__ import annotations

import re

import pytest
import torch

from tpkernels.cli.check import PREPARE
from tpkernels.gate.numerics import SEED
from tpkernels.gate.user_kernels.children import answers
from tpkernels.gate.user_kernels.recorded import sketch
from tpkernels.gate.user_kernels.table import own_kernel

CODE = """
import os
import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import rsqrt

@triton.jit
def scale_kernel(x, y, n, factor, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(x + at, mask=at < n, other=0.0)
    if FAULT == "unmasked_load":
        loaded = loaded + 0 * tl.sum(tl.load(x + at), 0)
    if FAULT == "hidden_read":
        loaded = tl.where(at < n, tl.load(x + at), 0.0)
    end = n + (FAULT == "overrun") - (FAULT == "unwritten")
    if FAULT == "input":
        tl.store(x + at, loaded, mask=at < n)
        tl.store(x + at, loaded + 1, mask=at < n)
    if FAULT == "raises":
        tl.static_assert(BLOCK == 3, "a block of three")
    if FAULT == "dies":
        os._exit(7)
    tl.store(y + at, loaded * factor, mask=at < end)

@triton.jit
def pick_kernel(table, index, picked, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(index + at, mask=at < n, other=0)
    tl.atomic_add(picked + rows, tl.load(table + rows, mask=at < n, other=0), mask=at < n)

@triton.jit
def copy_kernel(a, b, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    b.store([row, col], a.load([row, col]))

@triton.jit
def sum_kernel(x, y, columns, SUM: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), SUM)
    for start in range(0, columns, BLOCK):
        total += tl.load(x + row * columns + start + at, mask=start + at < columns, other=0.0).to(SUM)
    scaled = (tl.sum(total.to(tl.float32), 0) * 0.2).to(tl.bfloat16)
    tl.store(y + row, scaled)

def row_sum(x):
    return 0.2 * x.sum(1)

@triton.jit
def in_bf16_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(x + at, mask=at < n, other=0.0)
    positive = tl.where(loaded > -0.5, loaded + 1.0, -loaded).to(tl.float64).to(tl.bfloat16)
    tl.store(y + at, tl.maximum(positive * 3.0, loaded), mask=at < n)

@triton.jit
def libdevice_kernel(x, y, n, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(x + at, mask=at < n, other=0.0)
    root = rsqrt(loaded * loaded + eps.to(tl.float32))
    tl.store(y + at, root + tl.extra.cuda.libdevice.tanh(loaded), mask=at < n)

def by_libdevice(x, eps):
    return (x * x + eps).rsqrt() + x.tanh()

def in_bf16(x):
    return 3 * torch.where(x > -0.5, x + 1, -x)

def scale(x, factor):
    assert x.dtype == torch.float64
    return x * factor

def pick(table, index, picked):
    return {"picked": picked.index_add(0, index, table[index])}

def copy(a, **others):
    return a

def off(x, factor):
    return 1.001 * factor * x

def off_by_one(table, index, picked):
    exact = picked.index_add(0, index, table[index])
    exact[3] += 1
    return exact

def raises(x):
    raise ValueError("no oracle today")

def cut(x, factor):
    return x[1:]

def two(x):
    return x, x

def unknown(z):
    return z

def undefined(x):
    return x * float("nan")

def other_name(x):
    return {"z": x}
"""
SCALE = {
    "kernel": "code:scale_kernel",
    "signature": {"x": "*fp32", "y": "*fp32", "n": "i32", "factor": "fp32"},
    "constants": {"FAULT": "", "BLOCK": 128},
    "shapes": {"x": ["n"], "y": ["n"]},
    "values": {"factor": 0.3},
    "grid": ["cdiv(n, BLOCK)"],
    "oracle": "code:scale",
    "oracle_sizes": [{"n": 1000}],
    "outputs": ["y"],
}
PICK = {
    "kernel": "code:pick_kernel",
    "signature": {"table": "*i32", "index": "*i64", "picked": "*i32", "n": "i32"},
    "constants": {"BLOCK": 64},
    "shapes": {"table": ["rows"], "index": ["n"], "picked": ["rows"]},
    "grid": ["cdiv(n, BLOCK)"],
    "oracle": "code:pick",
    "oracle_sizes": [{"n": 100, "rows": 50}],
    "outputs": ["picked"],
    "fill": {"table": [-9, 10], "index": [0, "rows"], "picked": "zeros"},
}
COPY = {
    "kernel": "code:copy_kernel",
    "signature": {"a": "tensordesc<bf16[16, 32]>", "b": "tensordesc<bf16[16,32]>"},
    "constants": {"ROWS": 16, "COLS": 32},
    "shapes": {"a": ["rows", "cols"], "b": ["rows", "cols"]},
    "strides": {"a": ["cols + 8", 1]},
    "grid": ["cdiv(rows, ROWS)", "cdiv(cols, COLS)"],
    "oracle": "code:copy",
    "oracle_sizes": [{"rows": 19, "cols": 40}],
    "outputs": ["b"],
}


SUM = {
    "kernel": "code:sum_kernel",
    "signature": {"x": "*bf16", "y": "*bf16", "columns": "i32"},
    "constants": {"SUM": "tl.float32", "BLOCK": 16},
    "shapes": {"x": ["rows", "columns"], "y": ["rows"]},
    "grid": ["rows"],
    "oracle": "code:row_sum",
    "oracle_sizes": [{"rows": 300, "columns": 45}],
    "outputs": ["y"],
    "fill": {"x": "uniform"},
}
HALF = SUM | {"constants": {"SUM": "tl.float16", "BLOCK": 16}}


IN_BF16 = {
    **SCALE,
    "kernel": "code:in_bf16_kernel",
    "signature": {"x": "*bf16", "y": "*bf16", "n": "i32"},
    "constants": {"BLOCK": 128},
    "values": {},
    "oracle": "code:in_bf16",
    "tolerance": {"bf16": 5e-3},  # it rounds three times
}


LIBDEVICE = SCALE | {
    "kernel": "code:libdevice_kernel",
    "signature": {"x": "*fp32", "y": "*fp32", "n": "i32", "eps": "fp32"},
    "constants": {"BLOCK": 128},
    "values": {"eps": 0.25},
    "oracle": "code:by_libdevice",
    "tolerance": {"fp32": 1e-6},
}
RECORDED = SCALE | {"oracle": "recorded"}
SKETCHES = {  # of what SCALE computes, and of twice that
    name: {"y": sketch(times * torch.randn(1000, generator=torch.Generator().manual_seed(SEED)) * 0.3)}
    for name, times in (("recorded", 1), ("recorded_otherwise", 2))
}


def faulty(fault):
    return SCALE | {"constants": {"FAULT": fault, "BLOCK": 128}}


def with_oracle(name):
    return SCALE | {"oracle": f"code:{name}"}


CASES = {  # table, what fails, what is mistaken
    "sound": (SCALE, "", None),
    "integers": (PICK, "", None),
    "libdevice": (LIBDEVICE, "", None),
    "recorded": (RECORDED, "", None),
    "recorded_otherwise": (RECORDED, r"y is off by 1\.\d+e\+06 times the bound from what was recorded", None),
    "recorded_and_astray": (
        RECORDED | {"constants": {"FAULT": "hidden_read", "BLOCK": 128}},
        r"read outside x \(code\.py:15\)",
        None,
    ),
    "descriptors": (COPY, "", None),
    "off": (with_oracle("off"), r"y is off by 3\.33e\+03 times the bound", None),
    "tolerated": (with_oracle("off") | {"tolerance": {"fp32": 2e-3}}, "", None),
    "other_integers": (PICK | {"oracle": "code:off_by_one"}, "picked differs in 1 of 50 elements", None),
    "unmasked_load": (faulty("unmasked_load"), r"read outside x \(code.py:13\); y holds NaN", None),
    "hidden_read": (faulty("hidden_read"), r"read outside x \(code.py:15\)", None),
    "overrun": (faulty("overrun"), r"written outside y \(code.py:24\)", None),
    "sum": (SUM, "", None),
    "sum_in_fp32": (SUM, "", None),
    "half_in_bf16": (HALF, "", None),  # which hides sums in fp16
    "half_in_fp32": (HALF, r"y is off by 8\.09 times the bound", None),
    "copy_in_fp32": (COPY, "", None),
    "computing_in_bf16": (IN_BF16, "", None),
    "computing_in_fp32": (IN_BF16, "", None),
    "unwritten": (faulty("unwritten"), "y holds NaN", None),
    "input": (faulty("input"), "writes into x, which is none of its outputs", None),
    "raises": (faulty("raises"), ".*a block of three.*", None),
    "dies": (faulty("dies"), "ended its process with exit code 7.*", None),
    "after_a_death": (SCALE, "", None),
    "raising": (with_oracle("raises"), None, "oracle: code:raises raised ValueError: no oracle today"),
    "undefined": (with_oracle("undefined"), None, "oracle: code:undefined returned NaN in y"),
    "cut": (with_oracle("cut"), None, r"oracle: code:cut returned y of shape \(999,\), expected \(1000,\)"),
    "two": (with_oracle("two"), None, "oracle: code:two returned 2, expected tensors for y"),
    "unknown": (with_oracle("unknown"), None, "oracle: code:unknown asks for 'z'; there are .*"),
    "other_name": (with_oracle("other_name"), None, "oracle: code:other_name returned 'z', expected .* y"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The answer to each case; a process interprets one after another."""
    folder = tmp_path_factory.mktemp("team")
    (folder / "code.py").write_text(CODE)
    items = [
        {
            **{"name": name, "table": own_kernel(name, table).as_table(), "sizes": 0, "prepare": PREPARE},
            "wide": name.endswith("in_fp32"),
            "recorded": SKETCHES.get(name, SKETCHES["recorded"]),
        }
        for name, (table, _, _) in CASES.items()
    ]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return dict(
        zip(CASES, answers("tpkernels.gate.user_kernels.numerics", folder, items, variables), strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_case_is_told(name, told):
    _, failure, mistake = CASES[name]
    answer = told[name]
    if isinstance(answer, str):
        answer = {"error": None, "failure": answer}
    wanted, got = (failure, answer.get("failure")) if mistake is None else (mistake, answer.get("mistake"))
    assert got is not None, answer
    assert re.fullmatch(wanted, got), got
    if failure == "":
        assert 0 <= answer["error"] < 1
