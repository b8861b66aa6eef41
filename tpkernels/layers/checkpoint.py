"""Recomputation: intermediate results are not kept for backward, but computed again in it.

What is drawn from any random stream while computing is drawn again, bit for bit, and no stream notices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_in_torch

from tpkernels.runtime.random import get_rng_tracker

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """function(*args, **kwargs), of which only the arguments are kept for backward.

    Transfers between ranks in `function` are made again too: all ranks recompute the same.
    """
    ways: dict[str, Any] = {"use_reentrant": False}
    if not torch.compiler.is_compiling():  # which sees to random numbers by itself
        tracker = get_rng_tracker()
        moment = tracker.snapshot()
        ways["preserve_rng_state"] = False  # torch knows one stream only
        ways["context_fn"] = lambda: (nullcontext(), tracker.replay(moment))
    return cast("T", checkpoint_in_torch(function, *args, **ways, **kwargs))
