"""All ranks ask for the same thing, or all ranks get the same error. A handful of store operations each.

Nothing is compared by a collective: that would need a device, and would hang where a rank stays away.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistStoreError, PrefixStore, Store

from tpkernels.runtime.state import ParallelStateError


def agree(request: str, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """Compare `request` with rank 0's; return how many requests this world has made so far.

    Raises the same error on every rank if any rank's request differs, and within `timeout` if a rank never
    makes one.
    """
    store = PrefixStore("tpkernels/agreement", store)
    # Each rank counts its own calls, in the store so that the count lives and dies with the world.
    call = store.add(f"calls/{rank}", 1)
    board = PrefixStore(f"{call}", store)
    try:
        if rank == 0:
            board.set("request", request)
        board.wait(["request"], timeout)
        asked = board.get("request").decode()
        if asked != request:
            _refuse(board, f"ranks disagree: rank 0 asked for {asked}, but rank {rank} asked for {request}")
        if board.add("arrived", 1) == world_size:
            board.set("everyone", "arrived")
        board.wait(["everyone"], timeout)
    except DistStoreError as error:
        missing = [str(r) for r in range(world_size) if store.add(f"calls/{r}", 0) < call]
        reason = (
            f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not call it" if missing else str(error)
        )
        _refuse(board, f"rank {rank} waited {timeout.total_seconds():g} s in {request}: {reason}")
    if board.check(["refusal"]):
        raise ParallelStateError(board.get("refusal").decode())
    return call


def _refuse(board: Store, reason: str) -> None:
    """The first refusal is the one that every rank reports."""
    board.compare_set("refusal", "", reason)
