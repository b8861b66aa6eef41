"""Starts kernels on the CPU as on an H100, up to the driver: Triton compiles and binds arguments as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
