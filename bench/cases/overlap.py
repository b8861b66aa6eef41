"""How much of a transfer hides behind the product that waits for it, on one GPU: an emulated link.

    python -m bench.cases.overlap --json out/gpu/overlap.json

Half of x is here, the other half comes from pinned memory of the host, by a copy engine over PCIe, part by
part, each with a flag after it. A copy inside the GPU would take processors, which NVLink does not. PCIe is
slower than NVLink: of each part only as many rows are really copied as make the transfer a given part of the
product's time.

Times are the product's alone, the transfer's alone, one after the other, at once, and a control, whose flags
all rise after the last copy: it has to hide nothing, or the run fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

LABEL = "emulated link"


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


def why_not() -> str | None:
    return None if torch.cuda.is_available() else "an emulated link needs a CUDA device, and there is none"


class EmulatedLink:
    """A gathered product whose second half comes from the host."""

    def __init__(self, tokens: int, width: int, features: int, parts: int) -> None:
        from tpkernels.kernels.waits import Arrivals

        self.parts, self.part_rows = parts, tokens // 2 // parts
        self.copied = self.part_rows
        self.x = torch.randn(tokens, width, device="cuda").bfloat16()
        self.weight = torch.randn(features, width, device="cuda").bfloat16()
        self.host = torch.randn(tokens // 2, width).bfloat16().pin_memory()
        self.side = torch.cuda.Stream(priority=-1)
        sizes = (2 * parts, 1, 1)
        flags, awaited, status = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)
        self.arrivals = Arrivals(flags, awaited, status, spin_limit=2**22)

    def begin(self) -> None:
        """The next call, whose own rows are here."""
        self.arrivals.awaited.add_(1)
        self.side.wait_stream(torch.cuda.current_stream())

    def raise_own(self) -> None:
        self.arrivals.flags[: self.parts].copy_(self.arrivals.awaited.expand(self.parts))

    def push(self, *, flags: bool = True) -> None:
        """Part by part, each before its flag."""
        half = self.parts * self.part_rows
        with torch.cuda.stream(self.side):
            for part in range(self.parts):
                start = part * self.part_rows
                rows = slice(half + start, half + start + self.copied)
                self.x[rows].copy_(self.host[start : start + self.copied], non_blocking=True)
                if flags:
                    flag = self.parts + part
                    self.arrivals.flags[flag : flag + 1].copy_(self.arrivals.awaited)

    def multiply(self) -> None:
        from tpkernels.kernels.linear import linear_fwd

        linear_fwd(self.x, self.weight, arrivals=self.arrivals, first_row=0, margin=4)

    def product(self) -> None:
        self.begin()
        self.arrivals.flags.copy_(self.arrivals.awaited.expand(2 * self.parts))
        self.multiply()

    def transfer(self) -> None:
        self.begin()
        self.push()
        torch.cuda.current_stream().wait_stream(self.side)

    def sequential(self) -> None:
        self.begin()
        self.raise_own()
        self.push()
        torch.cuda.current_stream().wait_stream(self.side)
        self.multiply()

    def overlapped(self) -> None:
        self.begin()
        self.raise_own()
        self.push()
        self.multiply()
        torch.cuda.current_stream().wait_stream(self.side)

    def control(self) -> None:
        """Every flag, of the own rows too, after the last copy."""
        self.begin()
        self.push(flags=False)
        with torch.cuda.stream(self.side):
            self.arrivals.flags.copy_(self.arrivals.awaited.expand(2 * self.parts))
        self.multiply()
        torch.cuda.current_stream().wait_stream(self.side)


def milliseconds(way: Callable[[], object], rounds: int = 15) -> float:
    """The median of some calls, each between two events."""
    found: list[float] = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def measure(tokens: int, width: int, features: int, parts: int, ratio: float) -> dict[str, Any]:
    """ratio: the transfer in parts of the product's time, as near as PCIe allows"""
    link = EmulatedLink(tokens, width, features, parts)
    for way in (link.product, link.transfer, link.sequential, link.overlapped, link.control):
        way()  # kernels are loaded before anything waits in earnest
    torch.cuda.synchronize()
    if int(link.arrivals.status):
        return {"link": LABEL, "error": "copies do not proceed beside a kernel that waits: nothing was timed"}
    product = milliseconds(link.product)
    link.copied = rows_to_copy(link.part_rows, ratio * product, milliseconds(link.transfer))
    ways = (link.product, link.transfer, link.sequential, link.overlapped, link.control)
    times = Times(*(milliseconds(way) for way in ways))
    assert not int(link.arrivals.status), "no wait ran out"
    return {
        "link": LABEL,
        "gpu": torch.cuda.get_device_name(),
        "shape": {"tokens": tokens, "in": width, "out": features, "parts": parts},
        "milliseconds": asdict(times),
        "efficiency": times.efficiency,
        "control_efficiency": times.control_efficiency,
    }


def problems(results: list[dict[str, Any]]) -> list[str]:
    """Why the results say nothing."""
    found = [str(result["error"]) for result in results if "error" in result]
    shares = [result["control_efficiency"] for result in results if "error" not in result]
    return found + [f"the control hid {share:.2f} of what could be hidden" for share in shares if share > 0.2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results into this file")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    results = [measure(8192, 4096, 8192, parts, ratio) for parts in (2, 4, 8) for ratio in (0.3, 1.0)]
    text = json.dumps(results, indent=1)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    print(text)
    if found := problems(results):
        parser.exit(1, "\n".join(found) + "\n")


if __name__ == "__main__":
    main()
