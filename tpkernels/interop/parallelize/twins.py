"""A copy of a model to try a plan on, and how it is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tpkernels.interop.parallelize.lora import activate_adapters

# A tensor, positional arguments, or arguments by name.
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


def twin_of(
    model: nn.Module, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Module:
    """A copy in eval mode, all of whose floating-point parameters require gradients.

    dtype: of its floating-point tensors; None: the parameters share memory with the model's
    device: where tensors on the meta device become zeros; None: they stay
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        value, floating = tensor.detach(), tensor.is_floating_point()
        if value.is_meta and device is not None:
            value = torch.zeros_like(value, device=device)
        if floating and dtype:
            value = value.to(dtype, copy=True)
        elif not isinstance(tensor, nn.Parameter):
            value = value.clone()
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=floating) if is_weight else value
    twin = deepcopy(model, memo).eval()
    activate_adapters(twin)
    return twin


def call(model: nn.Module, inputs: Inputs) -> Any:
    """model(inputs), with tensors on the model's device, and floating-point ones in its dtype."""
    weights = [p for p in model.parameters() if p.is_floating_point()]

    def fitting(value: Any) -> Any:
        if not isinstance(value, Tensor) or not weights:
            return value
        dtype = weights[0].dtype if value.is_floating_point() else value.dtype
        return value.detach().to(device=weights[0].device, dtype=dtype)

    fitted = tree_map(fitting, inputs)
    if isinstance(fitted, Mapping):
        return model(**fitted)
    return model(*fitted) if isinstance(fitted, tuple) else model(fitted)


def floating_tensors(output: Any) -> list[Tensor]:
    """Those in what a module returned, in order."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """With gradients, off the meta device, and with random streams restored, whatever the caller has set."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    default = torch.get_default_device()
    default = torch.device("cpu") if default.type == "meta" else default
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.inference_mode(False), default:
        yield
