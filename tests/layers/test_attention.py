"""Attention over ranks against attention written out, with every head in one process and in float64."""

from dataclasses import asdict, dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.layers.small import drawn, errors, require_within
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.products import once
from tpkernels import ParallelAttention, initialize_model_parallel
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.layers.attention import rotate, rotation

HIDDEN = 32
TOKENS, BATCH = 8, 2


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    num_kv_heads: int = 4
    head_size: int | None = None
    sequence_parallel: bool = False
    overlap: bool = True
    rotary: bool = True
    causal: bool = True
    mask: str | None = None
    bias: bool = True
    recompute: bool = False
    gradient_accumulation_fusion: bool = False


def written_out(setting, mask):
    """(T, B, h) -> (T, B, h), by scores and a softmax."""
    size = setting.head_size or HIDDEN // setting.num_heads

    def attend(x, **t):
        def linear(x, name):
            return nn.functional.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))

        q, k, v = (linear(x, f"qkv.{name}").unflatten(-1, (-1, size)) for name in ("query", "key", "value"))
        if setting.rotary:
            by = rotation(len(x), size, dtype=torch.promote_types(x.dtype, torch.float32))
            q, k = rotate(q, by), rotate(k, by)
        k, v = (part.repeat_interleave(setting.num_heads // setting.num_kv_heads, 2) for part in (k, v))
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / size**0.5
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask.to(scores.dtype)
        if setting.causal:
            scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(2)
        return linear(mixed, "output")

    return attend


def mask_of(setting):
    generator = torch.Generator().manual_seed(5)
    if setting.mask == "boolean":
        mask = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) > 0.3
        return mask | torch.eye(TOKENS, dtype=torch.bool)
    if setting.mask == "by head":
        return torch.randn(setting.num_heads, TOKENS, TOKENS, generator=generator).to(setting.dtype)
    if setting.mask == "added":
        return torch.randn(1, 1, TOKENS, TOKENS, generator=generator).to(setting.dtype)
    return None


def attention(setting):
    """Errors of the output and of all gradients, as parts of what is allowed."""
    options = asdict(setting)
    del options["mask"]
    layer = ParallelAttention(HIDDEN, **options)
    mask = mask_of(setting)

    def run(x):
        y, bias = layer(x, mask)
        assert bias is None
        return y

    x, dy = (drawn((TOKENS, BATCH, HIDDEN), seed, setting.dtype) for seed in (1, 2))
    # a softmax does not see what all scores share, so that the key bias alone hardly has a gradient
    joined = ("qkv.query.bias", "qkv.key.bias") if setting.bias else ()
    fused = setting.gradient_accumulation_fusion
    return errors(setting, layer, run, written_out(setting, mask), x, dy, fused=fused, joined=joined)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SETTINGS = {
    "ranks1": [
        Setting(),
        Setting(num_kv_heads=2, rotary=False, bias=False),
        Setting(torch.float64, mask="boolean"),
    ],
    "ranks2": [
        *[Setting(dtype, num_kv_heads=2, bias=False, sequence_parallel=True) for dtype in DTYPES],
        Setting(torch.float64, mask="boolean", causal=False),
        Setting(torch.float64, mask="boolean", sequence_parallel=True, overlap=False),
        Setting(torch.float64, mask="added", recompute=True),
        Setting(torch.float64, mask="by head", sequence_parallel=True),
        Setting(torch.float64, num_kv_heads=1, head_size=6, sequence_parallel=True),
        Setting(torch.float64, num_kv_heads=1, rotary=False, causal=False, gradient_accumulation_fusion=True),
    ],
    "ranks4": [
        Setting(torch.float64, num_heads=8, num_kv_heads=2, sequence_parallel=True),
        Setting(torch.float64, num_kv_heads=1, mask="by head"),
        Setting(torch.bfloat16, num_kv_heads=4, bias=False),
        Setting(torch.float64, num_heads=8, num_kv_heads=8, sequence_parallel=True, recompute=True),
    ],
}


@pytest.mark.parametrize("world", SETTINGS)
@on_ranks()
def test_attention_is_attention_written_out():
    ranks = dist.get_world_size()
    initialize_model_parallel(ranks)
    require_within(attention, SETTINGS[f"ranks{ranks}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 6}, r"num_heads: expected a multiple of the 4 tensor-parallel ranks, got 6"),
        ({"num_heads": 5}, r"hidden_size: expected a multiple of num_heads 5, got 48"),
        ({"num_heads": 0}, r"num_heads: expected at least one head, got 0"),
        ({"num_heads": 16}, r"head_size: expected an even number with rotary, .* got 3"),
        ({"num_heads": 8, "num_kv_heads": 3}, r"num_kv_heads: expected a divisor of num_heads 8, got 3"),
        ({"num_heads": 12, "num_kv_heads": 6}, r"expected a multiple or a divisor of the 4 .* 6"),
        ({"num_heads": 8, "num_kv_heads": 1, "rotary": False, "head_size": 3}, r"got 1 heads of 3"),
        ({"num_heads": 8, "dropout": -0.1}, r"dropout: expected a probability from 0 to 1, got -0\.1"),
    ],
)
def test_attention_that_cannot_be_is_refused(options, message):
    with posing(1, 4), pytest.raises(ValueError, match=message):
        ParallelAttention(48, **options)


X = torch.ones(3, 1, 16)
BAD_INPUTS = {
    "hidden": (lambda layer: layer(torch.ones(3, 16)), r"hidden \(tokens, batch, .* got \(3, 16\)"),
    "width": (lambda layer: layer(torch.ones(3, 1, 8)), r"expected input \(\.\.\., 16\), got \(3, 1, 8\)"),
    "mask": (lambda layer: layer(X, X.new_ones(2, 3, 3).bool()), r"attention_mask: .* got \(2, 3, 3\)"),
    "rotation": (lambda layer: layer(X, rotary=rotation(1, 4)), "rotation of 3 positions and 2 pairs"),
}


@pytest.mark.parametrize(("call", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_attention_refuses_inputs_of_another_shape(call, message):
    with posing(0, 1), pytest.raises(ValueError, match=message):
        call(ParallelAttention(16, 4))


def learnt(recompute):
    """Gradients of numbers that all ranks are given alike: masks of all heads and of each, and a rotation."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    layer = ParallelAttention(HIDDEN, 4, num_kv_heads=1, recompute=recompute, dtype=torch.float64)
    x, dy = torch.randn(2, TOKENS, BATCH, HIDDEN, dtype=torch.float64)
    turn = layer.rotation(TOKENS, x.dtype, x.device)
    gradients = []
    for heads in (1, 4):
        given = [torch.randn(heads, TOKENS, TOKENS, dtype=x.dtype), *turn]
        given = [each.clone().requires_grad_() for each in given]
        layer(x, given[0], rotary=type(turn)(*given[1:]))[0].backward(dy)
        gradients += [each.grad for each in given]
    return gradients


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_learnt_by_all_heads_gets_whole_gradients(recompute, ranks1, ranks2):
    (alone,) = ranks1.run(learnt, False)
    for found in ranks2.run(learnt, recompute):
        torch.testing.assert_close(found, alone)


@on_ranks(2)
def test_queries_keys_and_values_share_one_gather():
    initialize_model_parallel(2)
    layer = ParallelAttention(HIDDEN, 4, num_kv_heads=2, sequence_parallel=True)
    with patch.object(TensorParallel, "gather", autospec=True, side_effect=TensorParallel.gather) as gather:
        layer(torch.randn(TOKENS // 2, BATCH, HIDDEN))
    assert [call.args[1] for call in gather.call_args_list] == ["column_linear"]


def turned(x, positions, base):
    """A pair of features as a complex number, turned by t / base^(2i / d), in float64."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None, None, None] * rates
    result = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([result.real, result.imag], -1)


@once(dtype=[torch.float64, torch.float32, torch.bfloat16], base=[10_000.0, 500_000.0])
def test_rotation_is_that_of_complex_numbers(dtype, base):
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 1, 7, 4095, 100_003])
    wide = torch.promote_types(dtype, torch.float32)
    ours = rotate(x, rotation(positions, 8, base, dtype=wide))
    assert ours.dtype == dtype
    error = (ours.double() - turned(x, positions, base)).norm() / x.double().norm()
    assert error < {torch.float64: 1e-10, torch.float32: 1e-7, torch.bfloat16: 3e-3}[dtype]


def test_positions_by_number_count_from_zero():
    counted, given = rotation(6, 4), rotation(torch.arange(6), 4)
    assert all(torch.equal(a, b) for a, b in zip(counted, given, strict=True))
    assert counted.cos.shape == (6, 2)
