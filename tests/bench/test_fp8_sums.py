"""Emulated sums of tensor cores against hand-made ones, and the page that tells of them."""

from pathlib import Path

import pytest
import torch

from bench.fp8_sums import BITS, DEPTHS, KINDS, error_of, row_of, summed
from tpkernels.kernels.recipe import BLOCK

PAGE = (Path(__file__).parents[2] / "docs/fp8-figures.md").read_text()


def added(*terms: float, promote_every=None) -> float:
    """The emulated sum of products that these are."""
    return float(summed(torch.tensor([terms]), torch.ones(1, len(terms)), promote_every))


def test_bits_below_the_fourteenth_of_the_largest_are_cut_off():
    last = 2.0 ** (1 - BITS)  # of 1
    assert added(1, last) == 1 + last
    assert added(1, last / 2) == added(1, -last / 2) == 1
    assert added(1, *[last / 2] * 100) == 1
    assert added(1.5, last * 1.75) == 1.5 + last
    assert added(1 + 2 * last, 1 + last) == 2 + 2 * last  # of which the last bit is worth more


def test_what_the_sum_so_far_pushes_out_is_kept_where_sums_are_carried_over():
    small = 2.0**-BITS
    terms = [1, *[0.0] * (BLOCK - 1), *[small] * BLOCK]
    assert added(*terms) == 1
    assert added(*terms, promote_every=BLOCK) == 1 + BLOCK * small


def test_sums_of_enough_bits_are_exact():
    x, w = torch.randn(5, 300).to(torch.float8_e4m3fn), torch.randn(7, 300).to(torch.float8_e4m3fn)
    exact = x.double() @ w.double().t()
    torch.testing.assert_close(summed(x, w, bits=50), exact, rtol=1e-13, atol=1e-13)
    assert (summed(x, w) - exact).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_errors_grow_with_depth_unless_sums_are_carried_over(kind):
    fast, promoted = ([error_of(kind, depth, every, 16) for depth in (256, 2048)] for every in (None, BLOCK))
    assert fast[1] > 1.5 * fast[0]
    assert promoted[1] < 1.1 * promoted[0]


@pytest.mark.parametrize("depth", DEPTHS[:2])
def test_the_page_tells_what_is_computed(depth):
    assert row_of(depth) in PAGE
