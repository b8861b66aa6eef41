"""MXFP8's own: bytes of scales, their order for tensor cores, and both copies from one reading."""

import pytest
import torch

from tests.kernels.checks import DTYPES, LAYOUTS, normal
from tests.products import pairwise
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.kernels import launch
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.mx import mx_linear_fwd
from tpkernels.kernels.quantize import quantize, quantize_both
from tpkernels.kernels.scaled import DTYPE_OF, Scaled, empty_words, in_fp32, quantize_ref, swizzled
from tpkernels.kernels.target import B200, H100, RTX_5090

LARGEST_POWER = {"e4m3": 8, "e5m2": 15}  # of two, among the numbers of a format


@pytest.mark.parametrize("format", DTYPE_OF)
def test_scales_are_the_least_powers_of_two_that_lose_no_number(format, device):
    """Of each power of two of fp32, subnormal ones among them, times some sizes, and of what lies next."""
    powers = torch.cat([torch.exp2(torch.arange(-149, 128).double()), torch.tensor([0.0]).double()])
    largest = torch.finfo(DTYPE_OF[format]).max / 2.0 ** LARGEST_POWER[format]
    sizes = torch.cat([powers, powers * largest, powers * 1.5]).float()
    sizes = torch.cat([sizes, sizes.nextafter(sizes + sizes), sizes.nextafter(sizes * 0)])
    sizes = sizes[sizes.isfinite()]
    x = torch.zeros(len(sizes), 33)
    x[:, 7], x[:, 32] = sizes, -sizes
    words = quantize(x.to(device), format=format, scaling="mx")
    assert torch.equal(words, quantize_ref(x.to(device), format, "mx"))
    made = Scaled(words, 33, format, "mx")
    assert made.scale.shape == (len(sizes), 2)
    assert torch.equal(made.scale[:, 0], made.scale[:, 1])
    exponent = made.scale[:, 0].cpu().double() - 127
    quotient = sizes.double() / torch.exp2(exponent)
    most = torch.finfo(DTYPE_OF[format]).max
    assert (quotient <= most).all()
    least = (sizes == 0) | (exponent == -126)  # zeros have 1; smaller scales are subnormal in fp32
    assert (quotient[~least] > most / 2).all()
    assert (exponent[sizes == 0] == 0).all()


def test_each_byte_stands_for_its_power_of_two():
    scale = torch.arange(256, dtype=torch.uint8)[None]
    expected = torch.exp2(torch.arange(256).double() - 127).float()
    expected[255] = torch.nan
    torch.testing.assert_close(in_fp32(scale)[0], expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(in_fp32(scale), scale.view(torch.float8_e8m0fnu).float(), equal_nan=True)


@pytest.mark.parametrize("side", ["x", "weight"])
def test_products_are_right_with_each_byte_of_either_operand(side, device):
    """256 rows of 45, a byte each for the first 32 of them; for the others one in the middle."""
    numbers = torch.arange(256 * 45).remainder(15).sub(6).view(256, 45)
    scale = torch.stack([torch.arange(256), torch.full((256,), 127)], 1).byte()
    ones = torch.ones(3, 45), torch.full((3, 2), 127).byte()
    given = [(numbers, scale), ones] if side == "x" else [ones, (numbers, scale)]
    (x, x_scale), (w, w_scale) = ((a.to(torch.float8_e4m3fn).to(device), b.to(device)) for a, b in given)
    size = torch.exp2(scale.double() - 127)
    size[255] = torch.nan
    exact = (numbers[:, :32].sum(1) * size[:, 0] + numbers[:, 32:].sum(1)).to(device)[:, None].expand(-1, 3)
    exact = exact if side == "x" else exact.t()
    ours = mx_linear_fwd(x, w, x_scale, w_scale, dtype="float32").y
    torchs = scaled_linear.by_torch(x, w, x_scale, w_scale, None, "none", False, "float32", False)[0]
    for y in (ours, torchs):
        torch.testing.assert_close(y, exact.float(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (32, 4), (128, 4), (129, 5), (300, 9), (256, 1)])
def test_scales_are_where_tensor_cores_look_for_them(rows, count):
    """Each of them, by the formula that cuBLAS documents; and zeros elsewhere."""
    scale = torch.randint(1, 256, (rows, count), dtype=torch.uint8)
    across = -(-count // 4)
    expected = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(count):
            tile = (r // 128) * across + c // 4
            expected[512 * tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    assert torch.equal(swizzled(scale), expected)


@pairwise(
    shape=[(1, 1), (32, 32), (37, 301), (64, 128), (130, 31), (65, 4225)],
    layout=LAYOUTS,
    dtype=DTYPES,
    format=list(DTYPE_OF),
)
def test_one_reading_gives_the_words_of_rows_and_of_columns(shape, layout, dtype, format, device):
    x = normal(*shape, torch.float32, device) * torch.logspace(-30, 3, shape[0], device=device)[:, None]
    x[0, 0], x[-1, -1] = float("nan"), float("inf")
    x = layout(x.to(dtype))
    rows, columns = quantize_both(x, format=format, scaling="mx")
    assert torch.equal(rows, quantize_ref(x, format, "mx"))
    assert torch.equal(columns, quantize_ref(x.t(), format, "mx"))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)], ids=str)
def test_empty_matrices_have_no_words(shape, device):
    rows, columns = quantize_both(torch.ones(shape, device=device), format="e4m3", scaling="mx")
    assert not rows.numel()
    assert not columns.numel()
    assert (rows.shape[0], columns.shape[0]) == shape


def multiplied(target, in_features=4096, **options):
    x, w = (
        Scaled(empty_words(rows, in_features, "mx", torch.device("meta")), in_features, "e4m3", "mx")
        for rows in (256, 512)
    )
    with launch.recording(target) as launches:
        mx_linear_fwd(x.data, w.data, x.scale, w.scale, **options)
    return launches[0]


def test_tiles_are_those_whose_scales_tensor_cores_apply():
    """128 rows: of fewer, Triton makes 16 bits of fp8 first."""
    for target, features, tma in ((B200, 4096, True), (B200, 301, False), (RTX_5090, 4096, False)):
        constants = multiplied(target, features).constants
        assert constants["BLOCK_ROWS"] == 128
        assert constants["TMA"] == tma


ONES = torch.ones(4, 8)
DATA, SCALE = torch.ones(4, 64).to(torch.float8_e4m3fn), torch.full((4, 2), 127, dtype=torch.uint8)
REFUSED = {
    "Hopper": (lambda: multiplied(H100), r"MXFP8 expected a GPU of capability 10\.0 or later .*, got 9\.0"),
    "format": (lambda: quantize_both(ONES, format="e2m1", scaling="mx"), "expected format 'e4m3' or 'e5m2'"),
    "3-D": (lambda: quantize_both(ONES[None], format="e4m3", scaling="mx"), "x of 2 dimensions"),
    "scales in fp32": (
        lambda: mx_linear_fwd(DATA, DATA, SCALE.float(), SCALE),
        "expected x's scale dense and in torch.uint8, got torch.strided torch.float32",
    ),
    "scales of two kinds": (
        lambda: scaled_linear.by_torch(
            DATA, DATA, SCALE.float(), SCALE, None, "none", False, "float32", False
        ),
        "expected scales of one kind, got torch.float32 and torch.uint8",
    ),
    "a scale a row": (
        lambda: mx_linear_fwd(DATA, DATA, SCALE[:, :1], SCALE[:, :1]),
        r"expected x's scale of shape \(4, S\), where S is 2",
    ),
    "scales by columns": (
        lambda: mx_linear_fwd(DATA, DATA, SCALE.t().contiguous().t(), SCALE),
        "expected x's scale with contiguous rows",
    ),
    "half a block": (
        lambda: mx_linear_fwd(
            DATA, DATA, SCALE, SCALE, tile=MatmulTile(32, 32, 16, num_warps=4, num_stages=1)
        ),
        "whose depth is a multiple of 32",
    ),
    "float64": (
        lambda: mx_linear_fwd(DATA, DATA, SCALE, SCALE, dtype="float64"),
        "expected dtype of bfloat16",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tensors are on the CPU")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
