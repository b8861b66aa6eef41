"""What a choice depends on, and what it does not."""

import pytest

pytest.importorskip("hypothesis", reason="any input needs hypothesis")  # a bare GPU machine has none

import torch
from hypothesis import given
from hypothesis import strategies as st

from tpkernels.dispatch.problem import layout_class, token_class
from tpkernels.dispatch.products import PRODUCTS, dgrad, linear
from tpkernels.dispatch.record import Layer

LAYER = Layer(4096, 1024, 512, activation="gelu_tanh")
KEYS = {  # and the result's sizes, and its depth
    "linear": ("4096x1024x512 gelu_tanh+bias+z rows,rows,rows", (4096, 1024), 512),
    "glu": ("4096x1024x512 swiglu+gu rows,rows,rows,rows", (4096, 1024), 512),
    "dgrad": ("4096x1024x512 rows,rows,rows", (4096, 512), 1024),
    "dgrad_pairs": ("4096x2048x512 rows,rows,rows,rows,rows", (4096, 512), 2048),
    "dgrad_act": ("4096x1024x512 gelu_tanh+db rows,rows,rows,rows", (4096, 512), 1024),
    "dglu": ("4096x1024x512 swiglu rows,rows,rows,rows,rows", (4096, 512), 1024),
    "wgrad": ("4096x1024x512 rows,rows,rows", (1024, 512), 4096),
    "wgrad_accumulate_": ("4096x1024x512 float32 rows,rows,rows", (1024, 512), 4096),
}


@pytest.mark.parametrize("step", PRODUCTS)
def test_key_names_all_that_matters(step):
    problem = PRODUCTS[step].problem(*PRODUCTS[step].sample(LAYER))
    key, product, depth = KEYS[step]
    assert (problem.key, problem.product, problem.depth) == (f"{step} bfloat16 {key}", product, depth)


def test_tf32_is_another_problem():
    arguments = dgrad.sample(Layer(64, 32, 16, torch.float32))
    before = torch.backends.cuda.matmul.fp32_precision
    assert dgrad.problem(*arguments).key == "dgrad float32 64x32x16 rows,rows,rows"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert dgrad.problem(*arguments).key == "dgrad float32/tf32 64x32x16 rows,rows,rows"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _layout(tensor):
    return layout_class(dgrad.problem(tensor, torch.empty(tensor.shape[1], 8)).layouts[0])


def test_layouts_are_told_apart():
    x = torch.empty(64, 32)
    assert _layout(x) == "rows"
    assert _layout(x[:, :30]) == "rows"  # a wider matrix around it leaves its rows aligned
    assert _layout(x[:, 1:]) == "ragged"
    assert _layout(torch.empty(64, 31)) == "ragged"
    assert _layout(x.T) == "columns"
    assert _layout(torch.empty(31, 64).T[1:]) == "ragged-columns"
    assert _layout(x[:, ::2]) == "strided"
    assert _layout(x[:1].expand(8, 32)) == "ragged"


@given(st.integers(1, 2**40))
def test_token_class_is_an_upper_bound_within_a_quarter(tokens):
    rounded = token_class(tokens)
    assert tokens <= rounded < 1.25 * tokens + 1
    assert token_class(rounded) == rounded


def test_token_counts_of_a_class_are_one_problem():
    """Or the same key would have other candidates from one batch to the next."""
    for tokens in (4097, 4500, 5120):
        problem = linear.problem(*linear.sample(Layer(tokens, 64, 64)))
        assert problem.key.startswith("linear bfloat16 5120x64x64")
        assert problem.product == (5120, 64)


def test_token_classes_are_few():
    assert len({token_class(tokens) for tokens in range(1, 2**17)}) < 70
