"""What all ranks find alike is said by one of them: of the world, or of each machine."""

from __future__ import annotations

import hashlib
import os
import socket
import warnings

import torch.distributed as dist
from torch.distributed import Store

from tpkernels.runtime import c10d

_said: set[str] = set()  # by this rank, which goes on saying it
_of_parent: list[Store] = []  # a fork must not use its parent's connection


def is_first_to_say(text: str, place: str = "") -> bool:
    """Whether no other rank has said so before at this place; nobody waits.

    Without a process group the first rank of a machine says everything.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    name = hashlib.sha256(f"{place} {text}".encode()).hexdigest()
    store = c10d.default_store()
    if name in _said or any(store is other for other in _of_parent):
        return True
    try:
        first = store.add(f"tpkernels said {name}", 1) == 1
    except RuntimeError:  # the store has ended with the launcher
        return True
    if first:
        _said.add(name)
    return first


def warn(text: str, *, stacklevel: int) -> None:
    """`warnings.warn`, once a machine of what several of its ranks would say."""
    if is_first_to_say(text, socket.gethostname()):
        warnings.warn(text, stacklevel=stacklevel + 1)


def _disown_store_of_parent() -> None:
    if dist.is_initialized():
        _of_parent.append(c10d.default_store())


os.register_at_fork(after_in_child=_disown_store_of_parent)
