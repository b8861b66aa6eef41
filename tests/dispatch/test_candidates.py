"""What a choice depends on, and which candidates a problem has on which GPU."""

from dataclasses import replace

import pytest
import torch

from tpkernels.dispatch import candidates as module
from tpkernels.dispatch import one_pass
from tpkernels.dispatch.candidates import TARGET_GPUS, candidates, layout_class, token_class, tune_key
from tpkernels.dispatch.products import PRODUCTS, dgrad, linear
from tpkernels.dispatch.record import Layer
from tpkernels.kernels.matmul_tile import MatmulTile
from tpkernels.kernels.target import Target

BIG = Layer(8192, 4096, 4096)


def posed(step, layer):
    record = PRODUCTS[step]
    return record, tune_key(record, *record.sample(layer))


def names(step, layer, gpu="h100"):
    return [candidate.name for candidate in candidates(*posed(step, layer), TARGET_GPUS[gpu])]


def forms(found):
    return {name.split("/")[1] for name in found if name.startswith("triton/")}


@pytest.mark.parametrize("gpu", TARGET_GPUS)
@pytest.mark.parametrize("step", PRODUCTS)
def test_torch_comes_first_and_names_are_unique(step, gpu):
    found = names(step, BIG, gpu)
    assert found[0] == "torch"
    assert len(set(found)) == len(found) > 1


def test_descriptors_are_for_hopper_and_aligned_16_bit_operands():
    assert forms(names("linear", BIG)) == {"descriptor", "pointer"}
    assert forms(names("linear", BIG, "a100")) == {"pointer"}
    assert forms(names("linear", Layer(8192, 4096, 4096, torch.float32))) == {"pointer"}
    assert forms(names("linear", Layer(8192, 4097, 4096))) == {"pointer"}


@pytest.mark.parametrize(
    "layer", [(64, 64, 64, torch.float64), (0, 64, 64), (64, 0, 64), (64, 64, 0)], ids=str
)
def test_a_dtype_without_kernels_and_an_empty_shape_leave_torch(layer):
    assert names("wgrad", Layer(*layer)) == ["torch"]


def test_without_triton_torch_is_left(monkeypatch):
    for file in (module, one_pass):
        monkeypatch.setattr(file, "find_spec", lambda name: None)
    assert names("glu", BIG) == ["torch"]


INFERENCE = Layer(64, 64, 64, activation="gelu_tanh", training=False)


@pytest.mark.parametrize(
    ("changed", "gpu", "offered"),
    [
        ({}, "h100", True),
        ({"activation": "relu"}, "h100", True),
        ({}, "mi300x", False),  # the erf form there
        ({"training": True}, "h100", False),  # z is wanted
        ({"bias": False}, "h100", False),
        ({"activation": "silu"}, "h100", False),
    ],
)
def test_fused_activation_is_offered_where_it_is_the_same(changed, gpu, offered, monkeypatch):
    assert ("addmm_activation" in names("linear", replace(INFERENCE, **changed), gpu)) == offered
    monkeypatch.delattr(torch, "_addmm_activation")
    assert "addmm_activation" not in names("linear", replace(INFERENCE, **changed), gpu)


def test_fused_accumulation_is_offered_by_dtype():
    assert "addmm_dtype_out" in names("wgrad_accumulate_", BIG)
    assert "addmm_" in names("wgrad_accumulate_", Layer(64, 64, 64, torch.float32))


def test_tiles_that_do_not_fit_the_gpu_are_left_out(monkeypatch):
    large = names("linear", BIG)
    monkeypatch.setattr(Target, "has_tma", True)  # as in a larger one
    monkeypatch.setattr(Target, "shared_memory", 120_000)
    small = names("linear", BIG)
    assert "triton/descriptor/128x256x64-w8-s4-p2-flat" in large
    assert "triton/descriptor/128x256x64-w8-s4-p2-flat" not in small
    assert "triton/descriptor/64x128x64-w4-s4-p2-x2" not in small  # two blocks of 106,496 bytes
    assert "triton/pointer/128x128x32-w8-s3-p1" in small


COMPILED = [  # for sm_90, by Triton 3.9: bytes of shared memory
    ("linear", "128x256x64-w8-s4-p2-flat", 229_408),
    ("linear", "64x64x64-w4-s4-p1-x2", 73_760),
    ("glu", "128x128x64-w8-s4-p2", 213_056),
    ("dgrad", "128x256x64-w8-s3-p4-flat", 163_864),
    ("dgrad_pairs", "128x256x64-w8-s3-p4-flat", 164_864),
    ("dgrad_act", "128x256x64-w8-s3-p4-flat", 180_264),
    ("dgrad_act", "128x128x64-w4-s3-p4-x2", 106_520),
    ("dglu", "128x128x64-w8-s4-p2-flat", 163_888),
    ("wgrad", "128x256x64-w8-s4-p4-flat", 213_024),
    ("wgrad", "128x256x64-w8-s4-p4-flat-k2", 229_408),
    ("wgrad_accumulate_", "128x256x64-w8-s4-p4-flat", 229_408),
]


@pytest.mark.parametrize(("step", "tile", "compiled"), COMPILED)
def test_shared_memory_is_what_was_compiled(step, tile, compiled):
    """But for barriers, and for what pairs of matrices are aligned to."""
    expected = module.shared_memory(posed(step, BIG)[1], "descriptor", MatmulTile.named(tile))
    assert expected <= compiled <= expected + (1024 if step == "dgrad_pairs" else 64)


def test_tiles_far_from_the_results_size_are_left_out():
    one_row, large = (names("linear", Layer(tokens, 8192, 4096))[1:] for tokens in (1, 65536))
    assert one_row
    assert not [name for name in one_row if name.split("/")[2].startswith("128x")]
    assert large
    assert not [name for name in large if name.split("/")[2].startswith("16x")]


def splits_of(layer, gpu="h100"):
    return [name.rsplit("-k")[-1] for name in names("wgrad", layer, gpu) if "-k" in name]


# a result's tiles are of 128 x 256, H100 has 132 processors, and a step is 64 tokens
@pytest.mark.parametrize(
    ("layer", "splits"),
    [
        (Layer(8192, 4096, 512), ["2"]),  # 64 tiles: half a turn, in halves or in quarters
        (Layer(8192, 2048, 512), ["2", "4"]),  # 32 tiles: half a turn, or a quarter
        (Layer(8192, 768, 4096), ["4"]),  # 96 tiles: two halves of a turn, or three quarters
        (Layer(8192, 1792, 4096), ["4"]),  # 224 tiles: two turns, four halves, seven quarters
        (Layer(8192, 2048, 4096), []),  # 256 tiles: two turns, four halves, eight quarters
        (Layer(8192, 2816, 4096), []),  # 352 tiles: three turns, of which quarters would save one in twelve
        (Layer(8192, 1408, 3072), []),  # 132 tiles: one turn
        (Layer(2048, 2048, 512), ["2", "4"]),  # 32 steps, 8 in each quarter
        (Layer(1792, 2048, 512), ["2"]),
        (Layer(896, 2048, 512), []),
    ],
)
def test_depth_is_split_where_that_saves_a_turn(layer, splits):
    assert splits_of(layer) == splits
    assert splits_of(layer, "a100") == []
    assert splits_of(layer, "b200") == []


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
    key = tune_key(PRODUCTS[step], *PRODUCTS[step].sample(Layer(4096, 1024, 512, activation="gelu_tanh")))
    text, product, depth = KEYS[step]
    assert (str(key), key.product, key.depth) == (f"{step} bfloat16 {text}", product, depth)


def _layout(tensor):
    return layout_class(tune_key(dgrad, tensor, torch.empty(tensor.shape[1], 8)).layouts[0])


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


def test_tokens_are_rounded_up_into_few_classes():
    for tokens in (
        *range(1, 2**13),
        *(2**power + more for power in range(13, 41) for more in (-1, 0, 1, 777)),
    ):
        rounded = token_class(tokens)
        assert tokens <= rounded < 1.25 * tokens + 1
        assert token_class(rounded) == rounded
    assert len({token_class(tokens) for tokens in range(1, 2**17)}) < 70
    # Or the same key would have other candidates from one batch to the next.
    for tokens in (4097, 4500, 5120):
        key = tune_key(linear, *linear.sample(Layer(tokens, 64, 64)))
        assert str(key).startswith("linear bfloat16 5120x64x64")
        assert key.product == (5120, 64)
