"""How much memory a block of code takes, counted by what torch allocates in it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """The most elements that any tensor made inside has, and the most bytes that live at a time."""

    def __init__(self, *before: Tensor, messages: bool = True) -> None:
        """before: whose memory is not counted, when views of it are made inside

        messages: count bytes that travel, too, which a backend's threads free at times of their own
        """
        super().__init__()
        self.largest = self.peak = 0
        self._storages: WeakSet[Any] = WeakSet()
        self._messages: WeakSet[Any] | None = None if messages else WeakSet()
        self._before = {tensor.untyped_storage().data_ptr() for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if not isinstance(result, Tensor) or result.is_meta:
                continue
            storage = result.untyped_storage()
            if self._messages is not None and result.dtype == torch.uint8:
                self._messages.add(storage)
            if storage.data_ptr() not in self._before and storage not in (self._messages or ()):
                self.largest = max(self.largest, result.numel())
                self._storages.add(storage)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return results
