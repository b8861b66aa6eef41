"""peft's LoRA on a model that `parallelize` has split. Imports peft at first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers
    from tpkernels.interop.peft.sharded_lora import on_shards as on_shards

if not TYPE_CHECKING:  # a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name != "on_shards":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.sharded_lora"), name)
