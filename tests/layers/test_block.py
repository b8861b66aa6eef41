"""Two transformer blocks over ranks against the same written out, unsharded and in float64."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.layers.parity import GATE, cut, cut_of, drawn, gradient_of
from tests.layers.test_attention import turned_in
from tests.layers.worlds import posing
from tests.ops.cases import ACT
from tests.ops.parallel_cases import compare, same
from tpkernels import TransformerBlock, initialize_model_parallel, manual_seed

HIDDEN, HEADS = 16, 4
TOKENS, BATCH = 8, 2

GPT2 = {"norm": "layer_norm", "rotary": False, "activation": "gelu_tanh"}
LLAMA = {"norm": "rms_norm", "rotary": True, "activation": "swiglu", "bias": False, "num_kv_heads": 2}


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    shape: str = "llama"
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = True
    overlap: bool = True
    recompute: str = "none"


def options_of(setting):
    return GPT2 if setting.shape == "gpt2" else LLAMA


def attended(q, k, v):
    if q.dtype != torch.float64:  # torch's own, whose rounding ours is measured against
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / (HIDDEN // HEADS) ** 0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)


def written_out(setting, **t):
    """Both blocks, by name of parameter."""
    options = options_of(setting)
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


def blocks(setting):
    """Errors of the output and of all gradients, as parts of what is allowed."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *[
            TransformerBlock(
                HIDDEN,
                HEADS,
                sequence_parallel=setting.sequence_parallel,
                overlap=setting.overlap,
                recompute=setting.recompute,
                dtype=setting.dtype,
                **options_of(setting),
            )
            for _ in range(2)
        ]
    )
    parameters = dict(model.named_parameters())
    named = {"x": drawn((TOKENS, BATCH, HIDDEN), 1, setting.dtype)}
    for number, (name, parameter) in enumerate(parameters.items()):
        sizes = list(parameter.shape)
        if parameter.tensor_model_parallel:
            sizes[parameter.partition_dim] *= model[0].mlp.world.size
        named[name] = drawn(tuple(sizes), 10 + number, setting.dtype) / 4
        with torch.no_grad():
            parameter.copy_(cut_of(parameter)(named[name]))
    tokens = cut(0) if setting.sequence_parallel else same
    x = tokens(named["x"]).clone().requires_grad_()
    y = model(x)
    dy = drawn((TOKENS, BATCH, HIDDEN), 2, setting.dtype)
    y.backward(tokens(dy))
    ours = {"y": (y.detach(), tokens), "x": (x.grad, tokens)}
    for name, parameter in parameters.items():
        if name.endswith("key.bias"):  # hardly has a gradient; attention's own tests compare it
            continue
        ours[name] = gradient_of(parameter), cut_of(parameter)
    return compare(setting, partial(written_out, setting), named, dy, ours)


def all_within(settings):
    initialize_model_parallel(torch.distributed.get_world_size())
    failed = {}
    for setting in settings:
        errors = blocks(setting)
        if setting.dtype != torch.float64:
            # how a single small gradient is rounded is luck: together they tell, and each one does in float64
            weights = [errors.pop(name) for name in list(errors) if name not in ("y", "x")]
            errors["weights"] = (sum(error**2 for error in weights) / len(weights)) ** 0.5
        failed |= {f"{setting}: {name}": error for name, error in errors.items() if not error < 1}
    return failed


SETTINGS = {
    1: [Setting("gpt2"), Setting("llama"), Setting("llama", torch.float64)],
    2: [
        *[Setting("llama", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)],
        *[Setting("gpt2", dtype, sequence_parallel=False) for dtype in (torch.float64, torch.bfloat16)],
        Setting("llama", torch.float64, overlap=False, recompute="full"),
        Setting("gpt2", torch.float64, recompute="selective"),
        Setting("gpt2", torch.float64, sequence_parallel=False, recompute="full"),
    ],
    4: [Setting("llama", torch.float64), Setting("gpt2", torch.float64), Setting("llama", torch.bfloat16)],
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_agree_with_blocks_written_out(ranks, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    for failed in pool.run(all_within, SETTINGS[ranks], timeout=120):
        assert failed == {}


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


def compiled():
    initialize_model_parallel(torch.distributed.get_world_size())
    torch._dynamo.reset()
    block = TransformerBlock(HIDDEN, HEADS, sequence_parallel=True, **LLAMA)
    x = drawn(
        (TOKENS // torch.distributed.get_world_size(), BATCH, HIDDEN), 1, torch.float32
    ).requires_grad_()
    whole = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = []
    for call in (block, whole):
        y = call(x)
        found.append((y.detach(), *torch.autograd.grad(y.pow(2).sum(), [x, *block.parameters()])))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_compiles_whole(ranks2):
    ranks2.run(compiled, timeout=200)


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
def test_mistakes_are_told_at_construction(options, message):
    with posing(0, 2), pytest.raises(ValueError, match=message):
        TransformerBlock(HIDDEN, HEADS, **options)
