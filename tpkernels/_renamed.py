"""Modules under their former names: importing one warns, and gives the module of today.

Not here are files of `ops` that bore an op's name: imported, they would stand in the place of the op.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TODAY = {
    "comm.bucketed": "buckets.collectives",
    "comm.buckets": "buckets.gradients",
    "interop.huggingface_plans": "interop.parallelize.plan",
    "interop.plan": "interop.parallelize.plan",
    "interop.verify": "interop.parallelize.verify",
    "interop.whole": "interop.full_state_dict",
    "kernels.accuracy": "gate.accuracy",
    "kernels.catalog": "gate.catalog",
    "kernels.cross_entropy_backward": "kernels.cross_entropy",
    "kernels.embedding_backward": "kernels.embedding",
    "kernels.norm_backward": "kernels.norm",
    "layers.cross_entropy": "layers.functional",
    "layers.dropout": "layers.attention",
    "layers.regions": "layers.functional",
    "layers.rotary": "layers.attention",
    "ops.mappings": "ops.tensor_parallel.mappings",
    "ops.vocab_choice": "ops.vocab.sampling",
    "pictures.bars": "pictures.charts",
    "pictures.curve": "pictures.charts",
    "pictures.roofline": "pictures.charts",
    "planning.gpus": "gpus",
    "topology.grid": "topology.groups",
    "topology.heads": "topology.shard",
    "training.flops": "training.measures",
    "training.memory": "training.measures",
    "training.metrics": "training.folder",
    "training.phases": "training.profile",
    "training.schedule": "training.config",
    "training.world": "training.launch",
    "topology.vocabulary": "topology.shard",
    "tuning": "dispatch",
    "tuning.cache": "dispatch.cache",
    "tuning.chooser": "dispatch.chooser",
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room, _, name = fullname.partition(".")
        if room != __package__ or name not in _TODAY:
            return None
        today = f"{room}.{_TODAY[name]}"
        warnings.warn(f"{fullname} is {today} now; import that", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _Alias(today))


class _Alias(Loader):
    def __init__(self, today: str) -> None:
        self._module = import_module(today)
        self._spec = self._module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put the alias's there


def keep_former_names() -> None:
    """Ask here first: a former folder would find its files of today, and load each a second time."""
    sys.meta_path.insert(0, _Finder())
