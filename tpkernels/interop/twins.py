"""A second model to try a plan on, and something to call it with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import count, islice
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# A tensor, positional arguments, or arguments by name.
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


def twin_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy in eval mode, all of whose floating weights require gradients.

    dtype: of its floating tensors; by default its weights are the model's own memory
    """
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        floating = tensor.is_floating_point()
        value = tensor.detach().to(dtype, copy=True) if floating and dtype else tensor.detach()
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(value, requires_grad=floating)
        else:
            memo[id(tensor)] = value.clone()
    return deepcopy(model, memo).eval()


def made_up_inputs(model: nn.Module, ranks: int) -> tuple[Tensor] | None:
    """Ids, or features, if the first layer is a table, or linear; numbers of sequences and tokens that no
    rank divides, so that features folded into them do not go unnoticed.
    """
    batch, tokens = islice((n for n in count(2) if gcd(n, ranks) == 1), 2)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            ids = torch.arange(batch * tokens).view(batch, tokens) * 7 + 1
            return ((ids % module.num_embeddings).to(module.weight.device),)
        if isinstance(module, nn.Linear):
            weight = module.weight
            features = torch.arange(batch * tokens * module.in_features).cos()
            shaped = features.view(batch, tokens, module.in_features)
            return (shaped.to(device=weight.device, dtype=weight.dtype),)
    return None


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of the first floating weight."""
    found = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(found, torch.get_default_dtype())


def call(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating tensors in `dtype`, and none that requires gradients."""

    def each(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(dtype) if value.is_floating_point() else value

    found: Inputs = tree_map(each, inputs)
    return found


def floating_tensors(output: Any) -> list[Tensor]:
    """Of what a module returned, in order."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """With gradients, and without a trace in random streams."""
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.inference_mode(False):
        yield
