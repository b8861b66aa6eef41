"""What ranks tell each other when they open an exchange, so that all open it or none does."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from tpkernels.comm.calls import Call
from tpkernels.comm.gather_small import gather_small
from tpkernels.comm.groups import exchange_device

_CHARACTERS, _BYTES = 256, 16 * 1024  # of a text, and of what a rank brings: up to five texts


def exchanged(value: Sequence[str], call: Call) -> list[list[str]]:
    """What each rank brought, in the order of ranks; long texts are cut."""
    ours = json.dumps([text[:_CHARACTERS] for text in value]).encode().ljust(_BYTES)
    message = torch.frombuffer(bytearray(ours), dtype=torch.uint8).to(exchange_device(call.group))
    return [json.loads(bytes(row.tolist())) for row in gather_small(call, message).cpu()]


def machine() -> str:
    """Equal for two processes that see the same processes of the same machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def require_equal(name: str, wanted: Sequence[object], rank: int) -> None:
    """All ranks asked for the same."""
    for peer, theirs in enumerate(wanted):
        if theirs != wanted[rank]:
            raise ValueError(
                f"{name} on rank {rank}: expected equal arguments on all ranks, got {wanted[rank]} here and "
                f"{theirs} on rank {peer}"
            )


def require_none(name: str, problems: Sequence[str], rank: int) -> None:
    """No rank has said why it cannot take part."""
    for peer, problem in enumerate(problems):
        if problem:
            raise RuntimeError(f"{name} on rank {rank}: rank {peer} cannot take part: {problem}")


def ranks_beside(machines: Sequence[str], rank: int) -> list[int]:
    """The ranks on the machine of `rank`, this one among them."""
    return [peer for peer, theirs in enumerate(machines) if theirs == machines[rank]]


def described(shape: tuple[int, int], dtype: torch.dtype, splits: int) -> str:
    return f"pieces of {tuple(shape)} {str(dtype).removeprefix('torch.')} in {splits} parts"
