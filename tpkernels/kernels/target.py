"""What a kernel runs on, as far as launching cares: a value, so that choices can be tested without a GPU."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

import torch

# capability -> bytes of shared memory that a program can have
_SHARED_MEMORY = {
    70: 98_304,
    75: 65_536,
    80: 166_912,
    87: 166_912,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    110: 232_448,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU, or Triton's interpreter."""

    backend: Literal["cuda", "hip", "interpreter"]
    capability: int = 0  # 90 for sm_90; 0 where the word means nothing
    processors: int = 1  # streaming multiprocessors, or compute units

    @property
    def shared_memory(self) -> int:
        """Bytes that a program can have. Of a GPU that is not known here, what all since sm_80 have."""
        if self.backend == "interpreter":
            return 2**31
        return 65_536 if self.backend == "hip" else _SHARED_MEMORY.get(self.capability, 101_376)

    @property
    def has_tma(self) -> bool:
        """Whether host tensor descriptors move blocks by a copy engine (the interpreter imitates it).

        sm_120 has one too, but not the shared memory that the tiles of descriptor kernels take.
        """
        if self.backend != "cuda":
            return self.backend == "interpreter"
        return self.capability >= 90 and self.shared_memory >= _SHARED_MEMORY[90]


INTERPRETER = Target(
    "interpreter", processors=3
)  # 3: persistent loops take several turns even at small sizes
H100 = Target("cuda", 90, 132)
A100 = Target("cuda", 80, 108)
B200 = Target("cuda", 100, 148)
L40S = Target("cuda", 89, 142)
RTX_5090 = Target("cuda", 120, 170)
MI300 = Target("hip", processors=304)

emulated_target: ContextVar[Target | None] = ContextVar("emulated_target", default=None)
"""What tensors on the CPU or the meta device stand for, within `launch.emulation`."""


def target_of(device: torch.device) -> Target:
    """What kernels on tensors of `device` run on."""
    kind, interpreting = device.type, _interpret().INTERPRETING  # each look at a device costs
    if kind == "cuda" and not interpreting:
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    if kind in ("cpu", "meta") and (emulated := emulated_target.get()):
        return emulated
    if interpreting and kind == "cpu":
        return INTERPRETER
    wanted, mode = ("the CPU", "without") if interpreting else ("a CUDA device", "with")
    raise ValueError(
        f"kernels expected tensors on {wanted}, got {device}: move them there, use the oracles of "
        f"tpkernels.kernels.reference, or start the process {mode} TRITON_INTERPRET=1"
    )


@cache
def _interpret() -> Any:
    """Imported when it is needed: plain values above need no Triton."""
    return import_module("tpkernels.kernels.interpret")


@cache
def _gpu(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    processors = properties.multi_processor_count
    if torch.version.hip is not None:
        return Target("hip", processors=processors)
    return Target("cuda", 10 * properties.major + properties.minor, processors)


def left_free(target: Target, margin: int = 0) -> int:
    """How many processors a product leaves free: `margin`, and as many as torch's setting says.

    `comm.carveout` sets it for collectives. Of what the margin leaves, half at most is free.
    """
    return margin + max(0, min(carveout(), (target.processors - margin) // 2))


def carveout() -> int:
    """How many processors torch leaves free, see `comm.carveout`."""
    return torch._C._get_sm_carveout_experimental() or 0


def resident_programs(launcher: str, target: Target, per_processor: int, margin: int) -> int:
    """How many programs a persistent kernel has, if it leaves `margin` processors to other kernels.

    GPUs place programs on all processors in turn before any gets a second: several for each of some
    processors would lie on all of them. So with a margin each processor gets one.
    """
    if not 0 <= margin < target.processors:
        raise ValueError(
            f"{launcher}: expected a margin of 0 to {target.processors - 1} processors, got {margin}"
        )
    return target.processors - margin if margin else target.processors * per_processor


def fp8_obstacle(target: Target) -> str | None:
    """Why kernels cannot multiply e4m3fn and e5m2 there; None if they can."""
    if target.backend == "hip":
        return "one of AMD, whose formats of fp8 differ"
    if target.backend == "cuda" and target.capability < 89:
        return f"{target.capability / 10}"
    return None


def require_fp8(launcher: str, target: Target) -> None:
    if obstacle := fp8_obstacle(target):
        raise ValueError(
            f"{launcher}: fp8 expected a GPU of capability 8.9 or later (Ada, Hopper, Blackwell), got "
            f"{obstacle}"
        )


def input_precision(dtype: torch.dtype, target: Target) -> Literal["ieee", "tf32"]:
    """How products of fp32 are multiplied: truly, unless torch's own setting lets its matmuls use tf32."""
    allowed = fp32_precision() == "tf32"
    return "tf32" if allowed and dtype == torch.float32 and target.backend != "hip" else "ieee"


FP32_PRECISION = partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")


def fp32_precision() -> str:
    """`torch.backends.cuda.matmul.fp32_precision`, whose getter in Python takes ten times as long."""
    return FP32_PRECISION()


def fast_math(dtype: torch.dtype, target: Target) -> bool:
    """Whether the FAST forms of `epilogues` may serve: a 16-bit result, on a GPU that has tanh.approx."""
    return dtype.itemsize == 2 and target.backend == "cuda"
