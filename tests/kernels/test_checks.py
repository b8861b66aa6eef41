"""The checks themselves can fail: planted faults turn them red."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.checks import assert_accurate, assert_framed, normal
from tpkernels.gate.accuracy import BOUND, Frames


@triton.jit
def _careless_copy_kernel(x_ptr, y_ptr, rows, cols, BLOCK: tl.constexpr, MASK_STORE: tl.constexpr):
    """Copies (rows, cols), and forgets the mask of its store unless told."""
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < cols)
    value = tl.load(x_ptr + r * cols + c, inside, 0.0)
    tl.store(y_ptr + r * cols + c, value, inside if MASK_STORE else r < BLOCK)


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "forgotten"])
def test_frames_notice_a_store_without_mask(masked, device):
    frames = Frames()
    x, y = normal(7, 5, torch.float32, device), frames.empty((7, 5), torch.float32, device)
    # 8 * 5 + 3 elements: past the end of y, within the margin of the frame
    _careless_copy_kernel[(1,)](x, y, 7, 5, BLOCK=8, MASK_STORE=masked)
    if masked:
        assert_framed(frames)
        assert torch.equal(x, y)
    else:
        with pytest.raises(AssertionError, match="outside its output of 35 elements"):
            assert_framed(frames)


def test_assert_accurate_notices_an_element_never_written(device):
    exact = normal(20, 20, torch.float64, device)
    actual = exact.bfloat16()
    assert_accurate(actual, exact)
    actual[19, 19] = float("nan")  # what `Frames` left there
    with pytest.raises(AssertionError, match="error nan"):
        assert_accurate(actual, exact)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_assert_accurate_notices_one_rounding_too_many(dtype, device):
    """Three roundings instead of one: an accumulator in the narrow type would be worse."""
    exact = normal(64, 64, torch.float64, device)
    assert_accurate(exact.to(dtype), exact)
    noise = 1 + (2 * torch.rand_like(exact) - 1) * 3 * BOUND[dtype]
    with pytest.raises(AssertionError, match="against float64"):
        assert_accurate((exact * noise).to(dtype), exact)


def test_assert_accurate_notices_twice_torchs_error(device):
    exact = normal(64, 64, torch.float64, device)
    with pytest.raises(AssertionError, match="torch's own"):
        assert_accurate((exact * (1 + 1e-3)).bfloat16(), exact, (exact * (1 + 1e-4)).float())


def test_assert_accurate_notices_a_wrong_shape(device):
    with pytest.raises(AssertionError, match="error inf"):
        assert_accurate(torch.ones(4, device=device), torch.ones(5, dtype=torch.float64, device=device))
