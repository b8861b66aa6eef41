"""An optimizer's state by the parameters' names, sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpkernels.checkpoints.freed import freed_like, is_freed
from tpkernels.checkpoints.shards import TensorShard

STATE = "optimizer.state."  # prefix of entries: optimizer.state.NAME.KEY
GROUPS = "optimizer.groups"
# options that are not copied from one optimizer to another
_OWN = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})


class OptimizerState:
    """An optimizer's state as named entries, to copy into an optimizer over other shards."""

    def __init__(self, optimizer: Optimizer, shards: Mapping[str, TensorShard]) -> None:
        """shards: of the model's parameters, which the optimizer updates"""
        if isinstance(getattr(optimizer, "optim", None), Optimizer):
            raise ValueError(
                f"optimizer: expected an optimizer with its own state, got {type(optimizer).__name__}, which "
                "keeps it in another optimizer, sharded in a way of its own"
            )
        self.optimizer = optimizer
        self._owned: dict[str, tuple[TensorShard, dict[str, Any]]] = {}  # shards, and options of their groups
        self._placed: dict[str, Tensor] = {}  # local tensors that are filled, with padding
        by_id = {id(shard.tensor): name for name, shard in shards.items()}
        self.names: list[list[str]] = []  # of each parameter group
        for number, options in enumerate(optimizer.param_groups):
            strange = [p for p in options["params"] if id(p) not in by_id]
            if strange:
                raise ValueError(
                    f"optimizer: parameter group {number} has a tensor {tuple(strange[0].shape)} that is not "
                    "a parameter of the model; build the optimizer over model.parameters()"
                )
            self.names.append([by_id[id(parameter)] for parameter in options["params"]])
            self._owned |= {name: (shards[name], options) for name in self.names[-1]}

    def content(self) -> dict[str, Any]:
        """Return the entries: shards, numbers, and the groups' options."""
        groups = [
            {**{key: _portable(value) for key, value in options.items() if key != "params"}, "params": names}
            for options, names in zip(self.optimizer.param_groups, self.names, strict=True)
        ]
        found: dict[str, Any] = {GROUPS: groups}
        for name, (shard, _) in self._owned.items():
            for key, value in self.optimizer.state.get(shard.tensor, {}).items():
                found[f"{STATE}{name}.{key}"] = self._shared(name, key, value)
        return found

    def require_groups(self, saved: list[dict[str, Any]]) -> None:
        """Raise unless the saved optimizer has the same parameters in the same groups."""
        there = [sorted(options["params"]) for options in saved]
        if there != [sorted(names) for names in self.names]:
            raise ValueError(
                f"optimizer: expected parameter groups of {[len(names) for names in self.names]} parameters "
                f"as in the optimizer, got {[len(names) for names in there]}, or other parameters in them; "
                "build it as it was when saved"
            )

    def require_options(self, given: list[dict[str, Any]]) -> None:
        """Raise if the given optimizer lacks options of this one, and so is of another kind."""
        options = self.optimizer.defaults.keys() - _OWN
        lacking = [key for key in sorted(options) if any(key not in group for group in given)]
        if lacking:
            raise ValueError(
                f"to_optimizer: {type(self.optimizer).__name__} has the options {lacking}, which the "
                "optimizer lacks: its state would mean something else; build both of the same class"
            )

    def place_for(self, entries: Mapping[str, Any]) -> dict[str, TensorShard | Tensor | None]:
        """Return new tensors for the tensors among another optimizer's entries; None for other values.

        entries: full tensors, whose values are copied, or on the meta device, to be filled by the caller
        """
        place: dict[str, TensorShard | Tensor | None] = {}
        for entry, value in entries.items():
            name, key = _name_and_key(entry)
            if name not in self._owned:
                raise ValueError(f"optimizer: there is {key!r} of {name!r}, which is not in its groups")
            shard, options = self._owned[name]
            if not isinstance(value, Tensor):
                place[entry] = None
            elif value.ndim and value.shape == shard.shape:
                is_later = not isinstance(shard.tensor, DTensor) and is_freed(shard.tensor)
                new = freed_like if is_later else torch.zeros_like
                self._placed[entry] = new(shard.tensor, dtype=value.dtype)
                place[entry] = shard.of(self._placed[entry])
            else:
                on_device = options.get("capturable") or options.get("fused")
                device = shard.local.device if on_device else torch.device("cpu")
                new_value = (
                    torch.empty_like(value, device=device) if value.is_meta else value.to(device, copy=True)
                )
                place[entry] = self._placed[entry] = new_value
        return place

    def take(self, groups: list[dict[str, Any]], content: Mapping[str, Any]) -> None:
        """Take over the entries' options and values; `place_for` made their tensors, now filled."""
        for options, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key in saved.keys() - _OWN:
                value, now = saved[key], options.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor):
                    value = value.to(now.device)
                options[key] = value
        for shard, _ in self._owned.values():
            self.optimizer.state.pop(shard.tensor, None)
        for entry, value in content.items():
            if entry.startswith(STATE):
                name, key = _name_and_key(entry)
                self.optimizer.state[self._owned[name][0].tensor][key] = self._placed.get(entry, value)

    def _shared(self, name: str, key: str, value: object) -> object:
        shard, _ = self._owned[name]
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.shape != shard.tensor.shape or isinstance(value, DTensor) != isinstance(
            shard.tensor, DTensor
        ):
            raise ValueError(
                f"optimizer: expected {key!r} of '{name}' to be a number or of the parameter's shape "
                f"{tuple(shard.tensor.shape)} and kind, got {type(value).__name__} {tuple(value.shape)}: its "
                "sharding is not known"
            )
        return shard.of(value)


def _portable(value: object) -> object:
    """Return a copy that other processes can unpickle: tensors, such as a learning rate, on the CPU."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _name_and_key(entry: str) -> tuple[str, str]:
    name, _, key = entry.removeprefix(STATE).rpartition(".")
    return name, key
