"""An H100 that is not there, for modules and launchers that ask for a GPU, in child processes of the gate.

Tensors say that they are on it, and lie on the CPU. Nothing computes there: launches are somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from tpkernels.gate.occupancy import H100_SMS, SHARED_LIMIT

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class _OnTheCpu(TorchFunctionMode):
    """Has tensors say that they are on a GPU, and puts what is meant for one on the CPU."""

    SAID: ClassVar[dict[Any, object]] = {
        getattr(Tensor, name).__get__: said
        for name, said in (("device", CUDA), ("is_cuda", True), ("is_cpu", False))
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.SAID:
            return self.SAID[func]
        if func is Tensor.cuda:
            return args[0]
        named = {name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*map(_here, args), **named)


def _here(value: Any) -> Any:
    is_gpu = isinstance(value, str) and value.split(":")[0] == "cuda"
    return CPU if is_gpu or (isinstance(value, torch.device) and value.type == "cuda") else value


class _Driver:
    """What launchers ask Triton's driver."""

    utils = SimpleNamespace(
        get_device_properties=lambda device=0: {
            "max_shared_mem": SHARED_LIMIT["sm_90"],
            "multiprocessor_count": H100_SMS,
            "max_num_regs": 65_536,
            "warpSize": 32,
        }
    )

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """An H100 that launchers may ask about, and whose tensors lie on the CPU."""
    properties = SimpleNamespace(
        name="NVIDIA H100",
        major=9,
        minor=0,
        multi_processor_count=H100_SMS,
        total_memory=80 << 30,
        warp_size=32,
        gcnArchName="",
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None)
    said = {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "current_stream": stream,
        "mem_get_info": (80 << 30, 80 << 30),
        **dict.fromkeys(("_lazy_init", "synchronize", "set_device", "empty_cache", "manual_seed_all")),
    }
    answers: dict[str, Any] = {
        **{name: (lambda *_, answer=answer, **__: answer) for name, answer in said.items()},
        **dict.fromkeys(("device", "device_of", "stream"), lambda *_: nullcontext()),
    }
    triton.runtime.driver.set_active(_Driver())
    with (
        patch.multiple(torch.cuda, **answers),
        patch.object(Autotuner, "_bench", lambda *_, **__: [0.0] * 3),  # so that the first config is taken
        patch.object(BackwardCFunction, "apply", _on_the_cpu(BackwardCFunction.apply)),
        _OnTheCpu(),
    ):
        yield


def _on_the_cpu(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Of an autograd function: the engine leaves modes of the calling thread behind."""

    def apply(*given: Any) -> Any:
        with _OnTheCpu():
            return backward(*given)

    return apply
