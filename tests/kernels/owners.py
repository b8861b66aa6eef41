"""What `scatter_linear` stores into, all in one process: the slots and flags of each owner."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.waiting import EPOCH
from tpkernels.kernels import launch
from tpkernels.kernels.waits import Departures


class Owners:
    """R owners of `rows` each; slots start as NaN, flags at the call before."""

    def __init__(
        self, ranks: int, splits: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
    ):
        self.ranks, self.splits, self.rows = ranks, splits, rows
        self.slots = [launch.empty((rows, cols), dtype, device) for _ in range(ranks)]
        self.flags = torch.full((ranks, splits), EPOCH - 1, dtype=torch.int32, device=device)
        self.departures = Departures(
            torch.tensor([slot.data_ptr() for slot in self.slots], device=device),
            torch.tensor([flags.data_ptr() for flags in self.flags], device=device),
            torch.zeros(ranks * splits, dtype=torch.int32, device=device),
            torch.tensor([EPOCH], dtype=torch.int32, device=device),
        )

    def total(self) -> Tensor:
        """All rows, in the order of owners, after a check that all flags are up and all counters at zero."""
        epoch = self.departures.awaited
        assert torch.equal(self.flags, epoch.expand_as(self.flags))
        assert not self.departures.counters.any()
        return torch.cat(self.slots)

    @contextmanager
    def watched(self) -> Iterator[list[tuple[int, int, bool]]]:
        """(owner, chunk, whether the chunk was full) of each flag that an interpreted kernel raises."""
        raised: list[tuple[int, int, bool]] = []
        places = {
            self.flags[owner, part].data_ptr(): (owner, part)
            for owner in range(self.ranks)
            for part in range(self.splits)
        }
        upstream = InterpreterBuilder.create_atomic_rmw

        def create_atomic_rmw(builder, operation, pointer, *rest):
            if place := places.get(int(pointer.data.item())):
                size = self.rows // self.splits
                owner, part = place
                chunk = self.slots[owner][part * size : (part + 1) * size]
                raised.append((owner, part, not chunk.isnan().any().item()))
            return upstream(builder, operation, pointer, *rest)

        with patch.object(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw):
            yield raised
