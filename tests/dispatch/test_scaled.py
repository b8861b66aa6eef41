"""Products in fp8: what a choice depends on, who is asked, and what is refused as unsound."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.dispatch.conftest import CPU, FakeTimer
from tests.dispatch.conftest import call as tuned
from tests.kernels.checks import assert_written, rows_for
from tests.products import once, pairwise
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates, tune_key
from tpkernels.dispatch.checking import FP8_BOUND, ROUNDING, bound_of, mismatch, scratch_like
from tpkernels.dispatch.scaled import scaled_linear
from tpkernels.kernels.activations import ACTIVATIONS
from tpkernels.kernels.scaled import BLOCK, Scaled, empty_words

META = torch.device("meta")


def call(
    tokens=4096,
    out_features=1024,
    in_features=2048,
    *,
    scaling="rows",
    formats=("e4m3", "e4m3"),
    square=False,
    bias=True,
    activation="gelu_tanh",
    keep_z=True,
    dtype="bfloat16",
    fast=False,
):
    """Arguments without memory."""
    x, w = (
        Scaled(empty_words(rows, in_features, scaling, META), in_features, format, scaling)
        for rows, format in zip((tokens, out_features), formats, strict=True)
    )
    vector = torch.empty(out_features, dtype=torch.bfloat16, device=META) if bias else None
    w_scale = w.scale[::BLOCK] if square else w.scale
    return x.data, w.data, x.scale, w_scale, vector, activation, keep_z, dtype, fast


def names(gpu="h100", **options):
    key = tune_key(scaled_linear, *call(**options))
    return [candidate.name for candidate in candidates(scaled_linear, key, TARGET_GPUS[gpu])]


KEYS = [
    ({}, "float8_e4m3fn 4096x1024x2048 gelu_tanh+bfloat16+bias+z rows,rows,rows"),
    (
        {"scaling": "blocks", "square": True, "bias": False, "keep_z": False, "dtype": "float32"},
        "float8_e4m3fn 4096x1024x2048 gelu_tanh+float32+blocks+square rows,rows,rows",
    ),
    ({"fast": True}, "float8_e4m3fn 4096x1024x2048 gelu_tanh+bfloat16+bias+z+fast rows,rows,rows"),
    (
        {"formats": ("e5m2", "e4m3"), "in_features": 513, "scaling": "blocks", "out_features": 1001},
        "float8_e5m2 4096x1001x513 gelu_tanh+bfloat16+bias+z+float8_e4m3fn+blocks ragged,ragged,ragged",
    ),
]


@pytest.mark.parametrize(("options", "key"), KEYS)
def test_key_names_all_that_matters_and_no_layout_of_scales(options, key):
    assert str(tune_key(scaled_linear, *call(**options))) == f"scaled_linear {key}"


def test_key_knows_the_dtype_of_the_result():
    key = tune_key(scaled_linear, *call(dtype="float16"))
    assert (key.dtype, key.result) == (torch.float8_e4m3fn, torch.float16)
    assert key.layouts[-1].itemsize == 2
    assert bound_of(key) == pytest.approx(FP8_BOUND + 3.6 * ROUNDING[torch.float16])


LARGE, USUAL, SMALL = "128x256x128-w8-s4-p4-flat", "128x128x128-w8-s4-p2-flat", "64x128x128-w4-s3-p2-x2"
HOPPERS = [  # the large tile does the work of four small ones
    ({}, [USUAL, LARGE]),
    ({"fast": True}, [USUAL, LARGE]),
    ({"scaling": "blocks"}, [USUAL, SMALL]),
    ({"dtype": "float32"}, [USUAL, LARGE]),
]


@pytest.mark.parametrize(("options", "tiles"), HOPPERS)
def test_hopper_is_offered_both_forms(options, tiles):
    found = names(tokens=8192, out_features=8192, **options)
    assert found[0] == "torch"
    assert [f"triton/descriptor/{tile}" for tile in tiles] == [n for n in found if "/descriptor/" in n]
    assert any(name.startswith("triton/pointer/") for name in found)
    assert ("scaled_mm" in found) == (options.keys() <= {"fast"})


def test_forms_and_tiles_are_those_of_the_gpu():
    wide = "triton/descriptor/128x256x128-w8-s3-p2-flat"
    assert wide in names("b200", tokens=8192, out_features=8192)
    assert wide not in names("b200", tokens=8192, out_features=8192, scaling="blocks")
    found = names("l40s")
    assert "scaled_mm" in found
    assert {name.split("/")[1] for name in found if name.startswith("triton/")} == {"pointer"}
    assert names(tokens=0) == names("a100") == names("mi300x") == ["torch"]


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": "blocks"},
        {"scaling": "blocks", "square": True},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"out_features": 1000},
        {"in_features": 1032},
        {"in_features": 512},  # rows that start anywhere
        {"formats": ("e5m2", "e5m2")},
    ],
    ids=str,
)
def test_torchs_product_is_offered_where_it_takes_the_operands(options):
    assert "scaled_mm" not in names(**options)
    assert "scaled_mm" in names(formats=("e5m2", "e4m3"))


def scratch(**options):
    arguments = call(**({"tokens": 96, "out_features": 160, "in_features": 1056} | options))
    return scratch_like(arguments, 1056, CPU)


@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_scratch_lies_like_operands_and_gives_products_of_one(scaling):
    meta, made = call(96, 160, 1056, scaling=scaling), scratch(scaling=scaling)
    for like, tensor in zip(meta[:5], made[:5], strict=True):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (like.shape, like.stride(), like.dtype)
    x, w, x_scale, w_scale, *_ = made
    assert (x_scale > 0).all()
    assert (w_scale > 0).all()
    assert x_scale.std() > 0.1 * x_scale.mean()  # a row that takes its neighbour's is seen
    assert x.float().isfinite().all()
    assert w.float().abs().amax() > 200
    y = scaled_linear.by_torch(x, w, x_scale, w_scale, None, "none", False, "float32", False)[0]
    assert 0.3 < float(y.std()) < 3


def last_block_dropped(x):
    x = x.clone()
    x.view(torch.uint8)[:, 1024:] = 0
    return x


def one_rows_scale(scale):
    scale = scale.clone()
    scale[17] *= 1.25
    return scale


FAULTS = {  # of which operand, and what becomes of it
    "rows_scales": (2, lambda scale: scale.roll(1, 0)),
    "columns_scales": (3, lambda scale: scale.roll(1, 0)),
    "one_rows_scale": (2, one_rows_scale),
    "last_block_dropped": (0, last_block_dropped),
    "scales_left_out": (3, lambda scale: torch.full_like(scale, float(scale.float().mean()))),
}


@pairwise(fault=FAULTS, dtype=["bfloat16", "float32"], scaling=["rows", "blocks"])
def test_a_planted_fault_is_unsound(fault, dtype, scaling):
    options = {"scaling": scaling, "dtype": dtype, "activation": "none"}
    arguments, key = scratch(**options), tune_key(scaled_linear, *call(**options))
    expected = scaled_linear.by_torch(*arguments)
    assert mismatch(expected, expected, key) is None
    which, spoil = fault
    broken = [spoil(one) if number == which else one for number, one in enumerate(arguments)]
    assert mismatch(scaled_linear.by_torch(*broken), expected, key)


OPTIONS = [{}, {"scaling": "blocks"}, {"formats": ("e5m2", "e4m3")}]


@once(winner=["triton/descriptor", "triton/pointer", "torch"], options=OPTIONS)
def test_chosen_candidate_computes_what_torch_does(winner, options, make_tuner):
    tuner = make_tuner(FakeTimer({winner: 1.0, "": 2.0}))
    arguments = scratch(tokens=40, out_features=72, **options)
    ours, torchs = tuned(tuner, scaled_linear, *arguments), scaled_linear.by_torch(*arguments)
    assert mismatch(ours, torchs, tune_key(scaled_linear, *call(**options))) is None
    out, around = rows_for(ours)
    tuned(tuner, scaled_linear, *arguments, out=out)
    assert_written(out, around, ours)


def last_bit(largest):
    """What the last of 14 bits is worth, in a number of this size."""
    return torch.exp2(torch.frexp(largest).exponent.double() - 14)


def summed(x, weight, promote_every):
    """x weightᵀ in float64, summed as on Hopper's tensor cores by DeepSeek-V3's report (2024, 3.5.2).

    32 products and the sum so far are shifted to their largest exponent, and cut off below its 14 bits.
    promote_every: what depth is summed so before it is added in fp32
    """
    x, weight = x.double(), weight.double()
    total = x.new_zeros(len(x), len(weight))
    for deep_x, deep_weight in zip(x.split(promote_every, 1), weight.split(promote_every, 1), strict=True):
        sums = torch.zeros_like(total)
        for some_x, some_weight in zip(deep_x.split(32, 1), deep_weight.split(32, 1), strict=True):
            terms = torch.cat([sums[..., None], some_x[:, None] * some_weight[None]], -1)
            unit = last_bit(terms.abs().amax(-1))
            exact = (terms / unit[..., None]).trunc_().sum(-1) * unit
            kept = last_bit(exact.abs())
            sums = (exact / kept).trunc_() * kept
        total = (total + sums).float().double()
    return total


def test_bounds_are_those_of_emulated_sums():
    """Sums of few bits pass as fast at any depth, and are no promoted ones where that is deep."""
    depth = 65536
    x, w, x_scale, w_scale, *_ = scratch_like(call(16, 16, depth), depth, CPU)
    exact = scaled_linear.by_torch(x, w, x_scale, w_scale, None, "none", False, "float32", False)
    of = {"dtype": "float32", "activation": "none", "keep_z": False, "in_features": depth}
    fast, promoted = (tune_key(scaled_linear, *call(fast=one, **of)) for one in (True, False))
    few, carried = (((summed(x, w, every) * x_scale * w_scale.t()).float(), None) for every in (depth, BLOCK))
    assert mismatch(few, exact, fast) is None
    assert "result 0 is off by" in mismatch(few, exact, promoted)
    assert mismatch(carried, exact, promoted) is None


@pytest.mark.parametrize("fast", [True, False])
def test_torchs_product_promotes_unless_it_is_told_not_to(monkeypatch, fast):
    told = []

    def spied(*args, use_fast_accum, **options):
        told.append(use_fast_accum)
        return scaled_mm(*args, use_fast_accum=use_fast_accum, **options)

    scaled_mm = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", spied)
    scaled_linear.library[1].run(*scratch(activation="none", in_features=1024, fast=fast))
    assert told == [fast]


@pairwise(activation=ACTIVATIONS, keep_z=[True, False], way=["torch", "scaled_mm"])
def test_ways_of_torch_agree_and_write_the_same_bits(way, keep_z, activation):
    arguments = scratch(activation=activation, keep_z=keep_z, in_features=1024)
    key = tune_key(scaled_linear, *call(activation=activation, keep_z=keep_z))
    library = scaled_linear.library[1]
    run, into = (
        (library.run, library.into)
        if way == "scaled_mm"
        else (scaled_linear.by_torch, scaled_linear.torch.into)
    )
    results = run(*arguments)
    assert mismatch(results, scaled_linear.by_torch(*arguments), key) is None
    out, around = rows_for(results)
    into(out, *arguments)
    assert_written(out, around, results)


@pytest.mark.parametrize("which", [2, 3])
def test_scales_in_bytes_are_refused_by_torch_too(which):
    arguments = list(scratch())
    arguments[which] = arguments[which].byte()
    with pytest.raises(TypeError, match=r"scaled_linear: expected scales in fp32, got .*torch\.uint8"):
        scaled_linear.by_torch(*arguments)


def test_a_scale_for_128_rows_is_that_of_each():
    x, w, x_scale, w_scale, *rest = scratch(scaling="blocks", out_features=300)
    few = w_scale[::BLOCK].clone()
    each = few.repeat_interleave(BLOCK, 0)[:300]
    shared, repeated = (scaled_linear.by_torch(x, w, x_scale, one, *rest) for one in (few, each))
    assert torch.equal(shared[0], repeated[0])


def test_a_compiler_for_gpus_is_told_the_shapes():
    """Of the way that bf16 takes there, of which no GPU is needed for the shapes."""
    with FakeTensorMode():
        arguments = [
            torch.empty_like(one, device="cuda") if isinstance(one, torch.Tensor) else one
            for one in call(96, 160, 1056)
        ]
        y, z = scaled_linear.by_torch(*arguments)
    assert (y.shape, y.dtype, y.device.type) == ((96, 160), torch.bfloat16, "cuda")
    assert z.shape == y.shape
