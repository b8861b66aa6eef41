"""An optimizer's state for checkpoints: by the parameters' names, and sharded as the parameters are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tpkernels.interop.dtensor import as_dtensor
from tpkernels.interop.shards import TensorShard

STATE = "optimizer.state."
GROUPS = "optimizer.groups"


class OptimizerState:
    """An optimizer and the names of its parameters."""

    def __init__(self, optimizer: Optimizer, shards: dict[str, TensorShard], group: ProcessGroup) -> None:
        self.optimizer = optimizer
        self.shards = shards
        self.group = group
        self._read: dict[str, Tensor] = {}  # local tensors that a checkpoint is read into, with padding
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

    def content(self) -> dict[str, Any]:
        """Entries of a checkpoint."""
        groups = [
            {**{key: value for key, value in options.items() if key != "params"}, "params": names}
            for options, names in zip(self.optimizer.param_groups, self.names, strict=True)
        ]
        found: dict[str, Any] = {GROUPS: groups}
        for name, (shard, _) in self._owned().items():
            for key, value in self.optimizer.state.get(shard.tensor, {}).items():
                found[f"{STATE}{name}.{key}"] = self._shared(name, key, value)
        return found

    def require_groups(self, saved: list[dict[str, Any]]) -> None:
        """Raise unless the checkpoint's optimizer has the same parameters in the same groups."""
        there = [sorted(options["params"]) for options in saved]
        if there != [sorted(names) for names in self.names]:
            raise ValueError(
                f"optimizer: expected parameter groups of {[len(names) for names in self.names]} parameters "
                f"as in the optimizer, the checkpoint has {[len(names) for names in there]}, or other "
                "parameters in them; build it as it was when saved"
            )

    def place_for(self, saved: Metadata) -> dict[str, Any]:
        """Entries that a checkpoint is read into: new tensors, and None for pickled values."""
        owned = self._owned()
        place: dict[str, Any] = {}
        for entry, described in saved.state_dict_metadata.items():
            if not entry.startswith(STATE):
                continue
            name, key = _name_and_key(entry)
            if name not in owned:
                raise ValueError(
                    f"optimizer: the checkpoint has {key!r} of {name!r}, which is not in its groups"
                )
            shard, options = owned[name]
            if not isinstance(described, TensorStorageMetadata):
                place[entry] = None
                continue
            dtype = described.properties.dtype
            if tuple(described.size) == shard.shape:
                self._read[entry] = torch.zeros_like(shard.tensor, dtype=dtype)
                place[entry] = as_dtensor(shard.of(self._read[entry]), self.group)
            else:
                on_device = options.get("capturable") or options.get("fused")
                device = shard.local.device if on_device else torch.device("cpu")
                place[entry] = self._read[entry] = torch.empty(described.size, dtype=dtype, device=device)
        return place

    def take(self, groups: list[dict[str, Any]], content: dict[str, Any]) -> None:
        """Continue from the entries that were read."""
        for options, saved in zip(self.optimizer.param_groups, groups, strict=True):
            options.update({key: value for key, value in saved.items() if key != "params"})
        owned = self._owned()
        for shard, _ in owned.values():
            self.optimizer.state.pop(shard.tensor, None)
        for entry, value in content.items():
            if entry.startswith(STATE):
                name, key = _name_and_key(entry)
                self.optimizer.state[owned[name][0].tensor][key] = self._read.get(entry, value)

    def _owned(self) -> dict[str, tuple[TensorShard, dict[str, Any]]]:
        """Each parameter's shard and the options of its group."""
        return {
            name: (self.shards[name], options)
            for options, names in zip(self.optimizer.param_groups, self.names, strict=True)
            for name in names
        }

    def _shared(self, name: str, key: str, value: object) -> object:
        shard = self.shards[name]
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.shape != shard.tensor.shape or isinstance(value, DTensor) != isinstance(
            shard.tensor, DTensor
        ):
            raise ValueError(
                f"optimizer: expected {key!r} of '{name}' to be a number or of the parameter's shape "
                f"{tuple(shard.tensor.shape)} and kind, got {type(value).__name__} {tuple(value.shape)}: how "
                "ranks share it is not known"
            )
        return as_dtensor(shard.of(value), self.group)


def _name_and_key(entry: str) -> tuple[str, str]:
    name, _, key = entry.removeprefix(STATE).rpartition(".")
    return name, key
