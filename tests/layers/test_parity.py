"""Layers give the unsharded numbers for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.layers.small import GATE, Cut, K, N, cut, drawn, errors, joined_world, require_within
from tests.on_ranks import on_ranks
from tests.ops.cases import ACT
from tests.ops.parallel_cases import same
from tests.products import combined, once
from tpkernels import ColumnParallelLinear, LayerNorm, ParallelMLP, RMSNorm, RowParallelLinear

# ranks that share a layer, of all: the others are data-parallel
WORLDS = {"tp1": ("ranks1", 1), "tp2": ("ranks2", 2), "tp4": ("ranks4", 4), "tp2_dp2": ("ranks4", 2)}
SOME_WORLDS = [
    pytest.param(world, id=name, marks=[pytest.mark.sweep] if name in ("tp1", "tp4") else [])
    for name, world in WORLDS.items()
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    overlap: bool = True
    activation: str | None = "gelu"
    whole: bool = False  # between the layers: gathered, and cut again
    skip_bias_add: bool = False
    bias: bool = True
    stride: int = 1
    fused: bool = False  # gradients into main_grad
    leading: tuple[int, ...] = (8, 3)
    strided: bool = False  # inputs and gradients are views

    def of_both(self) -> dict[str, object]:
        """Options that all layers have."""
        options = {"sequence_parallel": self.sequence_parallel, "gradient_accumulation_fusion": self.fused}
        return {"overlap": self.overlap, "dtype": self.dtype, **options}

    def drawn(self, width: int, seed: int) -> Tensor:
        """If they are to be strided, with the first two dimensions transposed in memory."""
        x = drawn((*self.leading, width), seed, self.dtype)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.strided else x


def with_bias(result: tuple[Tensor, Tensor | None]) -> Tensor:
    y, bias = result
    return y if bias is None else y + bias


def compared(
    setting: Setting, modules: dict[str, nn.Module], run: Cut, full: Callable[..., Tensor]
) -> dict[str, float]:
    x, dy = setting.drawn(K, 1), setting.drawn(K, 4)
    return errors(setting, nn.ModuleDict(modules), run, full, x, dy, fused=setting.fused)


def pair(setting: Setting) -> dict[str, float]:
    """Column, then row."""
    options = {"bias": setting.bias, "stride": setting.stride, **setting.of_both()}
    up = ColumnParallelLinear(K, N, gather_output=setting.whole, activation=setting.activation, **options)
    options |= {"input_is_parallel": not setting.whole, "skip_bias_add": setting.skip_bias_add}
    down = RowParallelLinear(N, K, **options)

    def full(x: Tensor, **t: Tensor) -> Tensor:
        h = ACT[setting.activation](F.linear(x, t["up.weight"], t.get("up.bias")))
        return F.linear(h, t["down.weight"], t.get("down.bias"))

    return compared(setting, {"up": up, "down": down}, lambda x: with_bias(down(up(x)[0])), full)


def gathered(setting: Setting) -> dict[str, float]:
    """A column whose output is gathered: all tokens and all features on each rank."""
    layer = ColumnParallelLinear(K, N, gather_output=True, activation=setting.activation, **setting.of_both())

    def full(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ACT[setting.activation](F.linear(x, weight, bias))

    x, dy = setting.drawn(K, 1), setting.drawn(N, 4)
    return errors(setting, layer, lambda x: layer(x)[0], full, x, dy, cut_y=same)


def block(setting: Setting) -> dict[str, float]:
    """Norm, then MLP."""
    norm_type = LayerNorm if setting.bias else RMSNorm
    norm = norm_type(K, sequence_parallel=setting.sequence_parallel, dtype=setting.dtype)
    options = {"bias": setting.bias, "skip_bias_add": setting.skip_bias_add, **setting.of_both()}
    mlp = ParallelMLP(K, N, activation=setting.activation, **options)
    gate = GATE.get(str(setting.activation))

    def full(**t: Tensor) -> Tensor:
        if setting.bias:
            n = F.layer_norm(t["x"], (K,), t["norm.weight"], t["norm.bias"], 1e-5)
        else:
            n = F.rms_norm(t["x"], (K,), t["norm.weight"], 1e-5)
        up = F.linear(n, t["mlp.up.weight"], t.get("mlp.up.bias"))
        if gate:
            h = ACT[gate](F.linear(n, t["mlp.gate.weight"])) * up
        else:
            h = ACT[None if setting.activation == "none" else setting.activation](up)
        return F.linear(h, t["mlp.down.weight"], t.get("mlp.down.bias"))

    return compared(setting, {"norm": norm, "mlp": mlp}, lambda x: with_bias(mlp(norm(x))), full)


def within(case, tensor, settings):
    joined_world(tensor)
    require_within(case, settings)


@pytest.fixture
def check(request, world):
    def run(case, settings: Iterable[Setting]) -> None:
        pool, tensor = world
        request.getfixturevalue(pool).run(within, case, tensor, list(settings))

    return run


@combined
@once(world=WORLDS, dtype=DTYPES)
def test_column_and_row_are_the_unsharded_layers(check, dtype, combined):
    check(pair, (Setting(dtype, *flags) for flags in combined([False, True], [False, True], [None, "gelu"])))


@combined
@once(world=WORLDS, dtype=DTYPES)
def test_norm_and_mlp_are_the_unsharded_layers(check, dtype, combined):
    flags = combined([False, True], [False, True], ["gelu_tanh", "swiglu"])
    check(block, (Setting(dtype, *flag) for flag in flags))


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_options_of_column_and_row_compute_the_same(check):
    check(
        pair,
        [
            Setting(whole=True),
            Setting(whole=True, activation=None, leading=()),
            Setting(bias=False, sequence_parallel=True),
            Setting(skip_bias_add=True),
            Setting(skip_bias_add=True, sequence_parallel=True),
            Setting(stride=3),
            Setting(stride=2, whole=False, sequence_parallel=True),
            Setting(fused=True),
            Setting(fused=True, sequence_parallel=True, dtype=torch.bfloat16),
            Setting(strided=True, whole=True),
            Setting(strided=True, sequence_parallel=True),
            *(Setting(leading=leading) for leading in ((), (5,), (2, 3, 1, 2), (0,), (3, 0))),
            *(Setting(leading=each, sequence_parallel=True) for each in ((8,), (4, 3, 1, 2), (0, 3), (4, 0))),
        ],
    )


@combined
@pytest.mark.parametrize("world", SOME_WORLDS)
def test_column_may_gather_its_output(check, combined):
    flags = combined([torch.float32, torch.bfloat16], [False, True], [False, True], [None, "gelu"])
    leading = [(4,), (0, 3), (4, 1, 2)]
    check(gathered, (Setting(*flag) for flag in flags))
    check(gathered, (Setting(sequence_parallel=True, leading=shape) for shape in leading))


@pytest.mark.parametrize("world", SOME_WORLDS)
def test_options_of_mlp_compute_the_same(check):
    check(
        block,
        [
            *(Setting(activation=name) for name in ("none", "gelu", "silu", "relu", "relu2")),
            *(Setting(activation=name, bias=False) for name in ("geglu", "geglu_tanh")),
            Setting(skip_bias_add=True, sequence_parallel=True),
            Setting(skip_bias_add=True, activation="swiglu"),
            Setting(bias=False, sequence_parallel=True, activation="relu2"),
            Setting(fused=True, sequence_parallel=True),
            Setting(fused=True, activation="swiglu"),
            Setting(leading=()),
            Setting(strided=True, sequence_parallel=True),
            Setting(leading=(0, 3), sequence_parallel=True),
            Setting(leading=(4, 2, 1, 3), sequence_parallel=True, activation="swiglu"),
        ],
    )


@on_ranks(2)
def test_swapped_shards_would_be_seen():
    """Of a layer that holds its neighbour's rows."""
    joined_world()
    layer = ColumnParallelLinear(K, N, gather_output=False)
    features = cut(1)
    x, dy = drawn((8, K), 1), drawn((8, N), 4)

    def full(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    def swapped(y: Tensor) -> Tensor:
        return features(y.roll(N // 2, 1))

    found = errors(Setting(), layer, lambda x: layer(x)[0], full, x, dy, cut_y=swapped)
    assert found["y"] > 1000
