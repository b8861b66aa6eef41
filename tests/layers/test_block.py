"""Transformer blocks are their layers in turn; over ranks, `models/test_gpt.py` compares them."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.layers.small import cut, drawn
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.products import once
from tpkernels import (
    LayerNorm,
    ParallelAttention,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerBlock,
    initialize_model_parallel,
    manual_seed,
)
from tpkernels.dispatch import norms
from tpkernels.ops import Norm

HIDDEN, HEADS = 16, 4
TOKENS, BATCH = 8, 2

GROUPED = {"num_kv_heads": 2, "head_size": 6, "rotary_base": 500.0, "causal": False}
SHAPES = {  # norm, options of attention, MLP's width and activation, bias
    "gpt2": (LayerNorm, {"rotary": False}, None, "gelu_tanh", True),
    "llama": (RMSNorm, GROUPED, 24, "swiglu", False),
}


@once(shape=[*SHAPES], recompute=["none", "selective", "full"])
def test_blocks_are_their_layers_in_turn(shape, recompute):
    norm_type, of_attention, ffn, activation, bias = SHAPES[shape]
    init = {"init_method": nn.init.normal_, "output_layer_init_method": nn.init.uniform_}
    shared = {"bias": bias, "dtype": torch.float64, **init}
    with posing(0, 1):
        torch.manual_seed(3)
        norms = [norm_type(HIDDEN, 0.1, dtype=torch.float64) for _ in range(2)]
        attention = ParallelAttention(HIDDEN, HEADS, **of_attention, **shared)
        mlp = ParallelMLP(HIDDEN, ffn or 4 * HIDDEN, activation=activation, **shared)
        torch.manual_seed(3)
        options = {"norm": "layer_norm" if norm_type is LayerNorm else "rms_norm", "norm_eps": 0.1}
        options |= {"activation": activation, "recompute": recompute, **of_attention, **shared}
        block = TransformerBlock(HIDDEN, HEADS, ffn, **options)
        x, dy = (drawn((TOKENS, BATCH, HIDDEN), seed, torch.float64) for seed in (1, 2))
        mask = drawn((1, 1, TOKENS, TOKENS), 4, torch.float64)
        layers = [*attention.parameters(), *mlp.parameters(), *norms[0].parameters(), *norms[1].parameters()]
        for own, other in zip(block.parameters(), layers, strict=True):
            assert torch.equal(own, other)
        middle = x.requires_grad_() + attention(norms[0](x), mask)[0]
        expected = middle + mlp(norms[1](middle))[0]
        y = block(x, mask)
        found, wanted = (
            torch.autograd.grad(result, [x, *parameters], dy)
            for result, parameters in ((y, list(block.parameters())), (expected, layers))
        )
        assert torch.equal(y, expected)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def step(model, *inputs):
    """Output and gradients, and how often an op has ended in a norm."""
    ended = []
    one_pass = norms.add_norm
    with patch.object(norms, "add_norm", lambda *args: ended.append(0) or one_pass(*args)):
        y = model(*inputs)
    y.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return len(ended), [y.detach(), *gradients]


LLAMA, GPT2 = {"norm": "rms_norm", "activation": "swiglu", "bias": False}, {"rotary": False}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(1, 2, 4)
def test_a_block_has_the_bits_of_norms_that_are_called(sequence_parallel):
    state = initialize_model_parallel(torch.distributed.get_world_size())
    for options in (LLAMA, GPT2, LLAMA | {"tp_invariant": 4}, LLAMA | {"recompute": "full"}):
        block = TransformerBlock(HIDDEN, HEADS, sequence_parallel=sequence_parallel, state=state, **options)
        x = drawn((TOKENS, BATCH, HIDDEN), 1, torch.float32)
        x = (cut(0)(x) if sequence_parallel else x).clone().requires_grad_()
        count, found = step(block, x)
        with patch.object(TransformerBlock, "_norm_behind", return_value=None):
            none, expected = step(block, x)
        assert (count, none) == (1, 0)
        assert all(map(torch.equal, found, expected))


SEEN = {
    "hook": lambda block: block.mlp_norm.register_forward_hook(lambda *_: None),
    "hook before": lambda block: block.mlp_norm.register_forward_pre_hook(lambda *_: None),
    "hook of attention": lambda block: block.attention.register_forward_hook(lambda *_: None),
    "hook of a backward": lambda block: block.attention.output.register_full_backward_hook(lambda *_: None),
    "another class": lambda block: setattr(block, "mlp_norm", nn.RMSNorm(HIDDEN)),
    "its own forward": lambda block: setattr(block.mlp_norm, "forward", block.mlp_norm.forward),
    "other segments": lambda block: setattr(block.mlp_norm, "tp_invariant", 2),
    "dropout in training": lambda block: setattr(block.dropout, "p", 0.5),
}


@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_a_norm_that_others_see_is_called(change):
    with posing(0, 1):
        block = TransformerBlock(HIDDEN, HEADS, **LLAMA)
        x = drawn((TOKENS, BATCH, HIDDEN), 1, torch.float32)
        assert step(block, x)[0] == 1
        change(block)
        assert step(block, x)[0] == 0


@pytest.mark.parametrize("layer", [RowParallelLinear, ParallelMLP])
def test_a_bias_left_to_the_caller_and_a_norm_are_refused(layer):
    with posing(0, 1):
        built = layer(HIDDEN, HIDDEN, skip_bias_add=True)
        x = torch.ones(4, HIDDEN)
        with pytest.raises(ValueError, match=f"{layer.__name__}: expected no skip_bias_add with residual"):
            built(x, residual=x, norm=Norm(torch.ones(HIDDEN)))


def with_dropout(sequence_parallel):
    """The same step for every way to recompute."""
    state = initialize_model_parallel(torch.distributed.get_world_size())
    results = []
    for recompute in ("none", "selective", "full"):
        torch.manual_seed(3)
        options = {"dropout": 0.3, "attention_dropout": 0.2, "sequence_parallel": sequence_parallel}
        block = TransformerBlock(HIDDEN, HEADS, recompute=recompute, state=state, **options)
        manual_seed(9)
        x = drawn((TOKENS, BATCH, HIDDEN), 1, torch.float32)
        x = (cut(0)(x) if sequence_parallel else x).clone().requires_grad_()
        y = block(x)
        y.pow(2).sum().backward()
        results.append([y.detach(), x.grad, *[parameter.grad for parameter in block.parameters()]])
        assert not torch.equal(y, block.eval()(x))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0][0]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_drops_the_same(ranks2, sequence_parallel):
    first, second = ranks2.run(with_dropout, sequence_parallel)
    assert torch.equal(first, second) == (not sequence_parallel)  # else each has tokens of its own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "batch_norm"}, "norm: expected layer_norm or rms_norm, got 'batch_norm'"),
        ({"norm_eps": -1e-5}, "eps: expected a number of 0 or more, got -1e-05"),
        ({"recompute": "some"}, "recompute: expected none, selective or full, got 'some'"),
        ({"dropout": 2.0}, r"p: expected a probability from 0 to 1, got 2\.0"),
        ({"activation": "swish"}, "expected an activation of .* got 'swish'"),
    ],
)
def test_block_that_cannot_be_is_refused(options, message):
    with posing(0, 2), pytest.raises(ValueError, match=message):
        TransformerBlock(HIDDEN, HEADS, **options)
