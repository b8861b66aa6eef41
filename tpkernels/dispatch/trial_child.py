"""The child process of a trial: it runs kernels that this GPU never ran, and tells how each did.

stdin is one JSON text:

    {"device": "cuda:0", "uuid": ..., "seconds": 120, "variants": [...]}

stdout has a JSON line for each thing as it happens. What a variant did not tell its parent sees from outside:

    {"cannot": "..."}                                  nothing can be tried here
    {"number": 0, "stage": "compiling"}                a launch of variant 0 is prepared
    {"number": 0, "stage": "running"}                  it is launched, and the GPU owes a result
    {"number": 0, "outcome": "passed", "said": ""}     or "wrong", "crashed", "untried"
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Primitive
from tpkernels.dispatch.soundness import Outputs, mismatch, results_of, scratch_like
from tpkernels.dispatch.variant import Variant
from tpkernels.kernels.target import target_of

RUNS = 3  # of each size: a race shows in one of them rather than in one alone
SLACK_SECONDS = 30  # for the parent to end this process, before it ends itself


def main() -> None:
    """Try what stdin says."""
    asked = json.load(sys.stdin)
    # should the parent be gone: not a handler, which would wait for the GPU, but the end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # as the parent's thread may have it
    signal.alarm(int(asked["seconds"]) + SLACK_SECONDS)
    told = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is none of these lines

    def tell(**fields: object) -> None:
        told.write(json.dumps(fields) + "\n")

    try:
        device = opened(asked["device"], asked["uuid"])
    except Exception as error:  # exclusive to another process, out of memory, hidden
        tell(cannot=first_line(error))
        return
    for number, fields in enumerate(asked["variants"]):
        alive = _try(number, Variant.from_json(fields), device, tell)
        if not alive:
            return


def opened(name: str, uuid: str | None) -> torch.device:
    """The parent's device, which may have another index here, opened."""
    device = torch.device(name)
    if device.type == "cuda":
        here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        if uuid not in here:
            raise RuntimeError(f"it sees no GPU {uuid}, only {', '.join(here) or 'none'}")
        if here[device.index : device.index + 1] != [uuid]:
            device = torch.device("cuda", here.index(uuid))
        torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _try(number: int, variant: Variant, device: torch.device, tell: Callable[..., None]) -> bool:
    """Tell how a variant does; whether another one may be tried."""
    try:
        found = fault(variant, device, lambda stage: tell(number=number, stage=stage))
    except (torch.OutOfMemoryError, OSError) as error:  # a lack that passes, and says nothing of the kernel
        tell(number=number, outcome="untried", said=first_line(error))
        return False
    except Exception as error:  # whatever a compiler, a launch or the GPU raises
        try:
            _wait(device)
        except Exception:  # its context is lost, and all that follows would fail for it
            tell(number=number, outcome="crashed", said=first_line(error))
            return False
        found = first_line(error)
        if "out of memory" in found or "ALLOC_FAILED" in found:  # Triton's and cuBLAS' own words for it
            tell(number=number, outcome="untried", said=found)
            return False
    tell(number=number, outcome="wrong" if found else "passed", said=found or "")
    return True


def fault(variant: Variant, device: torch.device, begins: Callable[[str], None]) -> str | None:
    """What is wrong with a variant, in words; None if nothing is.

    begins: is told each stage
    """
    begins("compiling")
    record = PRODUCTS[variant.step]
    for sizes, arguments in variant.samples(target_of(device)).items():
        problem = record.problem(*arguments)
        assert problem.options == variant.options, f"{variant} has no samples"
        scratch = scratch_like(arguments, problem.depth, device)
        expected = results_of(record, record.by_torch, scratch)
        _wait(device)
        for _ in range(RUNS):
            begins("compiling")
            actual = _computed(record, variant, scratch, expected)
            begins("running")
            _wait(device)
            if found := mismatch(actual, expected, problem):
                return f"{sizes}: {found}"
    return None


def _computed(
    record: Primitive[..., Any], variant: Variant, scratch: tuple[Any, ...], expected: Outputs
) -> Outputs:
    """What a variant computes, into memory full of NaN: in that of earlier results a lack would not show."""
    if record.changes_first:
        return results_of(record, variant.candidate.bind(record), scratch)
    out: dict[int, Tensor] = {
        id(like): torch.full_like(like, torch.nan) for like in expected if like is not None
    }
    variant.candidate.bind_into(record)(tuple(out.values()), *scratch)
    return tuple(None if like is None else out[id(like)] for like in expected)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
