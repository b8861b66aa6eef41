"""What goes wrong on one rank is the same error on all: nobody waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_KEPT = (
    ValueError,
    TypeError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


@contextmanager
def together(request: str) -> Iterator[None]:
    """Around what each rank does by itself. Called by all ranks of the world, which compare their requests.

    request: the call in words, the same on all ranks
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        yield
        return
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    own = request, type(caught).__name__, str(caught)
    everybody: list[tuple[str, str, str]] = [own] * dist.get_world_size()
    try:
        dist.all_gather_object(everybody, own)
    except RuntimeError as error:
        raise RuntimeError(
            f"{request}: ranks could not compare what they do; one died, or did not make this call, which "
            f"all ranks of the world make. Cause: {error}"
        ) from (caught or error)
    if any(said[0] != request for said in everybody):
        found = "; ".join(f"{_who(everybody, 0, call)} called {call}" for call in _different(everybody, 0))
        raise ValueError(f"ranks disagree: {found}; every rank must make the same call") from caught
    failed = [said for said in everybody if said[1] != type(None).__name__]
    if failed:
        _, kind, text = failed[0]
        raised = next((known for known in _KEPT if known.__name__ == kind), RuntimeError)
        shown = text if raised is not RuntimeError else f"{kind}: {text}"
        raise raised(f"{request}: on {_who(everybody, 2, text)}: {shown}") from caught


def _different(everybody: list[tuple[str, str, str]], position: int) -> list[str]:
    return list(dict.fromkeys(said[position] for said in everybody))


def _who(everybody: list[tuple[str, str, str]], position: int, text: str) -> str:
    ranks = [str(rank) for rank, said in enumerate(everybody) if said[position] == text]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
