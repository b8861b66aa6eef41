"""Which libraries leave reserved SMs free, measured on a GPU: each multiplies while some SMs are busy.

A hog takes whole SMs, as NCCL's blocks do, and spins. A product that counts on them takes two waves: about
twice its time. One that leaves them takes its time on the SMs that are left. The answers are kept where
`reserved_sms` reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import torch
import triton
import triton.language as tl

from tpkernels import reserved_sms
from tpkernels.kernels import linear as linear_kernel
from tpkernels.kernels.target import fp8_obstacle, target_of
from tpkernels.reserved_sms import LIBRARIES, ProductLibrary

ROUNDS = 5
SIZE = 8192, 8192, 4096  # T, N, K in bf16: some fifteen waves of tiles, about a millisecond
BUSY = 4  # one in so many SMs is busy
HELD = 65536  # fp32: all registers of an SM, so that no block of a product fits beside
SPINS = 1_000_000  # a second or more: the hog ends even if nobody releases it
STARTED_SECONDS = 2.0  # until the hog holds its SMs


@triton.jit  # type: ignore[untyped-decorator]
def _hog_kernel(  # type: ignore[no-untyped-def]
    started_ptr, release_ptr, out_ptr, spin_limit, HELD: tl.constexpr
):
    """Hold an SM until the word at release_ptr is set, or the spins run out."""
    held = tl.arange(0, HELD).to(tl.float32)
    tl.atomic_add(started_ptr, 1, sem="release", scope="gpu")
    released = tl.atomic_add(release_ptr, 0, sem="acquire", scope="gpu")
    spins = 0
    while (released == 0) & (spins < spin_limit):
        released = tl.atomic_add(release_ptr, 0, sem="acquire", scope="gpu")
        held = held * 0.5 + 1.0  # in use, so that its registers are
        spins += 1
    tl.store(out_ptr + tl.program_id(0), tl.sum(held))


@dataclass(frozen=True)
class SmAnswer:
    """A product's times in milliseconds, and whether it leaves reserved SMs free."""

    alone: float
    beside: float  # busy SMs that it does not know of
    reserved: float  # beside busy SMs that are reserved
    obeys: bool

    def __str__(self) -> str:
        unknown, known = self.beside / self.alone, self.reserved / self.alone
        verdict = "leaves them" if self.obeys else "takes them"
        return f"beside busy SMs {unknown:.2f}x its time alone, {known:.2f}x if they are reserved: {verdict}"


class ProbedGpu(Protocol):
    """A GPU as the probe needs it."""

    sms: int
    libraries: tuple[ProductLibrary, ...]  # that it can run

    def milliseconds(self, library: ProductLibrary, *, busy: int, reserved: int) -> float:
        """Run a product of the library while so many SMs are busy, and so many reserved."""


def probe(gpu: ProbedGpu) -> dict[ProductLibrary, SmAnswer]:
    """Return each library's answer."""
    return {library: answer_of(gpu, library) for library in gpu.libraries}


def answer_of(gpu: ProbedGpu, library: ProductLibrary) -> SmAnswer:
    busy = max(1, gpu.sms // BUSY)

    def timed(busy: int, reserved: int) -> float:
        return median(gpu.milliseconds(library, busy=busy, reserved=reserved) for _ in range(ROUNDS))

    alone, beside, reserved = timed(0, 0), timed(busy, 0), timed(busy, busy)
    left = gpu.sms / (gpu.sms - busy)  # the time on what is left, if the SMs are left; else two waves
    return SmAnswer(alone, beside, reserved, obeys=reserved / alone < (left + 2) / 2)


class CudaGpu:
    """The current stream of a GPU, with a hog in another."""

    def __init__(self, device: torch.device, size: tuple[int, int, int] = SIZE) -> None:
        T, N, K = size
        self._device, target = device, target_of(device)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._x, self._weight = (
            torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((T, K), (N, K))
        )
        self._side = torch.cuda.Stream(device)
        in_fp8 = device.type == "cuda" and not fp8_obstacle(target)
        self._started, self._release = torch.zeros(2, 1, dtype=torch.int32, device=device).unbind()
        self._held = torch.empty(self.sms, device=device)
        self._products: dict[ProductLibrary, Callable[[], object]] = {
            "cublas": partial(torch.mm, self._x, self._weight.t()),
            "cublaslt": partial(torch.mm, self._x, self._weight.t()),
            "ours": partial(linear_kernel.linear_fwd, self._x, self._weight),
        }
        if in_fp8:
            x, weight = (tensor.to(torch.float8_e4m3fn) for tensor in (self._x, self._weight))
            scale = torch.ones((), device=device)
            self._products["scaled"] = partial(
                torch._scaled_mm, x, weight.t(), scale, scale, out_dtype=torch.bfloat16
            )
        self.libraries = tuple(library for library in LIBRARIES if library in self._products)
        for library in self.libraries:  # a kernel is loaded by its first launch, which would wait for the hog
            self._products[library]()
        self._hog(1)
        self._release.fill_(1)
        torch.cuda.synchronize(device)

    def milliseconds(self, library: ProductLibrary, *, busy: int, reserved: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with _settings(library, reserved):
            self._products[library]()  # with these settings: cuBLASLt asks for a kernel once
            torch.cuda.synchronize(self._device)
            if busy:
                self._start_hog(busy)
            start.record()
            self._products[library]()
            end.record()
            self._release.fill_(1)
            torch.cuda.synchronize(self._device)
        return float(start.elapsed_time(end))

    def _start_hog(self, busy: int) -> None:
        """Return when the hog holds its SMs."""
        self._started.zero_()
        self._release.zero_()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._side):
            self._hog(busy)
        waited = time.monotonic()
        while int(self._started) < busy:
            if time.monotonic() - waited > STARTED_SECONDS:
                self._release.fill_(1)
                raise RuntimeError(f"the probe's kernel has {int(self._started)} of {busy} SMs")

    def _hog(self, blocks: int) -> None:
        _hog_kernel[(blocks,)](self._started, self._release, self._held, SPINS, HELD=HELD, num_warps=32)


@contextmanager
def _settings(library: ProductLibrary, reserved: int) -> Iterator[None]:
    """torch's settings for a product, and then the user's again."""
    sms, preferred = torch._C._get_sm_carveout_experimental(), torch._C._get_blas_preferred_backend()
    kinds = torch._C._BlasBackend
    torch._C._set_sm_carveout_experimental(reserved or None)
    torch._C._set_blas_preferred_backend(kinds.Cublaslt if library == "cublaslt" else kinds.Cublas)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(sms)
        torch._C._set_blas_preferred_backend(preferred)


def probe_and_keep(device: torch.device) -> Mapping[ProductLibrary, SmAnswer]:
    """Probe a GPU, and keep its answers for later processes."""
    with torch.cuda.device(device):
        answers = probe(CudaGpu(device))
    reserved_sms.keep(
        torch.cuda.get_device_name(device), {name: answer.obeys for name, answer in answers.items()}
    )
    return answers
