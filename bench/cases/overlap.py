"""How much of a transfer hides behind the product that waits for it, on one GPU: an emulated link.

Half of x is here, the other half comes from pinned memory of the host, by a copy engine over PCIe, part by
part, each with a flag after it. A copy inside the GPU would take processors, which NVLink does not. PCIe is
slower than NVLink: of each part only as many rows are really copied as make the transfer a given part of the
product's time.

Times are the product's alone, the transfer's alone, one after the other, at once, and a control, whose flags
all rise after the last copy: it has to hide nothing, or the run fails.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.device import Device, milliseconds

LABEL = "emulated link"
MARGIN = 4  # SMs that are left to copies of flags


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    product: float
    transfer: float
    sequential: float
    overlapped: float
    control: float

    @property
    def efficiency(self) -> float:
        """What is saved, in parts of what could be."""
        return self._saved(self.overlapped)

    @property
    def control_efficiency(self) -> float:
        return self._saved(self.control)

    def _saved(self, time: float) -> float:
        return (self.sequential - time) / (self.sequential - max(self.product, self.transfer))


def rows_to_copy(part_rows: int, wanted: float, of_all_rows: float) -> int:
    """Rows of a part that take `wanted`, if all of them take `of_all_rows`: at least one, at most all."""
    return max(1, min(part_rows, round(part_rows * wanted / of_all_rows)))


class EmulatedLink:
    """A gathered product whose second half comes from the host."""

    def __init__(self, device: Device, tokens: int, width: int, features: int, parts: int) -> None:
        from tpkernels.kernels.waits import Arrivals

        self.device, self.parts, self.part_rows = device, parts, tokens // 2 // parts
        self.copied = self.part_rows
        self.x = torch.randn(tokens, width, device=device.name).bfloat16()
        self.weight = torch.randn(features, width, device=device.name).bfloat16()
        self.host = device.pinned(torch.randn(tokens // 2, width).bfloat16())
        sizes = (2 * parts, 1, 1)
        flags, awaited, status = (torch.zeros(size, dtype=torch.int32, device=device.name) for size in sizes)
        self.arrivals = Arrivals(flags, awaited, status, spin_limit=2**22)

    def begin(self) -> None:
        """The next call, whose own rows are here."""
        self.arrivals.awaited.add_(1)
        self.device.fork()

    def raise_own(self) -> None:
        self.arrivals.flags[: self.parts].copy_(self.arrivals.awaited.expand(self.parts))

    def push(self, *, flags: bool = True) -> None:
        """Part by part, each before its flag."""
        half = self.parts * self.part_rows
        with self.device.beside():
            for part in range(self.parts):
                start = part * self.part_rows
                rows = slice(half + start, half + start + self.copied)
                self.x[rows].copy_(self.host[start : start + self.copied], non_blocking=True)
                if flags:
                    flag = self.parts + part
                    self.arrivals.flags[flag : flag + 1].copy_(self.arrivals.awaited)

    def multiply(self) -> None:
        from tpkernels.kernels.linear import linear_fwd

        margin = min(MARGIN, self.device.target.processors - 1)
        linear_fwd(self.x, self.weight, arrivals=self.arrivals, first_row=0, margin=margin)

    def product(self) -> None:
        self.begin()
        self.arrivals.flags.copy_(self.arrivals.awaited.expand(2 * self.parts))
        self.multiply()

    def transfer(self) -> None:
        self.begin()
        self.push()
        self.device.join()

    def sequential(self) -> None:
        self.begin()
        self.raise_own()
        self.push()
        self.device.join()
        self.multiply()

    def overlapped(self) -> None:
        self.begin()
        self.raise_own()
        self.push()
        self.multiply()
        self.device.join()

    def control(self) -> None:
        """Every flag, of the own rows too, after the last copy."""
        self.begin()
        self.push(flags=False)
        with self.device.beside():
            self.arrivals.flags.copy_(self.arrivals.awaited.expand(2 * self.parts))
        self.multiply()
        self.device.join()


def measure(
    device: Device, tokens: int, width: int, features: int, parts: int, ratio: float
) -> dict[str, Any]:
    """ratio: the transfer in parts of the product's time, as near as PCIe allows"""
    link = EmulatedLink(device, tokens, width, features, parts)
    for way in (link.product, link.transfer, link.sequential, link.overlapped, link.control):
        way()  # kernels are loaded before anything waits in earnest
    device.synchronize()
    if int(link.arrivals.status):
        return {"link": LABEL, "error": "copies do not proceed beside a kernel that waits: nothing was timed"}
    product = milliseconds(device, link.product)
    link.copied = rows_to_copy(link.part_rows, ratio * product, milliseconds(device, link.transfer))
    ways = (link.product, link.transfer, link.sequential, link.overlapped, link.control)
    times = Times(*(milliseconds(device, way) for way in ways))
    assert not int(link.arrivals.status), "no wait ran out"
    return {
        "link": LABEL,
        "shape": {"tokens": tokens, "in": width, "out": features, "parts": parts},
        "milliseconds": asdict(times),
        "efficiency": times.efficiency,
        "control_efficiency": times.control_efficiency,
    }


def problem(found: dict[str, Any]) -> str:
    """Why a measurement says nothing; "" if it does."""
    hidden = found.get("control_efficiency", 0.0)
    return str(found.get("error") or f"the control hid {hidden:.2f} of what could be hidden" * (hidden > 0.2))
