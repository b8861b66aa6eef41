"""All ranks ask for the same thing, or all ranks get the same error. A handful of store operations each.

Nothing is compared by a collective: that would need a device, and would hang where a rank stays away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, Store

from tpkernels.runtime.state import ParallelStateError

AGREED = "agreed"


def agree(request: str, *, store: Store, rank: int, world_size: int, timeout: timedelta) -> int:
    """Compare `request` with rank 0's; return how many requests this world has made so far.

    Raises the same error on every rank if any rank's request differs, and within `timeout` if a rank never
    makes one.
    """
    with _lost_store_told(request):
        # Each rank counts its own calls, in the store so that the count lives and dies with the world.
        call = PrefixStore("tpkernels/calls", store).add(str(rank), 1)
        board = PrefixStore(f"tpkernels/agreement/{call}", store)
        verdict = _verdict(board, request, rank, world_size, timeout)
    if verdict != AGREED:
        raise ParallelStateError(verdict)
    return call


def meet(
    request: str, call: int, problem: str, *, store: Store, rank: int, world_size: int, timeout: timedelta
) -> None:
    """Return once every rank has done what they agreed on; raise the same error on every rank if one has not.

    call: as `agree` returned it
    problem: why this rank has not, if so
    """
    request, board = f"the end of {request}", PrefixStore(f"tpkernels/end/{call}", store)
    with _lost_store_told(request):
        board.set(f"arrived/{rank}", "")
        if problem:
            _pronounce(board, problem)
        elif board.add("alike", 1) == world_size:
            _pronounce(board, AGREED)
        verdict = _heard(board, request, rank, world_size, timeout)
    if verdict != AGREED:
        raise ParallelStateError(verdict)


@contextmanager
def _lost_store_told(request: str) -> Iterator[None]:
    try:
        yield
    except DistNetworkError as error:
        raise ParallelStateError(
            f"the store of torch.distributed is gone, and most likely rank 0 with it, in {request}: {error}"
        ) from error


def _verdict(board: Store, request: str, rank: int, world_size: int, timeout: timedelta) -> str:
    """What holds for all ranks: the first verdict that any of them pronounces, and no later one."""
    board.set(f"arrived/{rank}", "")
    if rank == 0:
        board.set("request", request)
    if board.check(["verdict"]):  # we are late, and the others have given up
        return board.get("verdict").decode()
    if _wait(board, "request", timeout):
        asked = board.get("request").decode()
        if asked != request:
            _pronounce(
                board, f"ranks disagree: rank 0 asked for {asked}, but rank {rank} asked for {request}"
            )
        elif board.add("alike", 1) == world_size:
            _pronounce(board, AGREED)
        return _heard(board, request, rank, world_size, timeout)
    return _given_up(board, request, rank, world_size, timeout)


def _heard(board: Store, request: str, rank: int, world_size: int, timeout: timedelta) -> str:
    """The verdict, once there is one."""
    if _wait(board, "verdict", timeout):
        return board.get("verdict").decode()
    return _given_up(board, request, rank, world_size, timeout)


def _given_up(board: Store, request: str, rank: int, world_size: int, timeout: timedelta) -> str:
    """The verdict when time has run out."""
    # One rank looks for the others, so that a large world does not ask the store world x world questions.
    if board.add("overdue", 1) == 1:
        missing = [str(r) for r in range(world_size) if not board.check([f"arrived/{r}"])]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "some rank"
        came = "did not call it" if missing else "called it too late"
        _pronounce(board, f"rank {rank} waited {timeout.total_seconds():g} s in {request}: {who} {came}")
    elif not _wait(board, "verdict", timeout):
        _pronounce(board, f"rank {rank} waited twice {timeout.total_seconds():g} s in {request}")
    return board.get("verdict").decode()


def _pronounce(board: Store, verdict: str) -> None:
    """Sets the verdict unless there is one: an atomic step, so that a late rank cannot be told otherwise."""
    board.compare_set("verdict", "", verdict)


def _wait(board: Store, key: str, timeout: timedelta) -> bool:
    """Whether `key` is set in time."""
    try:
        board.wait([key], timeout)
    except DistNetworkError:
        raise
    except RuntimeError:  # stores differ in what they raise for a time-out: DistStoreError is one kind of it
        return board.check([key])
    return True
