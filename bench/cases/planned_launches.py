"""What a launch of a kernel takes the host, each time anew and by its plan: without a GPU, up to the driver.

    python -m bench.cases.planned_launches

Triton compiles for an H100 and binds arguments as ever; its launcher is stood in for. The two forms run in
turn on the same operands, and the second lowest time of each is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tpkernels.kernels import launch, launch_plans
from tpkernels.kernels.target import H100

Started = tuple[tuple[int, int, int], int, object, tuple[Any, ...]]  # grid, stream, function, arguments


class _Driver:
    """Loads what Triton compiles, and notes what it would launch."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.utils = self

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def start(x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            self.started.append(((x, y, z), stream, function, rest[4:]))  # behind metadata and hooks

        return start

    def load_binary(self, name: str, *_: object) -> tuple[object, str, int, int, int]:
        return object(), name, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": H100.shared_memory}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(H100.backend, H100.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


_driver = _Driver()  # one: what Triton has compiled stays bound to its launcher


@contextmanager
def starting() -> Iterator[list[Started]]:
    """Launchers on the CPU start kernels as on an H100; lists what reaches Triton's launcher."""
    before = driver._active  # `reset_active` would look for a GPU
    driver.set_active(_driver)
    _driver.started.clear()
    launch_plans.forget()  # none of another driver's
    try:
        with launch.emulation(H100, lambda kernel, grid: kernel[grid]):
            yield _driver.started
    finally:
        driver.set_active(before)
        launch_plans.forget()


def times(call: Callable[[], object], other: Callable[[], object], rounds: int = 500) -> tuple[float, float]:
    """Microseconds of each: the second lowest of as many that are taken in turn."""
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for run, into in zip((call, other), taken, strict=True):
            start = time.perf_counter()
            run()
            into.append(1e6 * (time.perf_counter() - start))
    return sorted(taken[0])[1], sorted(taken[1])[1]


def main() -> None:
    from tpkernels.kernels.dglu import dglu
    from tpkernels.kernels.dgrad import dgrad_act
    from tpkernels.kernels.linear import linear_fwd
    from tpkernels.kernels.wgrad import wgrad

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=torch.bfloat16)

    x, weight, bias, dy, g, u = (
        *(matrix(512, 256), matrix(384, 256), torch.empty(384, dtype=torch.bfloat16)),
        *(matrix(512, 384), matrix(512, 256), matrix(512, 256)),
    )
    cases: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        linear_fwd: ((x, weight, bias), {"activation": "gelu", "keep_z": True}),
        dgrad_act: ((dy, weight, x, "gelu"), {"bias_grad": True}),
        dglu: ((dy, weight, g, u), {"kind": "swiglu", "emit_h": True}),
        wgrad: ((dy, x), {}),
    }
    print("launcher, anew, by its plan (microseconds of the host)")
    with starting():
        for launcher, (operands, options) in cases.items():
            anew, planned = (
                partial(launcher.__wrapped__, *operands, **options),
                partial(launcher, *operands, **options),
            )
            planned(), planned()  # seen, and observed
            print(f"{launcher.__name__}, " + ", ".join(f"{each:.0f}" for each in times(anew, planned)))


if __name__ == "__main__":
    main()
