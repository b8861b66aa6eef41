"""Transformer blocks against the same written out; over ranks, `models/test_gpt.py` compares them."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.small import GATE, cut, drawn, errors
from tests.layers.test_attention import turned_in
from tests.layers.worlds import posing
from tests.ops.cases import ACT
from tests.products import once
from tpkernels import TransformerBlock, initialize_model_parallel, manual_seed

HIDDEN, HEADS = 16, 4
TOKENS, BATCH = 8, 2

SHAPES = {
    "gpt2": {"norm": "layer_norm", "rotary": False, "activation": "gelu_tanh"},
    "llama": {"norm": "rms_norm", "rotary": True, "activation": "swiglu", "bias": False, "num_kv_heads": 2},
}


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype
    sequence_parallel: bool = True


def attended(q, k, v):
    if q.dtype != torch.float64:  # torch's own, whose rounding ours is measured against
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / (HIDDEN // HEADS) ** 0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def written_out(options, **t):
    """Both blocks, by name of parameter."""
    x = t["x"]

    def linear(x, name):
        return F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def norm(x, name):
        if options["norm"] == "rms_norm":
            return F.rms_norm(x, (HIDDEN,), t[f"{name}.weight"], 1e-5)
        return F.layer_norm(x, (HIDDEN,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)

    for layer in ("0", "1"):
        n = norm(x, f"{layer}.attention_norm")
        q, k, v = (
            linear(n, f"{layer}.attention.qkv.{name}").unflatten(-1, (-1, HIDDEN // HEADS))
            for name in ("query", "key", "value")
        )
        if options["rotary"]:
            q, k = (turned_in(part, torch.arange(TOKENS)) for part in (q, k))
        k, v = (part.repeat_interleave(HEADS // part.shape[2], 2) for part in (k, v))
        x = x + linear(attended(q, k, v).flatten(2), f"{layer}.attention.output")
        n = norm(x, f"{layer}.mlp_norm")
        up = linear(n, f"{layer}.mlp.up")
        gate = GATE.get(options["activation"])
        h = ACT[gate](linear(n, f"{layer}.mlp.gate")) * up if gate else ACT[options["activation"]](up)
        x = x + linear(h, f"{layer}.mlp.down")
    return x


@once(
    shape=[*SHAPES],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    recompute=["none", "selective", "full"],
)
def test_blocks_are_blocks_written_out(shape, dtype, recompute):
    options, setting = SHAPES[shape], Setting(dtype)
    x, dy = (drawn((TOKENS, BATCH, HIDDEN), seed, dtype) for seed in (1, 2))
    with posing(0, 1):
        blocks = [
            TransformerBlock(
                HIDDEN, HEADS, sequence_parallel=True, recompute=recompute, dtype=dtype, **options
            )
            for _ in range(2)
        ]
        model = nn.Sequential(*blocks)
        found = errors(setting, model, model, partial(written_out, options), x, dy)
    if shape == "gpt2":  # key biases hardly have gradients; attention's own tests compare them
        del found["0.attention.qkv.key.bias"], found["1.attention.qkv.key.bias"]
    if dtype != torch.float64:
        # how a single small gradient is rounded is luck: together they tell, and each one does in float64
        weights = [found.pop(name) for name in list(found) if name not in ("y", "x")]
        found["weights"] = (sum(error**2 for error in weights) / len(weights)) ** 0.5
    assert {name: error for name, error in found.items() if not error < 1} == {}


def with_dropout(sequence_parallel):
    """The same step for every way to recompute."""
    state = initialize_model_parallel(torch.distributed.get_world_size())
    results = []
    for recompute in ("none", "selective", "full"):
        torch.manual_seed(3)
        block = TransformerBlock(
            HIDDEN,
            HEADS,
            dropout=0.3,
            attention_dropout=0.2,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            state=state,
        )
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
