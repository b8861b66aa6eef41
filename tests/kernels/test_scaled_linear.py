"""`scaled_linear_fwd` against float64 of the dequantized operands: shapes, layouts, and what is refused."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.checks import EMPTY_SHAPES
from tests.products import once
from tpkernels.dispatch.checking import FP8_BOUND
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.gate.numerics import BOUND, relative_error
from tpkernels.kernels import launch
from tpkernels.kernels.activations import act_ref
from tpkernels.kernels.scaled import BLOCK, Scaled, empty_words, quantize_ref, spread
from tpkernels.kernels.scaled_linear import RESULTS, scaled_linear_fwd
from tpkernels.kernels.target import B200, H100, L40S, RTX_5090
from tpkernels.kernels.tiles import MatmulTile

pytestmark = pytest.mark.needs("fp8")

TILE = MatmulTile(32, 64, 64, num_warps=4, num_stages=1, parts=2, group=2)
DEEP = replace(TILE, block_depth=128, flatten=True)
# (tokens, in_features, out_features), straddling the edges of TILE and of blocks of 128
SHAPES = {
    "one_tile": (32, 32, 32),
    "ragged": (71, 301, 51),
    "blocks": (40, 384, 140),
    "one_row": (1, 1029, 144),
}
SCALINGS = ("rows", "blocks")
FORMS = ("descriptor", "pointer")
FORMATS = {f"{x}_x_{w}": (x, w) for x in ("e4m3", "e5m2") for w in ("e4m3", "e5m2")}


def scaled(rows, features, format, scaling, device, square=False):
    """Rows of sizes from a hundredth to one, so that no scale serves another row."""
    x = torch.randn(rows, features, device=device)
    together = BLOCK if square else 1
    sizes = 10 ** torch.empty(-(-rows // together), 1, device=device).uniform_(-2, 0)
    x *= sizes.repeat_interleave(together, 0)[:rows]
    return Scaled(quantize_ref(x, format, scaling, square=square), features, format, scaling)


def operands(shape, device, scaling="rows", formats=("e4m3", "e4m3"), square=False):
    tokens, in_features, out_features = shape
    return (
        scaled(tokens, in_features, formats[0], scaling, device),
        scaled(out_features, in_features, formats[1], scaling, device, square),
        torch.randn(out_features, device=device),
    )


def run(x, w, bias=None, *, tile=TILE, **options):
    return scaled_linear_fwd(x.data, w.data, x.scale, w.scale, bias, tile=tile, **options)


def exact_z(x, w, bias=None):
    """In float64, of the numbers that data and scales stand for."""
    wide = [one.data.double() * spread(one.scale, one.features).double() for one in (x, w)]
    z = wide[0] @ wide[1].t()
    return z if bias is None else z + bias.double()


def assert_accurate(actual, exact):
    """By row as well: the norm of all is that of the largest rows."""
    bound = BOUND[actual.dtype] + (FP8_BOUND if actual.is_cuda else 0)
    assert relative_error(actual, exact) < bound
    if exact.shape[1] > 100:
        rows = (actual.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert (rows < 3 * bound).all()


def assert_scaled_linear(x, w, bias, activation="none", dtype="bfloat16", **options):
    before = x.words.clone(), w.words.clone()
    y, z = run(x, w, bias, activation=activation, keep_z=True, dtype=dtype, **options)
    assert torch.equal(x.words, before[0])
    assert torch.equal(w.words, before[1])
    assert y.dtype == z.dtype == RESULTS[dtype]
    exact = exact_z(x, w, bias)
    assert_accurate(z, exact)
    assert_accurate(y, act_ref(exact, activation))


@once(shape=SHAPES, scaling=SCALINGS, dtype=list(RESULTS), formats=FORMATS, activation=["none", "gelu_tanh"])
def test_scaled_linear_fwd_matches_float64(shape, scaling, dtype, formats, activation, device):
    assert_scaled_linear(*operands(shape, device, scaling, formats), activation, dtype)


EXTREMES = [2.0**-120, 1e-30, 1e-18, 1.0, 1e18, 1e30, 3.4e38]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scales_may_be_far_apart_if_results_are_finite(scaling, device):
    """On the way there no product of two of sum and scales may be too large or too small for fp32."""
    signs = [torch.randn(rows, 301, device=device).tanh() for rows in (5, 40)]
    met = 0
    for sizes in product(EXTREMES, EXTREMES):
        x, w = (
            Scaled(quantize_ref(sign * size, "e4m3", scaling), 301, "e4m3", scaling)
            for sign, size in zip(signs, sizes, strict=True)
        )
        exact = exact_z(x, w)
        if 1e-30 < exact.abs().max() < 3.4e38:
            operands = x.data, w.data, x.scale, w.scale, None, "none", False, "float32", False
            assert_accurate(run(x, w, dtype="float32").y, exact)
            assert_accurate(scaled_linear.by_torch(*operands)[0], exact)
            met += 1
    assert met == 28


@once(cols=[128, 256], form=FORMS)
def test_a_scale_for_128_rows_has_the_bits_of_each(cols, form, device):
    x, w, b = operands((16, 1056, 264), device, "blocks", square=True)
    tile = replace(DEEP, block_cols=cols)
    repeated = run(x, w, b, tile=tile, form=form).y
    shared = scaled_linear_fwd(x.data, w.data, x.scale, w.scale[::BLOCK], b, tile=tile, form=form).y
    assert torch.equal(shared, repeated)
    assert_accurate(shared, exact_z(x, w, b))


@once(shape=EMPTY_SHAPES, scaling=SCALINGS)
def test_scaled_linear_fwd_takes_empty(shape, scaling, device):
    x, w, b = operands(shape, device, scaling)
    y, z = run(x, w, b, activation="relu", keep_z=True, dtype="float32")
    torch.testing.assert_close(z, exact_z(x, w, b).float())
    torch.testing.assert_close(y, z.relu())


@pytest.mark.parametrize("which", [0, 1])
def test_rows_of_a_larger_matrix_may_be_multiplied(which, device):
    """Of other words, which are NaN wherever they are read."""
    given = list(operands(SHAPES["ragged"], device, "blocks"))
    rows, count = given[which].words.shape
    words = torch.full((rows + 2, count + 3), -1, dtype=torch.int32, device=device)
    words[1:-1, 1:-2] = given[which].words
    given[which] = replace(given[which], words=words[1:-1, 1:-2])
    assert_scaled_linear(*given)


def test_data_may_start_at_any_byte(device):
    x, w, b = operands(SHAPES["ragged"], device)
    flat = torch.full((x.data.numel() + 1,), -1, dtype=torch.int8, device=device).view(torch.float8_e4m3fn)
    flat[1:] = x.data.flatten()
    y = scaled_linear_fwd(flat[1:].view(x.data.shape), w.data, x.scale, w.scale, b, tile=TILE).y
    assert torch.equal(y, run(x, w, b).y)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rows_do_not_depend_on_the_batch(scaling, device):
    x, w, b = operands((70, 300, 88), device, scaling)
    every = run(x, w, b, activation="gelu").y
    for tokens in (1, 32, 33):
        assert torch.equal(run(x.rows(slice(tokens)), w, b, activation="gelu").y, every[:tokens])


def test_without_activation_y_is_z(device):
    x, w, b = operands(SHAPES["ragged"], device)
    kept, dropped = run(x, w, b, keep_z=True), run(x, w, b)
    assert kept.z is kept.y
    assert dropped.z is None


@once(bad=[float("nan"), float("inf"), -float("inf")], scaling=SCALINGS)
def test_what_is_no_number_stays_in_its_row(bad, scaling, device):
    rows = torch.randn(40, 300, device=device)
    rows[7, 3] = bad
    words = quantize_ref(rows, "e4m3", scaling)
    x, (_, w, b) = Scaled(words, 300, "e4m3", scaling), operands((40, 300, 48), device, scaling)
    y = run(x, w, b).y
    assert y[7].isnan().all()
    assert y[torch.arange(40) != 7].isfinite().all()


def multiply(x, w, /, **changed):
    given = {"x": x.data, "weight": w.data, "x_scale": x.scale, "w_scale": w.scale}
    return scaled_linear_fwd(*(given | changed).values())


REFUSED = {
    "16 bits": (
        lambda x, w, b: multiply(x, w, x=x.data.bfloat16()),
        "expected x dense and in torch.float8_e4m3fn or torch.float8_e5m2, got torch.strided torch.bfloat16",
    ),
    "wide scales": (
        lambda x, w, b: multiply(x, w, x_scale=x.scale.double()),
        "expected x's scale dense and in torch.float32",
    ),
    "bytes": (
        lambda x, w, b: multiply(x, w, x_scale=x.scale.byte(), w_scale=w.scale.byte()),
        "expected x's scale dense and in torch.float32, got torch.strided torch.uint8",
    ),
    "transposed": (
        lambda x, w, b: multiply(x, w, weight=w.data.t().contiguous().t()),
        r"expected the rows of weight contiguous.*got strides \(1, 48\): quantize the transposed matrix",
    ),
    "scales of others": (
        lambda x, w, b: multiply(x, w, x_scale=x.scale[1:]),
        r"expected x's scale of shape \(40, S\), where S is 1 or 3.*got \(39, 1\)",
    ),
    "one row's scales for all": (
        lambda x, w, b: multiply(x, w, w_scale=w.scale[::BLOCK]),
        r"expected weight's scale of shape \(48, S\).*got \(1, 1\)",
    ),
    "two scalings": (
        lambda x, w, b: multiply(x, w, w_scale=w.scale.expand(-1, 3)),
        r"the same for both matrices, got \(48, 3\), where the first has \(40, 1\)",
    ),
    "depths": (lambda x, w, b: multiply(x, w, weight=w.data[:, 1:]), r"expected weight of shape \(48, 300\)"),
    "bias": (lambda x, w, b: run(x, w, b[1:]), r"expected bias of shape \(48,\)"),
    "bias in fp8": (lambda x, w, b: run(x, w, b.to(torch.float8_e5m2)), "expected bias in bfloat16"),
    "float64": (lambda x, w, b: run(x, w, dtype="float64"), "expected dtype of bfloat16, float16, float32"),
    "activation": (lambda x, w, b: run(x, w, activation="tanh"), "expected an activation of"),
    "deep tile": (lambda x, w, b: run(x, w, tile=replace(TILE, block_depth=256)), "a tile of at most 128"),
    "out": (lambda x, w, b: run(x, w, out=b.expand(40, -1).clone()), "expected y of out in torch.bfloat16"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, message, device):
    with pytest.raises((TypeError, ValueError), match=message):
        call(*operands((40, 300, 48), device))


def launched(target, scaling="rows", dtype="bfloat16", shape=(8192, 4096, 4096), **options):
    """What would be launched there, at this shape."""
    tokens, in_features, out_features = shape
    x, w = (
        Scaled(empty_words(rows, in_features, scaling, torch.device("meta")), in_features, "e4m3", scaling)
        for rows in (tokens, out_features)
    )
    y = torch.empty(tokens, out_features, dtype=RESULTS[dtype], device="meta")
    with launch.recording(target) as launches:
        scaled_linear_fwd(x.data, w.data, x.scale, w.scale, dtype=dtype, out=y, **options)
    return launches[0]


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
@pytest.mark.parametrize("target", [L40S, H100, B200, RTX_5090], ids=["sm_89", "sm_90", "sm_100", "sm_120"])
def test_tensor_cores_sum_at_most_128_of_depth(target, scaling):
    """Triton promotes wgmma's sums, of which tensor cores of sm_100 need none; Ada's it adds in place."""
    constants = launched(target, scaling).constants
    assert constants["BLOCK_DEPTH"] <= 128
    assert constants["BY_BLOCK"] == (scaling == "blocks")
    assert constants["IN_PLACE"] == (target in (H100, B200))
    assert constants["TMA"] == (target in (H100, B200))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_sums_are_promoted_unless_rows_are_asked_to_accumulate_fast(scaling, fast):
    """Scales of blocks have each 128 of depth added by themselves."""
    constants = launched(H100, scaling, fast_accumulate=fast).constants
    assert constants["PROMOTE"] == (scaling == "blocks" or not fast)


LARGE = MatmulTile(128, 256, 128, num_warps=8, num_stages=4, parts=4, flatten=True)
TURNS = [
    (H100, LARGE, False, 2),  # 128 columns: promoted sums, and those that are promoted, fill the registers
    (H100, LARGE, True, 1),
    (H100, replace(LARGE, block_cols=128), False, 1),
    (B200, replace(LARGE, num_stages=3), False, 1),  # sums lie in memory of their own
]


@pytest.mark.parametrize(("target", "tile", "fast", "turns"), TURNS)
def test_columns_are_promoted_in_turns_where_registers_are_few(target, tile, fast, turns):
    made = launched(target, tile=tile, fast_accumulate=fast)
    weight = made.arguments[1]
    assert (made.constants["TURNS"], weight.block_shape[0]) == (turns, tile.block_cols // turns)


@once(parts=[2, 4], scaling=["rows", "blocks"], form=FORMS)
def test_columns_that_are_promoted_in_turns_match_float64(parts, scaling, form, device, monkeypatch):
    monkeypatch.setattr("tpkernels.kernels.scaled_linear._turns", lambda product: 2)
    tile = replace(DEEP, parts=parts)
    assert_scaled_linear(*operands((71, 1056, 264), device, scaling), "gelu_tanh", tile=tile, form=form)


def test_sums_in_fp32_have_one_tile_for_all_sizes():
    tiles = {
        (launched(H100, dtype="float32", shape=shape).constants["BLOCK_ROWS"])
        for shape in ((8192, 4096, 4096), (128, 4096, 1024))
    }
    assert tiles == {128}
