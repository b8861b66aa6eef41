"""Who computes: torch, or our Triton kernels.

TPKERNELS_BACKEND, read when this module is imported, says which:

    auto      torch on the CPU; on a GPU the fastest candidate, see `autotune` (the default)
    torch     torch everywhere
    triton    Triton everywhere: on the CPU only in its interpreter (TRITON_INTERPRET=1)

TPKERNELS_SAFE=1 means torch, and refuses the others.

With TPKERNELS_BATCH_INVARIANT=1 or TPKERNELS_TP_INVARIANT `auto` is Triton on a GPU: torch's libraries choose
their kernels by sizes, and a timed choice would depend on the batch that came first. On the CPU torch keeps
the promise of TP-invariance, as it is called for each segment alike (`segments`), but not that of the batch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from tpkernels.dispatch import log
from tpkernels.env import env_or_safe
from tpkernels.kernels import invariance
from tpkernels.kernels.target import carveout
from tpkernels.reserved_sms import way_beside_collectives
from tpkernels.tp_invariance import segments_of_op

BACKENDS = ("auto", "torch", "triton")

# Read once: looking into the environment takes as long as a tenth of a tiny product.
backend = env_or_safe("TPKERNELS_BACKEND", "auto", safe="torch")


Resolved = Literal["torch", "triton", "fastest", "invariant"]


def resolve_backend(device: torch.device) -> Resolved:
    """Who computes on `device`. An explicit choice never falls back silently."""
    return _resolved(backend, device, invariance.batch_invariant, segments_of_op())


_WHO = {"torch": "torch", "triton": "Triton", "fastest": "who was timed fastest", "invariant": "Triton"}


def computing_on(device: torch.device) -> str:
    """Say who computes on a device now, in words."""
    return _WHO[resolve_backend_now(device)]


def resolve_backend_now(device: torch.device) -> Resolved:
    """`resolve_backend`, of a call that may run beside collectives: torch may take SMs that are reserved."""
    resolved = resolve_backend(device)
    return "invariant" if resolved == "fastest" and carveout() and _takes_reserved_sms(device) else resolved


@cache
def _takes_reserved_sms(device: torch.device) -> bool:
    """Whether of all libraries only our kernels leave reserved SMs free there."""
    return way_beside_collectives(torch.cuda.get_device_name(device)) == "ours"


@cache
def _resolved(backend: str, device: torch.device, batch_invariant: bool, segments: int) -> Resolved:
    """segments: of TP-invariance; with them, as with batch_invariant, no choice depends on sizes or times"""
    if backend not in BACKENDS:
        raise ValueError(f"TPKERNELS_BACKEND is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "triton":
        return "triton"
    if backend == "auto" and device.type == "cuda":
        if find_spec("triton") is not None:
            return "invariant" if batch_invariant or segments else "fastest"
        log.warnings.warning("torch computes on %s: Triton is not installed", device)
    if batch_invariant:
        log.warnings.warning(
            "torch computes on %s: TPKERNELS_BATCH_INVARIANT=1 promises nothing there", device
        )
    return "torch"
