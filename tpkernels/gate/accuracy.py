"""How far off a kernel may be, and frames that show what it left unwritten or wrote too much.

Shared by `python -m tpkernels check` and the tests, so that the two cannot come to mean different things.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# norm-wise, against float64: about one and a half correct roundings of the result, on average over its
# elements. So a result must have some hundreds: a single one may round by up to 3.9e-3 in bf16
BOUND: Mapping[torch.dtype, float] = {torch.float32: 3e-7, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖; 0 for two empty tensors, infinite for different shapes."""
    if actual.shape != exact.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - exact.double()).norm()
    return float(difference / exact.double().norm().clamp_min(1e-300))


class Frames:
    """Allocates for `launch.empty`: NaN, which must be overwritten, inside canaries, which must not."""

    CANARY = 7.0
    MARGIN = 64  # elements on each side; keeps the 16-byte alignment that descriptors need

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * self.MARGIN,), self.CANARY, dtype=dtype, device=device)
        self._buffers.append((buffer, count))
        return buffer[self.MARGIN : self.MARGIN + count].fill_(float("nan")).view(shape)

    def take_overruns(self) -> list[int]:
        """The sizes of the outputs, allocated since the last call, that were written outside of."""
        taken, self._buffers = self._buffers, []
        return [count for buffer, count in taken if self._overrun(buffer, count)]

    def _overrun(self, buffer: Tensor, count: int) -> bool:
        margins = torch.cat([buffer[: self.MARGIN], buffer[self.MARGIN + count :]])
        return bool((margins != self.CANARY).any())
