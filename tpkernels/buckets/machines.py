"""Which ranks of a group share memory, and who of them speaks to other machines.

machine    one              other
ranks      0  1  2          3  4  5
owners     0 and 3, 1 and 4, 2 and 5: each adds up one shard, first over its machine, then with the other
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpkernels.runtime import c10d


class Machines(NamedTuple):
    """As seen by one rank; ranks are numbered within the group."""

    members: list[int]  # on this machine, this rank among them
    owners: list[int]  # who add up the same shard, one on each machine; none if there is one machine


def machines_of(places: Sequence[str], rank: int) -> tuple[str, Machines]:
    """(why these ranks do not share memory, and who does). places: by rank, where it runs

    >>> machines_of(["a", "a", "b", "b"], rank=1)[1]
    Machines(members=[0, 1], owners=[1, 3])
    >>> machines_of(["a", "a", "b"], rank=0)[0]
    'ranks are on 2 machines, not as many on each'
    """
    ranks_at = {place: [peer for peer, other in enumerate(places) if other == place] for place in places}
    members, counts = ranks_at[places[rank]], {len(ranks) for ranks in ranks_at.values()}
    if len(ranks_at) == 1:
        return "", Machines(members, [])
    if counts == {1}:
        return f"ranks are on {len(ranks_at)} machines, one on each", Machines(members, [])
    if len(counts) > 1:
        return f"ranks are on {len(ranks_at)} machines, not as many on each", Machines(members, [])
    number = members.index(rank)
    return "", Machines(members, sorted(ranks[number] for ranks in ranks_at.values()))


def group_across(group: ProcessGroup, owners: Sequence[int], timeout: float, number: int) -> ProcessGroup:
    """A group of the owners of one shard, made by all ranks of `group` at once.

    For one engine: collectives pair by their order, and between engines that depends on who comes first.
    number: of the call, which tells its name from others
    """
    return c10d.new_group(
        tuple(dist.get_global_rank(group, owner) for owner in owners),
        name=f"{group.group_name}, owners {', '.join(map(str, owners))}, call {number}",
        description="tpkernels owners of a shard of gradient buckets",
        timeout=timedelta(seconds=timeout),
        backend="gloo",
        options=None,
    )
