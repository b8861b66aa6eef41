"""The checks themselves can fail: planted faults turn them red."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.checks import assert_accurate, assert_framed, normal
from tpkernels.gate.numerics import BOUND, Frames


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
        with pytest.raises(AssertionError, match="written outside an output"):
            assert_framed(frames)


def one_unwritten(t):
    t = t.bfloat16()
    t[19, 19] = float("nan")  # what `Frames` left there
    return t


def three_roundings(dtype):
    """Instead of one: an accumulator in the narrow type would be worse."""
    return lambda t: (t * (1 + (2 * torch.rand_like(t) - 1) * 3 * BOUND[dtype])).to(dtype)


FLAWS = {
    "an_element_never_written": (one_unwritten, "error nan"),
    "a_wrong_shape": (lambda t: t[:-1].float(), "error inf"),
    **{f"one_rounding_too_many_{dtype}": (three_roundings(dtype), "against float64") for dtype in BOUND},
}


@pytest.mark.parametrize(("flawed", "message"), FLAWS.values(), ids=FLAWS.keys())
def test_assert_accurate_notices_a_flaw(flawed, message, device):
    exact = normal(64, 64, torch.float64, device)
    actual = flawed(exact)
    assert_accurate(exact.to(actual.dtype), exact)
    with pytest.raises(AssertionError, match=message):
        assert_accurate(actual, exact)


def test_assert_accurate_notices_twice_torchs_error(device):
    exact = normal(64, 64, torch.float64, device)
    with pytest.raises(AssertionError, match="torch's own"):
        assert_accurate((exact * (1 + 1e-3)).bfloat16(), exact, (exact * (1 + 1e-4)).float())
