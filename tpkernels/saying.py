"""Reports findings of all ranks once: from one rank of the world, or of each machine."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import warnings
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

_said: WeakKeyDictionary[Store, set[str]] = WeakKeyDictionary()  # by this rank, which goes on saying it
_of_parent: list[Store] = []  # a fork must not use its parent's connection


def is_first_to_say(text: str, place: str = "") -> bool:
    """Whether no other rank has reported this text at this place before; does not wait.

    Without a process group the first rank of a machine says everything.
    """
    if not dist.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    name = hashlib.sha256(f"{place} {text}".encode()).hexdigest()
    store = distributed_c10d._get_default_store()
    said = _said.setdefault(store, set())
    if name in said or any(store is other for other in _of_parent):
        return True
    try:
        first = store.add(f"tpkernels said {name}", 1) == 1
    except RuntimeError:  # the store has ended with the launcher
        return True
    if first:
        said.add(name)
    return first


def warn(text: str, *, stacklevel: int) -> None:
    """Call `warnings.warn` on one rank of each machine."""
    if is_first_to_say(text, socket.gethostname()):
        warnings.warn(text, stacklevel=stacklevel + 1)


def logger_of_machine(name: str) -> logging.Logger:
    """Return a logger that writes each line on one rank of a machine."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_for_us)
    return logger


def _is_for_us(record: logging.LogRecord) -> bool:
    return is_first_to_say(record.getMessage(), socket.gethostname())


def _disown_store_of_parent() -> None:
    if dist.is_initialized():
        _of_parent.append(distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_disown_store_of_parent)
