"""What an optimizer keeps of each parameter, under the parameter's name, split as the parameter is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from tpkernels.interop.dtensor import as_dtensor
from tpkernels.interop.parts import Part

STATE = "optimizer.state."
GROUPS = "optimizer.groups"


class OptimizerState:
    """An optimizer over parameters of a model, by their names."""

    def __init__(self, optimizer: Optimizer, parts: dict[str, Part], group: ProcessGroup) -> None:
        self.optimizer = optimizer
        self.parts = parts
        self.group = group
        self._read: dict[str, Tensor] = {}  # what a checkpoint is read into, with padding
        by_id = {id(part.local): name for name, part in parts.items()}
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
        """What a checkpoint keeps."""
        groups = [
            {**{key: value for key, value in options.items() if key != "params"}, "params": names}
            for options, names in zip(self.optimizer.param_groups, self.names, strict=True)
        ]
        found: dict[str, Any] = {GROUPS: groups}
        for name, (part, _) in self._owned().items():
            for key, value in self.optimizer.state.get(part.local, {}).items():
                found[f"{STATE}{name}.{key}"] = self._shared(name, key, value)
        return found

    def require_groups(self, saved: list[dict[str, Any]]) -> None:
        """That the checkpoint's optimizer has the same parameters in the same groups."""
        there = [sorted(options["params"]) for options in saved]
        if there != [sorted(names) for names in self.names]:
            raise ValueError(
                f"optimizer: expected parameter groups of {[len(names) for names in self.names]} parameters "
                f"as in the optimizer, the checkpoint has {[len(names) for names in there]}, or other "
                "parameters in them; build it as it was when saved"
            )

    def place_for(self, saved: Metadata) -> dict[str, Any]:
        """What a checkpoint is read into: new tensors, and None for what is pickled."""
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
            part, options = owned[name]
            if not isinstance(described, TensorStorageMetadata):
                place[entry] = None
                continue
            dtype = described.properties.dtype
            if tuple(described.size) == part.shape:
                self._read[entry] = torch.zeros_like(part.local, dtype=dtype)
                place[entry] = as_dtensor(part.of(self._read[entry]), self.group)
            else:
                on_device = options.get("capturable") or options.get("fused")
                device = part.local.device if on_device else torch.device("cpu")
                place[entry] = self._read[entry] = torch.empty(described.size, dtype=dtype, device=device)
        return place

    def take(self, groups: list[dict[str, Any]], content: dict[str, Any]) -> None:
        """Go on from what was read into the places."""
        for options, saved in zip(self.optimizer.param_groups, groups, strict=True):
            options.update({key: value for key, value in saved.items() if key != "params"})
        owned = self._owned()
        for part, _ in owned.values():
            self.optimizer.state.pop(part.local, None)
        for entry, value in content.items():
            if entry.startswith(STATE):
                name, key = _name_and_key(entry)
                self.optimizer.state[owned[name][0].local][key] = self._read.get(entry, value)

    def _owned(self) -> dict[str, tuple[Part, dict[str, Any]]]:
        """Each parameter and the options of its group."""
        return {
            name: (self.parts[name], options)
            for options, names in zip(self.optimizer.param_groups, self.names, strict=True)
            for name in names
        }

    def _shared(self, name: str, key: str, value: object) -> object:
        part = self.parts[name]
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if value.shape != part.local.shape:
            raise ValueError(
                f"optimizer: expected {key!r} of '{name}' to be a number or of the parameter's shape "
                f"{tuple(part.local.shape)}, got {tuple(value.shape)}: how ranks share it is not known"
            )
        return as_dtensor(part.of(value), self.group)


def _name_and_key(entry: str) -> tuple[str, str]:
    name, _, key = entry.removeprefix(STATE).rpartition(".")
    return name, key
