"""Layers with a recipe compute their products in fp8, and are in all else what they are without one."""

from __future__ import annotations

import copy
import importlib.util
import pickle

import pytest
import torch

from tests.layers.small import cut, drawn, joined_world, outcome
from tests.layers.worlds import posing
from tests.models.small import CONFIGS
from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import equal
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    Recipe,
    RowParallelLinear,
    TransformerBlock,
    checkpoint,
    ops,
    reuse_quantized_weights,
)
from tpkernels.interop import dcp, safetensors
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


def made(build, **options):
    torch.manual_seed(2)
    return build(**options)


def computed(layer, x):
    result = layer(x)
    return result[0] if isinstance(result, tuple) else result


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def test_construction_refuses_what_has_no_fp8(build, monkeypatch):
    with pytest.raises(TypeError, match=r"expected quantize=tpkernels\.Recipe"):
        build(quantize="rowwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    expected = "expected a GPU of compute capability 8.9 or later with quantize, got NVIDIA A100.* of 8.0"
    with pytest.raises(ValueError, match=expected):
        build(quantize=Recipe.rowwise(), device="cuda")
    with pytest.raises(ValueError, match=expected), torch.device("cuda", 0):
        build(quantize=Recipe.rowwise())


@pytest.mark.parametrize("name", BUILDERS)
def test_construction_refuses_tp_invariance(name):
    with tp_invariance(2), posing(0, 1):
        with pytest.raises(ValueError, match="expected no quantize with TP-invariance"):
            BUILDERS[name](quantize=Recipe.rowwise())
        BUILDERS[name]()


def test_parameters_are_those_without(build):
    ours, plain = made(build, quantize=Recipe.rowwise(head=True)), made(build)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for (name, own), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(own, other), name
        assert Attributes.of(own) == Attributes.of(other), name


def test_representation_tells_the_recipe(build):
    assert "quantize=rowwise+power_of_two" in repr(build(quantize=Recipe.rowwise(power_of_two=True)))
    assert "quantize" not in repr(build())


@once(name=[*LAYERS], recipe=RECIPES)
def test_products_are_in_fp8(name, recipe):
    """Off by as much as fp8 rounds, forward and backward; copies and pickles, too."""
    with posing(0, 1):
        ours, plain = (made(LAYERS[name], quantize=each) for each in (recipe, None))
        x = drawn((6, 2, 32), 3)
        y, expected = computed(ours, x), computed(plain, x)
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(computed(copied, x), y)
    assert 1e-4 < relative(y, expected) < 0.1
    y.sum().backward()
    expected.sum().backward()
    for (name, own), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert relative(own.grad, other.grad) < 0.2, name


def test_every_layer_inside_has_the_recipe():
    """A product that is left out would be no error, only slower."""
    with posing(0, 1):
        model = GPT(CONFIGS["llama"], quantize=RECIPES[0])
    kinds = ColumnParallelLinear | RowParallelLinear | ParallelMLP
    layers = [module for module in model.modules() if isinstance(module, kinds)]
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
        usual = made(BUILDERS["column"], quantize=recipe)
        without = made(BUILDERS["column"], quantize=recipe, skip_weight_param_allocation=True)
        assert torch.equal(without(x, usual.weight)[0], usual(x)[0])
        with torch.no_grad():
            usual.bias.normal_()
        later = made(BUILDERS["column"], quantize=recipe, skip_bias_add=True)
        y, bias = later(x)
        torch.testing.assert_close(y + usual.bias, usual(x)[0])
        assert bias is later.bias


@once(name=["column", "row", "gated mlp", "attention"], recipe=RECIPES)
def test_main_grad_is_what_grad_would_be(name, recipe):
    """Over two microbatches, within which weights are quantized once."""
    with posing(0, 1):
        fused = made(BUILDERS[name], quantize=recipe, gradient_accumulation_fusion=True)
        plain = made(BUILDERS[name], quantize=recipe)
        for parameter in fused.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        with reuse_quantized_weights():
            for seed in (1, 2):
                x = drawn((6, 2, 32), seed)
                computed(fused, x).square().sum().backward()
        for seed in (1, 2):
            x = drawn((6, 2, 32), seed)
            computed(plain, x).square().sum().backward()
        for (short, own), (_, other) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
            found = own.main_grad - 1 if short.endswith("weight") else own.grad
            torch.testing.assert_close(found, other.grad, rtol=1e-5, atol=1e-4)


def block(**options: object) -> TransformerBlock:
    torch.manual_seed(5)
    return TransformerBlock(32, 4, num_kv_heads=2, activation="swiglu", bias=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@on_ranks(2)
def test_a_block_computed_again_has_the_same_bits(recipe):
    joined_world()
    x = cut(0)(drawn((8, 2, 32), 1))
    plain = block(sequence_parallel=True, quantize=recipe)
    expected = outcome(plain, plain, x)
    assert equal(outcome(lambda x: checkpoint(plain, x), plain, x), expected)
    for recompute in ("selective", "full"):
        layer = block(sequence_parallel=True, quantize=recipe, recompute=recompute)
        assert equal(outcome(layer, layer, x), expected), recompute


HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("safetensors", marks=pytest.mark.skipif(not HAS_SAFETENSORS, reason="not installed")),
        "dcp",
    ],
)
@on_ranks(2)
def test_files_of_weights_know_nothing_of_a_recipe(file, tmp_path):
    way, path = {"safetensors": safetensors, "dcp": dcp}[file], str(tmp_path / "saved.safetensors")
    joined_world()
    torch.manual_seed(3)
    ours = GPT(CONFIGS["llama"], quantize=Recipe.rowwise(head=True))
    way.save(path, ours)
    torch.manual_seed(4)
    plain = GPT(CONFIGS["llama"])
    way.load(path, plain)
    torch.testing.assert_close(plain.state_dict(), ours.state_dict(), rtol=0, atol=0)
