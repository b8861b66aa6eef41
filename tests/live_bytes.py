"""How much memory a block of code takes, counted by what torch allocates in it."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tpkernels.comm.calls import HEADER_BYTES, calls_of


class LiveBytes(TorchDispatchMode):
    """The most elements that any tensor made inside has, and the most bytes that live at a time."""

    def __init__(self, *before: Tensor, group: ProcessGroup | None = None) -> None:
        """before: whose memory is not counted, when views of it are made inside

        group: of which messages are not counted: it holds a few for coming calls, whatever these are
        """
        super().__init__()
        self.largest = self.peak = 0
        self._storages: WeakSet[Any] = WeakSet()
        self._message = -1 if group is None else HEADER_BYTES + calls_of(group).eager_bytes
        self._before = {tensor.untyped_storage().data_ptr() for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if not isinstance(result, Tensor) or result.is_meta:
                continue
            storage = result.untyped_storage()
            if storage.data_ptr() not in self._before and storage.nbytes() != self._message:
                self.largest = max(self.largest, result.numel())
                self._storages.add(storage)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return results
