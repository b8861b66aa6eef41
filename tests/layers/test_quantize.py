"""Layers with a recipe compute their products in fp8, and are in all else what they are without one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from tests.layers import quantize_cases as cases
from tests.layers.worlds import posing
from tests.models.small import CONFIGS
from tests.segments import tp_invariance
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    Recipe,
    RowParallelLinear,
    TransformerBlock,
    ops,
    reuse_quantized_weights,
)
from tpkernels.layers.attributes import Attributes

RECIPES = [Recipe.rowwise(), Recipe.blockwise(), Recipe.rowwise(wgrad="fp8", gradients="e5m2")]
LAYERS = {
    "column": lambda **options: ColumnParallelLinear(32, 48, **options),
    "row": lambda **options: RowParallelLinear(32, 48, **options),
    "mlp": lambda **options: ParallelMLP(32, 48, **options),
    "gated mlp": lambda **options: ParallelMLP(32, 48, activation="swiglu", **options),
    "attention": lambda **options: ParallelAttention(32, 4, num_kv_heads=2, **options),
    "block": lambda **options: TransformerBlock(32, 4, **options),
}
BUILDERS = LAYERS | {"gpt": lambda **options: GPT(CONFIGS["llama"], **options)}


@pytest.fixture(params=BUILDERS)
def build(request):
    with posing(0, 1):
        yield BUILDERS[request.param]


@pytest.fixture(params=LAYERS)
def build_layer(request):
    with posing(0, 1):
        yield LAYERS[request.param]


def drawn(build, **options):
    torch.manual_seed(2)
    return build(**options)


def computed(layer, x):
    result = layer(x)
    return result[0] if isinstance(result, tuple) else result


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def test_construction_refuses_what_is_no_recipe(build):
    with pytest.raises(TypeError, match=r"expected quantize=tpkernels\.Recipe"):
        build(quantize="rowwise")


def test_construction_refuses_a_gpu_that_has_no_fp8(build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    expected = (
        "expected a GPU of compute capability 8.9 or later with quantize, got NVIDIA A100-SXM4-80GB of 8.0"
    )
    with pytest.raises(ValueError, match=expected):
        build(quantize=Recipe.rowwise(), device="cuda")
    with pytest.raises(ValueError, match=expected), torch.device("cuda", 0):
        build(quantize=Recipe.rowwise())


def test_construction_refuses_amd(build, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    with pytest.raises(ValueError, match="expected an NVIDIA GPU with quantize, got AMD Instinct MI300X"):
        build(quantize=Recipe.rowwise(), device="cuda")


@pytest.mark.parametrize("name", BUILDERS)
def test_construction_refuses_tp_invariance(name):
    with tp_invariance(2), posing(0, 1):
        with pytest.raises(ValueError, match="expected no quantize with TP-invariance"):
            BUILDERS[name](quantize=Recipe.rowwise())
        BUILDERS[name]()


def test_parameters_are_those_without(build):
    ours, plain = drawn(build, quantize=Recipe.rowwise(head=True)), drawn(build)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for (name, own), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(own, other), name
        assert Attributes.of(own) == Attributes.of(other), name


def test_representation_tells_the_recipe(build):
    assert "quantize=rowwise+power_of_two" in repr(build(quantize=Recipe.rowwise(power_of_two=True)))
    assert "quantize" not in repr(build())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products_are_in_fp8(build_layer, recipe):
    """Off by as much as fp8 rounds, forward and backward; copies and pickles, too."""
    ours, plain = (drawn(build_layer, quantize=each) for each in (recipe, None))
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(3))
    y, expected = computed(ours, x), computed(plain, x)
    assert 1e-4 < relative(y, expected) < 0.1
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(computed(copied, x), y)
    y.sum().backward()
    expected.sum().backward()
    for (name, own), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert relative(own.grad, other.grad) < 0.2, name


def test_every_layer_inside_has_the_recipe():
    """A product that is left out would be no error, only slower."""
    with posing(0, 1):
        model = GPT(CONFIGS["llama"], quantize=RECIPES[0])
    layers = [
        m for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear | ParallelMLP)
    ]
    assert len(layers) == 2 * (3 + 1 + 3 + 1)
    assert {layer.quantize for layer in layers} == {RECIPES[0]}


def test_what_is_computed_is_the_op():
    with posing(0, 1):
        x = torch.randn(6, 32)
        column = ColumnParallelLinear(32, 48, activation="gelu", quantize=RECIPES[1])
        with torch.no_grad():
            column.bias.normal_()
        y = ops.linear(x, column.weight, column.bias, "gelu", quantize=RECIPES[1])
        assert torch.equal(column(x)[0], y)
        mlp = ParallelMLP(32, 48, activation="swiglu", quantize=RECIPES[0])
        weights = mlp.up.weight, None, mlp.down.weight, mlp.down.bias
        y = ops.mlp(x, *weights, w_gate=mlp.gate.weight, activation="swiglu", quantize=RECIPES[0])
        assert torch.equal(mlp(x)[0], y)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_options_are_what_they_are_without(recipe):
    with posing(0, 1):
        x = torch.randn(6, 32)
        usual = drawn(BUILDERS["column"], quantize=recipe)
        without = drawn(BUILDERS["column"], quantize=recipe, skip_weight_param_allocation=True)
        assert torch.equal(without(x, usual.weight)[0], usual(x)[0])
        with torch.no_grad():
            usual.bias.normal_()
        later = drawn(BUILDERS["column"], quantize=recipe, skip_bias_add=True)
        y, bias = later(x)
        torch.testing.assert_close(y + usual.bias, usual(x)[0])
        assert bias is later.bias


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", ["column", "row", "gated mlp", "attention"])
def test_main_grad_is_what_grad_would_be(name, recipe):
    """Over two microbatches, within which weights are quantized once."""
    with posing(0, 1):
        fused = drawn(BUILDERS[name], quantize=recipe, gradient_accumulation_fusion=True)
        plain = drawn(BUILDERS[name], quantize=recipe)
        for parameter in fused.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        with reuse_quantized_weights():
            for seed in (1, 2):
                x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(seed))
                computed(fused, x).square().sum().backward()
        for seed in (1, 2):
            x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(seed))
            computed(plain, x).square().sum().backward()
        for (short, own), (_, other) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
            found = own.main_grad - 1 if short.endswith("weight") else own.grad
            torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all_tokens", "own_tokens"])
def test_column_has_the_bits_of_one_rank(sequence_parallel, recipe, ranks1, ranks2):
    (alone,) = ranks1.run(cases.column, recipe, sequence_parallel)
    parts = ranks2.run(cases.column, recipe, sequence_parallel)
    y, dw = torch.cat([part["y"] for part in parts], 2), torch.cat([part["dw"] for part in parts])
    assert torch.equal(y, alone["y"])
    assert relative(y, ranks1.run(cases.column, None, False)[0]["y"]) > 1e-3
    if sequence_parallel:  # of rows that were gathered in fp8
        assert relative(dw, alone["dw"]) < 0.05
    else:
        assert torch.equal(dw, alone["dw"])
    dx = torch.cat([part["dx"] for part in parts]) if sequence_parallel else parts[0]["dx"]
    assert relative(dx, alone["dx"]) < 0.05  # a sum over ranks, each with scales of its own features


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["all_tokens", "own_tokens"])
def test_row_is_as_close_as_one_rank_is(sequence_parallel, recipe, ranks1, ranks2):
    """Its scales are of a rank's features: other bits, the same error."""
    (exact,), (alone,) = (ranks1.run(cases.row, each, sequence_parallel) for each in (None, recipe))
    parts = ranks2.run(cases.row, recipe, sequence_parallel)
    y = torch.cat([part["y"] for part in parts]) if sequence_parallel else parts[0]["y"]
    dx, dw = torch.cat([part["dx"] for part in parts], 2), torch.cat([part["dw"] for part in parts], 1)
    for ours, name in ((y, "y"), (dx, "dx"), (dw, "dw")):
        assert relative(ours, exact[name]) < 1.2 * relative(alone[name], exact[name]) + 0.03, name


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_computed_again_it_has_the_same_bits(recipe, ranks2):
    expected = {"checkpoint": True, "selective": True, "full": True}
    assert ranks2.run(cases.recomputed, recipe) == [expected, expected]


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_compiled_in_one_graph_it_computes_the_same(fused, ranks2):
    for recipe in RECIPES[:2]:
        assert max(ranks2.run(cases.compiled, recipe, fused, timeout=180)) < 0.02


def test_a_file_of_weights_knows_nothing_of_it(tmp_path, ranks2):
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    assert ranks2.run(cases.written_and_read, str(tmp_path / "model.safetensors")) == [[], []]


def test_checkpoints_know_nothing_of_it(ranks2, tmp_path):
    assert ranks2.run(cases.saved_and_loaded, str(tmp_path / "saved")) == [[], []]
