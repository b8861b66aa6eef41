"""Raises one rank's error on all ranks, so that no rank waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tpkernels.comm.agreement import Claim, agree
from tpkernels.groups import c10d

_KEPT = (  # types that stay; other errors become a RuntimeError that names them
    ValueError,
    TypeError,
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


@contextmanager
def raise_on_all_ranks(request: str) -> Iterator[None]:
    """Raise on all ranks if one raises in the block. Called by all ranks of the world; requests must agree.

    request: the call in words, the same on all ranks
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        yield
        return
    caught, problem = None, None
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        caught = error
        problem = (kind, str(error)) if type(error) in _KEPT else ("RuntimeError", f"{kind}: {error}")
    try:
        agree(Claim(request, (), problem), c10d.default_group())
    except Exception as error:
        raise error from (caught or error.__cause__)
