"""What ranks run to compare layers with the unsharded model of the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ops.cases import ACT
from tests.ops.parallel_cases import Part, compare, same
from tpkernels import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    initialize_model_parallel,
)
from tpkernels.comm import schedule
from tpkernels.layers import linear
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import tensor_world

K, N = 24, 48


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


def cut(dim: int, stride: int = 1) -> Callable[[Tensor], Tensor]:
    """This rank's part."""

    def part(whole: Tensor) -> Tensor:
        world = tensor_world()
        return torch.cat(whole.tensor_split(world.size * stride, dim)[world.rank :: world.size], dim)

    return part


def cut_of(parameter: Tensor) -> Callable[[Tensor], Tensor]:
    attributes = Attributes.of(parameter)
    if not attributes.tensor_model_parallel:
        return same
    return cut(attributes.partition_dim, attributes.partition_stride)


def laid_out(setting: Setting, x: Tensor) -> Tensor:
    """The same numbers; if they are to be strided, with the first two dimensions transposed in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if setting.strided else x.clone()


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pair(setting: Setting) -> dict[str, float]:
    """Column, then row: errors as parts of what is allowed."""
    options = {
        "bias": setting.bias,
        "stride": setting.stride,
        "sequence_parallel": setting.sequence_parallel,
        "gradient_accumulation_fusion": setting.fused,
        "overlap": setting.overlap,
        "dtype": setting.dtype,
    }
    torch.manual_seed(11)
    up = ColumnParallelLinear(K, N, gather_output=setting.whole, activation=setting.activation, **options)
    down = RowParallelLinear(
        N, K, input_is_parallel=not setting.whole, skip_bias_add=setting.skip_bias_add, **options
    )
    torch.manual_seed(11)
    weights = [nn.init.xavier_normal_(torch.empty(N, K)), nn.init.xavier_normal_(torch.empty(K, N))]
    named = {"x": drawn((*setting.leading, K), 1, setting.dtype)}
    named |= {"w_up": weights[0].to(setting.dtype), "w_down": weights[1].to(setting.dtype)}
    layers = {"w_up": up.weight, "w_down": down.weight}
    for name, parameter in layers.items():
        if not torch.equal(parameter, cut_of(parameter)(named[name])):
            return {f"{name} as initialised": float("inf")}
    if setting.bias:
        layers |= {"b_up": up.bias, "b_down": down.bias}
        named |= {"b_up": drawn((N,), 2, setting.dtype), "b_down": drawn((K,), 3, setting.dtype)}
        for name in ("b_up", "b_down"):
            with torch.no_grad():
                layers[name].copy_(cut_of(layers[name])(named[name]))
    for layer in (up, down) if setting.fused else ():
        layer.weight.main_grad = torch.ones_like(layer.weight, dtype=torch.float32)

    tokens = cut(0) if setting.sequence_parallel else same
    x = laid_out(setting, tokens(named["x"])).requires_grad_()
    y, bias = down(up(x)[0])
    if setting.skip_bias_add and setting.bias:
        y = y + bias
    dy = drawn((*setting.leading, K), 4, setting.dtype)
    y.backward(laid_out(setting, tokens(dy)))

    def whole(x: Tensor, w_up: Tensor, w_down: Tensor, **biases: Tensor) -> Tensor:
        h = ACT[setting.activation](F.linear(x, w_up, biases.get("b_up")))
        return F.linear(h, w_down, biases.get("b_down"))

    ours: dict[str, Part] = {"y": (y.detach(), tokens), "x": (x.grad, tokens)}
    for name, parameter in layers.items():
        ours[name] = gradient_of(parameter), cut_of(parameter)
    return compare(setting, whole, named, dy, ours)  # type: ignore[arg-type]


def gathered(setting: Setting) -> dict[str, float]:
    """A column whose output is gathered: all tokens and all features on each rank."""
    torch.manual_seed(11)
    layer = ColumnParallelLinear(
        K,
        N,
        gather_output=True,
        activation=setting.activation,
        sequence_parallel=setting.sequence_parallel,
        overlap=setting.overlap,
        dtype=setting.dtype,
    )
    torch.manual_seed(11)
    named = {"w": nn.init.xavier_normal_(torch.empty(N, K)).to(setting.dtype)}
    named |= {"b": drawn((N,), 2, setting.dtype), "x": drawn((*setting.leading, K), 1, setting.dtype)}
    with torch.no_grad():
        layer.bias.copy_(cut(0)(named["b"]))
    tokens = cut(0) if setting.sequence_parallel else same
    x = laid_out(setting, tokens(named["x"])).requires_grad_()
    y, _ = layer(x)
    dy = drawn((*setting.leading, N), 4, setting.dtype)
    y.backward(laid_out(setting, dy))

    def whole(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ACT[setting.activation](F.linear(x, w, b))

    ours: dict[str, Part] = {"y": (y.detach(), same), "x": (x.grad, tokens)}
    ours |= {"w": (layer.weight.grad, cut(0)), "b": (layer.bias.grad, cut(0))}
    return compare(setting, whole, named, dy, ours)  # type: ignore[arg-type]


GATE = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def block(setting: Setting) -> dict[str, float]:
    """Norm, then MLP."""
    norm_type = LayerNorm if setting.bias else RMSNorm
    norm = norm_type(K, sequence_parallel=setting.sequence_parallel, dtype=setting.dtype)
    torch.manual_seed(11)
    mlp = ParallelMLP(
        K,
        N,
        activation=setting.activation,
        bias=setting.bias,
        output_layer_init_method=nn.init.normal_,
        skip_bias_add=setting.skip_bias_add,
        sequence_parallel=setting.sequence_parallel,
        gradient_accumulation_fusion=setting.fused,
        overlap=setting.overlap,
        dtype=setting.dtype,
    )
    gate = GATE.get(str(setting.activation))
    torch.manual_seed(11)
    drawn_weights = {"mlp.up.weight": nn.init.xavier_normal_(torch.empty(N, K))}
    if gate:
        drawn_weights["mlp.gate.weight"] = nn.init.xavier_normal_(torch.empty(N, K))
    drawn_weights["mlp.down.weight"] = torch.randn(K, N)
    named = {name: weight.to(setting.dtype) for name, weight in drawn_weights.items()}
    model = nn.ModuleDict({"norm": norm, "mlp": mlp})
    parameters = dict(model.named_parameters())
    for number, (name, parameter) in enumerate(parameters.items()):
        if name in named:
            if not torch.equal(parameter, cut_of(parameter)(named[name])):
                return {f"{name} as initialised": float("inf")}
            if setting.fused:
                parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
        else:
            named[name] = drawn((N if "up.bias" in name else K,), 20 + number, setting.dtype)
            with torch.no_grad():
                parameter.copy_(cut_of(parameter)(named[name]))

    tokens = cut(0) if setting.sequence_parallel else same
    named["x"] = drawn((*setting.leading, K), 1, setting.dtype)
    x = laid_out(setting, tokens(named["x"])).requires_grad_()
    y, bias = mlp(norm(x))
    if bias is not None:
        y = y + bias
    dy = drawn((*setting.leading, K), 4, setting.dtype)
    y.backward(laid_out(setting, tokens(dy)))

    def whole(**t: Tensor) -> Tensor:
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

    ours: dict[str, Part] = {"y": (y.detach(), tokens), "x": (x.grad, tokens)}
    for name, parameter in parameters.items():
        ours[name] = gradient_of(parameter), cut_of(parameter)
    return compare(setting, whole, named, dy, ours)  # type: ignore[arg-type]


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """What arrived, summed over ranks where the parameter says so."""
    if hasattr(parameter, "main_grad"):
        assert parameter.grad is None
        return parameter.main_grad - 1
    gradient = parameter.grad
    if gradient is not None and parameter.sequence_parallel:
        dist.all_reduce(gradient, group=tensor_world().group)
    return gradient


CASES = {"pair": pair, "block": block, "gathered": gathered}


def swapped_shards() -> float:
    """What the comparison says of a layer that holds its neighbour's rows."""
    initialize_model_parallel(dist.get_world_size())
    original = linear.ranges_of
    linear.ranges_of = lambda rank, **sizes: original((rank + 1) % sizes["ranks"], **sizes)  # type: ignore[assignment]
    try:
        return max(pair(Setting()).values())
    finally:
        linear.ranges_of = original


def run_all(name: str, tensor: int, settings: list[Setting]) -> list[dict[str, float]]:
    """Many settings in one call: a call of a pool costs more than a tiny layer does."""
    schedule.LEAST_BYTES = 64  # cut even tiny shards
    initialize_model_parallel(tensor)
    return [CASES[name](setting) for setting in settings]
