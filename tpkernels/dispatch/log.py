"""Lines on stderr that TPKERNELS_LOG asks for, and warnings of the tuner, once a machine.

    TPKERNELS_LOG=choices          each choice and its reason
    TPKERNELS_LOG=calls            each transfer as it starts, see `journal`
    TPKERNELS_LOG=choices,calls    both

Without the variable the standard way serves: `logging.getLogger("tpkernels.choices").setLevel("INFO")`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from tpkernels import journal
from tpkernels.env import env_flag
from tpkernels.errors import logger_of_machine

choices = logging.getLogger("tpkernels.choices")
calls = logging.getLogger("tpkernels.calls")
warnings = logger_of_machine("tpkernels.dispatch")
LOGS = {"choices": choices, "calls": calls}


def show_if_asked() -> None:
    """Give each log that the environment asks for a stream of its own, once."""
    words = os.environ.get("TPKERNELS_LOG", "")
    names = words.split(",") if words else []
    if not LOGS.keys() >= {*names}:
        warnings.warning("TPKERNELS_LOG is %r; expected %s, or both with a comma", words, " or ".join(LOGS))
    for name in LOGS.keys() & names:
        if not (logger := LOGS[name]).handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("tpkernels[%(process)d] %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False  # or an application that logs would show each line twice


def readers_asked_for(computing: Callable[[torch.device], str]) -> list[journal.JournalReader]:
    """Return the readers of the journal that the environment asks for. computing: for `journal.Lines`"""
    found: list[journal.JournalReader] = []
    if calls.isEnabledFor(logging.INFO):
        found.append(journal.Lines(calls.info, computing))
    if env_flag("TPKERNELS_NVTX", default=False):
        found.append(journal.NvtxRanges())
    return found
