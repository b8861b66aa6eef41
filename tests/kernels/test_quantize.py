"""Rows rounded to fp8, and widened again: the words and numbers of the oracles, bit for bit."""

import pytest
import torch

from tests.kernels.checks import DTYPES, LAYOUTS, assert_written, normal, rows_for
from tests.products import pairwise
from tpkernels.kernels import launch
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF, act_ref
from tpkernels.kernels.dequantize import dequantize
from tpkernels.kernels.quantize import quantize
from tpkernels.kernels.scaled import DTYPE_OF, LINE, SECTOR, Scaled, dequantize_ref, quantize_ref
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import MAX_FEATURES

pytestmark = pytest.mark.needs("fp8")

SCALINGS = {"rows": ("rows", False), "blocks": ("blocks", False), "squares": ("blocks", True)}
OPTIONS = {"e4m3": ("e4m3", False), "e5m2": ("e5m2", False), "power_of_two": ("e4m3", True)}


def spread(rows, columns, dtype, device):
    """Rows of sizes from 1e-3 to 1e3."""
    sizes = torch.logspace(-3, 3, rows, device=device)
    return (normal(rows, columns, torch.float32, device) * sizes[:, None]).to(dtype)


def assert_same(ours, oracles):
    torch.testing.assert_close(ours, oracles, rtol=0, atol=0, equal_nan=True)  # dtype and shape, too


def assert_words_of_oracle(x, scaling="rows", square=False, format="e4m3", power_of_two=False):
    options = {"power_of_two": power_of_two, "square": square}
    ours = quantize(x, format=format, scaling=scaling, **options)
    assert ours.dtype == torch.int32
    assert_same(ours, quantize_ref(x, format, scaling, **options))


def test_rows_longer_than_a_program_holds(device):
    x = spread(2, MAX_FEATURES + 3617, torch.bfloat16, device)
    x[0, -1] = 1e6  # the last block has a say in the scale
    assert_words_of_oracle(x)


@pairwise(features=[1028, 4096, 4225], scaling=SCALINGS, by_columns=[False, True])
def test_wide_rows_start_at_sectors_or_lines_after_zeros(features, scaling, by_columns, device):
    x = spread(5, features, torch.bfloat16, device)
    assert_words_of_oracle(x.t().contiguous().t() if by_columns else x, *scaling)
    pitch = 4 * quantize_ref(x, "e4m3", *scaling[:1]).shape[1]
    assert pitch % (LINE if features >= 4096 else SECTOR) == 0
    assert pitch < 1.07 * features


@pairwise(layout=LAYOUTS, scaling=SCALINGS)
def test_any_layout_is_taken(layout, scaling, device):
    """What surrounds a view is NaN, so that reading it shows."""
    assert_words_of_oracle(layout(spread(37, 301, torch.float16, device)), *scaling)


@pairwise(shape=[(0, 8), (5, 0), (0, 0)], scaling=SCALINGS)
def test_empty_matrices_have_words(shape, scaling, device):
    for x in (torch.ones(shape, device=device), torch.ones(shape[::-1], device=device).t()):
        assert_words_of_oracle(x, *scaling)


def strange_rows(dtype, device):
    """Each with another trait in its second block of 128; and a row without any."""
    limits, nan, inf = torch.finfo(dtype), float("nan"), float("inf")
    rows = normal(16, 301, torch.float32, device).to(dtype)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] *= 1e-40  # zero, but in bf16 and fp32
    rows[3] = limits.smallest_normal * torch.sign(rows[3])
    rows[4, 130] = limits.max
    rows[5, 130] = -limits.max
    rows[6] = rows[6].sign() * limits.max
    for row, number in enumerate((nan, -nan, inf, -inf), start=7):
        rows[row, 130] = number
    rows[11] = inf
    rows[12, 128:256] = 0
    rows[13, 130] = 2.0**-126 if dtype != torch.float16 else 2.0**-24
    return rows


@pairwise(dtype=DTYPES, scaling=SCALINGS, options=OPTIONS)
def test_rows_that_are_zero_tiny_huge_or_no_numbers(dtype, scaling, options, device):
    x = strange_rows(dtype, device)
    for by_rows_or_columns in (x, LAYOUTS["transposed"](x)):
        assert_words_of_oracle(by_rows_or_columns, *scaling, *options)


@pairwise(square=[False, True], format=["e4m3", "e5m2"], dtype=[torch.float32, torch.bfloat16])
def test_a_block_next_to_the_largest_number_stays_finite(square, format, dtype, device):
    """fp8 would round it to 2**128, times a power of two."""
    x = torch.zeros(130, 300, dtype=dtype, device=device)
    x[0, 3], x[129, 299] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    assert_words_of_oracle(x, "blocks", square, format, True)
    words = Scaled(quantize(x, format=format, scaling="blocks", power_of_two=True), 300, format, "blocks")
    back = dequantize(words.data, words.scale, dtype="float32")
    assert_same(back.sign(), x.float().sign())
    assert 0.87 * torch.finfo(dtype).max < back.abs().max() < torch.inf


def test_nan_and_infinity_stay_in_their_row_or_block(device):
    x = strange_rows(torch.float32, device)
    lost = torch.tensor([row in range(7, 12) for row in range(16)], device=device)
    for scaling in ("rows", "blocks"):
        made = Scaled(quantize(x, format="e4m3", scaling=scaling), 301, "e4m3", scaling)
        scale = made.scale
        assert torch.equal(scale[:, 1 - scale.shape[1] :].isnan().any(1), lost)
        assert torch.equal(scale[:, 0].isnan(), lost if scaling == "rows" else x[:, 0].isinf())
        assert not made.data.float().isnan().any()


@pytest.mark.parametrize("format", DTYPE_OF)
def test_quotients_on_both_sides_of_each_tie(format, device):
    """Where a product with the inverse of the scale would go astray."""
    last = 0x7E if format == "e4m3" else 0x7B
    numbers = torch.arange(last + 1, dtype=torch.uint8).view(DTYPE_OF[format]).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    scales = torch.rand(50, 1).double() + 0.5
    near = (scales * middles.double()).float()
    largest = (scales * numbers[-1].double()).float()
    up, down = near.nextafter(near + 1), near.nextafter(near - 1)
    x = torch.cat([largest, near, up, down], 1).to(device)
    assert_words_of_oracle(x, format=format)
    made = Scaled(quantize_ref(x, format, "rows"), x.shape[1], format, "rows")
    by_inverse = (x * (1 / made.scale)).to(DTYPE_OF[format])
    assert not torch.equal(by_inverse.view(torch.uint8), made.data.view(torch.uint8)), (
        "the faster way is wrong"
    )


def test_words_and_numbers_go_into_given_rows_alone(device):
    x = spread(5, 301, torch.bfloat16, device)
    oracles = quantize_ref(x, "e4m3", "blocks")
    out, around = rows_for([oracles])
    quantize(x, format="e4m3", scaling="blocks", out=out[0])
    assert_written(out, around, [oracles])
    words = quantize_ref(normal(5, 300, torch.float32, device), "e4m3", "blocks")
    packed = Scaled(words, 300, "e4m3", "blocks")
    oracles = dequantize_ref(packed.data, packed.scale, torch.float32)
    out, around = rows_for([oracles])
    dequantize(packed.data, packed.scale, dtype="float32", out=out[0])
    assert_written(out, around, [oracles])


STEP = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}  # from one number to the next, at most, as a part of it
LEAST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}  # the smallest number: a step where numbers are subnormal
ERROR = 1e-6  # of activations in fp32, as a part of what they take


def assert_one_step_apart(ours, oracles, like, format, scaling):
    """Nearly all numbers are those of the oracle. Others are a step off, or what the activation may be.

    like: what the activation takes, or both products of a gated unit
    """
    made, wanted = (Scaled(words, like.shape[1], format, scaling) for words in (ours, oracles))
    torch.testing.assert_close(made.scale, wanted.scale, rtol=ERROR, atol=0, equal_nan=True)
    a, b = (dequantize_ref(each.data, each.scale, torch.float64) for each in (made, wanted))
    least = dequantize_ref(torch.ones_like(made.data), wanted.scale, torch.float64) * LEAST[format]
    bound = torch.maximum(b.abs() * STEP[format], least) + ERROR * like.abs().double()
    assert torch.equal(a.isnan(), b.isnan())
    assert ((a - b).abs() <= bound)[b.isfinite()].all()
    differ = (made.data.view(torch.uint8) != wanted.data.view(torch.uint8)).double().mean()
    assert differ <= 0.01, f"{100 * differ:.1f} % of the numbers are not the oracle's"


@pairwise(activation=ACTIVATIONS, scaling=["rows", "blocks"], by=["rows", "columns"], format=list(DTYPE_OF))
def test_activation_is_applied_in_fp32_on_the_way_in(activation, scaling, by, format, device):
    z = 2 * normal(37, 301, torch.bfloat16, device)
    z[3, 5], z[4, 5], z[5] = float("nan"), float("inf"), 0
    z = LAYOUTS["transposed"](z) if by == "columns" else z
    ours = quantize(z, activation=activation, format=format, scaling=scaling)
    oracles = quantize_ref(act_ref(z.float(), activation), format, scaling)
    assert_one_step_apart(ours, oracles, z, format, scaling)
    assert_same(ours[5], oracles[5])


@pairwise(kind=list(GATE_OF), scaling=["rows", "blocks"], by=["rows", "columns", "mixed"])
def test_gated_unit_is_applied_in_fp32_on_the_way_in(kind, scaling, by, device):
    g, u = (normal(37, 301, torch.bfloat16, device) for _ in range(2))
    g[3, 5], u[4, 5], u[5] = float("nan"), float("inf"), 0
    oracles = quantize_ref(act_ref(g.float(), GATE_OF[kind]) * u.float(), "e4m3", scaling, power_of_two=True)
    g = LAYOUTS["transposed"](g) if by == "columns" else g
    u = u if by == "rows" else LAYOUTS["transposed"](u)
    ours = quantize(g, u, activation=GATE_OF[kind], format="e4m3", scaling=scaling, power_of_two=True)
    assert_one_step_apart(ours, oracles, g * u, "e4m3", scaling)


def test_activation_is_not_rounded_to_16_bits(device):
    """The bound above can tell: that way one number of seventy differs."""
    z = normal(64, 1024, torch.bfloat16, device)
    ours = quantize(z, activation="gelu", format="e4m3", scaling="rows")
    twice_rounded = quantize_ref(act_ref(z, "gelu"), "e4m3", "rows")
    with pytest.raises(AssertionError, match=r"numbers are not the oracle's|Tensor-likes are not close"):
        assert_one_step_apart(ours, twice_rounded, z, "e4m3", "rows")


WORDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
WIDENED = {"one_row": (1, 136), "one_column": (40, 1), "ragged": (37, 301), "aligned": (9, 2052)}


@pairwise(shape=WIDENED, scaling=["rows", "blocks"], format=list(DTYPE_OF), dtype=DTYPES)
def test_widened_numbers_are_the_oracles(shape, scaling, format, dtype, device):
    x = normal(*shape, torch.float32, device) * torch.logspace(-3, 3, shape[0], device=device)[:, None]
    x[-1, -1] = float("nan")
    packed = Scaled(quantize_ref(x, format, scaling), shape[1], format, scaling)
    ours = dequantize(packed.data, packed.scale, dtype=WORDS[dtype])
    assert ours.isnan().any()
    assert_same(ours, dequantize_ref(packed.data, packed.scale, dtype))


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)], ids=str)
def test_empty_matrices_are_widened(shape, device):
    data = torch.empty(shape, device=device).to(torch.float8_e4m3fn)
    assert dequantize(data, torch.ones(shape[0], 1, device=device), dtype="bfloat16").shape == shape


ONES, HOW = torch.ones(4, 8), {"format": "e4m3", "scaling": "rows"}
DATA, SCALE = torch.ones(4, 300).to(torch.float8_e4m3fn), torch.ones(4, 3)
REFUSED = {
    "float64": (lambda: quantize(ONES.double(), **HOW), "got torch.float64"),
    "3-D": (lambda: quantize(ONES[None], **HOW), "x of 2 dimensions"),
    "format": (lambda: quantize(ONES, **HOW | {"format": "e3m4"}), "expected format 'e4m3' or 'e5m2'"),
    "scaling": (lambda: quantize(ONES, **HOW | {"scaling": "row"}), "expected scaling 'rows' or 'blocks'"),
    "activation": (lambda: quantize(ONES, activation="tanh", **HOW), "expected an activation of none"),
    "u": (
        lambda: quantize(ONES, ONES[:, :4], activation="silu", **HOW),
        r"expected u of the shape of x \(4, 8\), got \(4, 4\)",
    ),
    "out": (lambda: quantize(ONES, out=ONES.int(), **HOW), r"expected words of out .* of shape \(4, 3\)"),
    "out in fp32": (lambda: quantize(ONES, out=ONES[:, :3], **HOW), "expected words of out"),
    "wide float64": (
        lambda: dequantize(DATA, SCALE, dtype="float64"),
        "bfloat16, float16 or float32 as dtype",
    ),
    "wide data": (lambda: dequantize(SCALE, SCALE, dtype="float32"), "expected data in fp8"),
    "wide scale": (lambda: dequantize(DATA, SCALE.double(), dtype="float32"), "got .* and torch.float64"),
    "wide 3-D": (lambda: dequantize(DATA[None], SCALE, dtype="float32"), "data of 2 dimensions"),
    "wide scales": (
        lambda: dequantize(DATA, SCALE[:, :2], dtype="float32"),
        r"scale of shape \(4, 1\) or \(4, 3\) .* got \(4, 2\)",
    ),
    "wide out": (
        lambda: dequantize(DATA, SCALE, dtype="float32", out=torch.empty(4, 300, dtype=torch.float16)),
        "y of out in torch.float32",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these tensors are on the CPU")
@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_quantized_or_widened_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_program_numbers_of_half_a_million_rows_fit_a_grid():
    """Recorded, as no test has the memory."""
    x = torch.empty(2**19, 2**13, dtype=torch.bfloat16, device="meta")
    with launch.recording(H100) as launches:
        for each in (x, x.t()):
            quantize(each, format="e4m3", scaling="rows")
            quantize(each, format="e4m3", scaling="blocks", square=True)
    assert all(len(one.grid) == 1 and one.grid[0] < 2**31 for one in launches)
