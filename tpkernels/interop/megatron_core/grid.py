"""A grid of ranks with named dimensions that makes process groups one by one: Megatron's HyperCommGrid.

One world may have several grids. A grid's own ranks make its groups; other ranks may call `create_pg`, as
torch's functions demand, or not; they get None.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.groups.c10d import destroy_group
from tpkernels.groups.initialize import Listed, create_listed_groups
from tpkernels.groups.kinds import Grid
from tpkernels.groups.sizes import InvalidSizes, not_negative, positive
from tpkernels.groups.state import ParallelStateError

Dims = str | Sequence[str]


class HyperCommGrid:
    """A grid of the ranks from `rank_offset` on; the first dimension varies fastest."""

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        if len(shape) != len(dim_names) or len(set(dim_names)) < len(dim_names):
            raise ValueError(f"expected one distinct name for each of the sizes {shape}, got {dim_names}")
        self.shape = [positive(size, name) for size, name in zip(shape, dim_names, strict=True)]
        self.dim_names = list(dim_names)
        self.rank_offset = not_negative(rank_offset, "rank_offset")
        self.size = prod(self.shape)
        self.backend = backend
        if self.size > _world_size() - rank_offset:
            raise InvalidSizes(
                f"a grid of {self.shape} has {self.size} ranks, but from rank {rank_offset} on the world of "
                f"{_world_size()} has {max(0, _world_size() - rank_offset)}"
            )
        self._grid = Grid(dict(zip(self.dim_names, self.shape, strict=True)))
        self._pgs: dict[str, ProcessGroup | None] = {}

    def create_pg(
        self,
        dims: Dims,
        *,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> ProcessGroup | None:
        """Make and return this rank's group along `dims`; None on a rank outside the grid."""
        key = self._key(dims)
        if key in self._pgs:
            raise KeyError(f"the group along {key} exists: get_pg({dims!r}) returns it")
        named = group_desc or f"grid {key}"
        made = create_listed_groups(
            {named: Listed(self.get_rank_enum(dims), self.backend, pg_options)},
            what=f"the {key} groups of a grid {self.shape} of {self.dim_names}",
            timeout=timeout,
        )
        self._pgs[key] = made.get(named)
        return self._pgs[key]

    def get_pg(self, dims: Dims) -> ProcessGroup | None:
        """Return the group that `create_pg` made along `dims`."""
        key = self._key(dims)
        if key not in self._pgs:
            raise KeyError(f"no group along {key} exists: call create_pg({dims!r}) first")
        return self._pgs[key]

    def get_rank_enum(self, dims: Dims) -> list[list[int]]:
        """The ranks of every group along `dims`."""
        return [[self.rank_offset + rank for rank in ranks] for ranks in self._grid.groups(self._named(dims))]

    def destroy(self) -> None:
        """Destroy the groups that were made, the last first."""
        while self._pgs:
            _, group = self._pgs.popitem()
            if group is not None:
                destroy_group(group)

    def _named(self, dims: Dims) -> list[str]:
        """The slowest first, as Megatron names them."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(self.dim_names):
            raise ValueError(f"dims: expected some of {self.dim_names}, each once, got {dims!r}")
        return [name for name in reversed(self.dim_names) if name in wanted]

    def _key(self, dims: Dims) -> str:
        return "-".join(self._named(dims))


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise ParallelStateError(
        "the size of the world is not known: call torch.distributed.init_process_group(...) first, or set "
        "WORLD_SIZE"
    )
