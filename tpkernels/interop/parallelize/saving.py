"""`save_pretrained` and `push_to_hub` of a split model write the unsharded one.

Both belong to the model's own library, and read `state_dict()`, which has this rank's shards. So all ranks
gather the full tensors on global rank 0, which alone goes on into the library, with a `state_dict()` that
returns these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tpkernels.interop.full_state_dict import full_state_dict
from tpkernels.interop.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.interop.shards import shards_of

_METHODS = ("save_pretrained", "push_to_hub")


def save_full_weights(model: nn.Module) -> None:
    """Let `save_pretrained` and `push_to_hub` of the model and of models in it write full weights.

    From now on they are called by all ranks of the world, and return when the files are written.
    """
    for module in model.modules():
        for method in _METHODS:
            if callable(getattr(type(module), method, None)):
                setattr(module, method, partial(_by_first_rank, module, method))


def _by_first_rank(module: nn.Module, method: str, *args: Any, **named: Any) -> Any:
    """The library's method, with its own arguments; what it returns, on global rank 0."""
    request = f"{type(module).__name__}.{method}"
    with raise_on_all_ranks(request):
        if named.get("distributed_checkpoint"):
            raise ValueError(
                "distributed_checkpoint=True is for models that transformers has split itself; use "
                "tpkernels.interop.dcp.save"
            )
        _require_full(module, named.get("state_dict"))
    full = full_state_dict(module)
    returned = None
    with raise_on_all_ranks(request):
        if not dist.is_initialized() or dist.get_rank() == 0:
            with _unsharded(module, full):
                returned = getattr(module, method)(*args, **named)
    return returned


def _require_full(module: nn.Module, given: Mapping[str, Tensor] | None) -> None:
    shards = shards_of(module)
    for name, tensor in (given or {}).items():
        if name in shards and tuple(tensor.shape) != shards[name].shape:
            raise ValueError(
                f"state_dict has '{name}' of {tuple(tensor.shape)}, expected the full tensor's "
                f"{shards[name].shape}; leave state_dict out, and full tensors are gathered"
            )


@contextmanager
def _unsharded(module: nn.Module, full: Mapping[str, Tensor]) -> Iterator[None]:
    """The methods of the library, and full tensors where it asks for the model's."""
    named = _under_all_names(module, full)
    count = sum(full[name].numel() for name, _ in module.named_parameters())
    shown: dict[str, Callable[..., Any]] = {"state_dict": lambda *_, **__: dict(named)}
    if hasattr(module, "num_parameters"):  # for the index of several files
        shown["num_parameters"] = lambda *_, **__: count
    hidden = {name: vars(module).pop(name) for name in _METHODS if name in vars(module)}
    before = {name: vars(module)[name] for name in shown if name in vars(module)}
    vars(module).update(shown)
    try:
        yield
    finally:
        for name in shown:
            del vars(module)[name]
        vars(module).update(hidden | before)


def _under_all_names(module: nn.Module, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As in the unsharded model's `state_dict()`, where tied tensors have several names and one memory."""
    first: dict[int, str] = {}
    named = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        named[name] = full[first.setdefault(id(tensor), name)]
    return named
