"""Shapes and words, as SVG. `png` turns what can be drawn here into pixels, and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal
from xml.etree import ElementTree as ET

INK, QUIET, GRID, PAPER = "#1c2530", "#5b6875", "#e1e5ea", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET, GREY = "#2f6fb5", "#d9822b", "#3c8d5a", "#7a5195", "#a3adb8"
FONT = "system-ui, Helvetica, Arial, sans-serif"

Anchor = Literal["start", "middle", "end"]

# XML has no way to write these, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Picture:
    """A white sheet that is drawn on; lengths are in pixels, downwards from the upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """title: what somebody who cannot see the picture is told"""
        self.width, self.height = math.ceil(width), math.ceil(height)
        size = {"width": str(self.width), "height": str(self.height)}
        box = {"viewBox": f"0 0 {self.width} {self.height}", **size, "font-family": FONT}
        self._root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **box})
        ET.SubElement(self._root, "title").text = writable(title)
        self.rect(0, 0, self.width, self.height, fill=PAPER)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        radius: float = 0,
        hint: str = "",
    ) -> None:
        """hint: what is shown to who points at it"""
        sides = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        self._add("rect", sides, hint, fill=fill)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID, width: float = 1
    ) -> None:
        self._add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke-width": width}, stroke=stroke)

    def path_through(
        self, points: Iterable[tuple[float, float]], *, stroke: str = BLUE, width: float = 2
    ) -> None:
        corners = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        self._add("polyline", {"stroke-width": width}, points=corners, stroke=stroke, fill="none")

    def circle(self, x: float, y: float, radius: float, *, fill: str, hint: str = "") -> None:
        """With a rim of paper, which parts it from others that it lies on."""
        sides = {"cx": x, "cy": y, "r": radius, "stroke-width": 1}
        self._add("circle", sides, hint, fill=fill, stroke=PAPER)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: Anchor = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """y: of the line that letters stand on"""
        style = {"font-weight": "600"} if bold else {}
        element = self._add("text", {"x": x, "y": y, "font-size": size}, fill=fill, **style)
        element.set("text-anchor", anchor)
        element.text = writable(text)

    def legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """entries: colours and what they stand for, one after the other from `x` on"""
        for fill, text in entries:
            self.rect(x, y - 10, 12, 12, fill=fill, radius=2)
            self.text(x + 18, y, text, fill=QUIET)
            x += 18 + width_of(text, 12) + 14

    def to_svg(self) -> str:
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, numbers: dict[str, float], hint: str = "", **words: str) -> ET.Element:
        given = {name: _short(value) for name, value in numbers.items()}
        element = ET.SubElement(self._root, tag, given | words)
        if hint:
            ET.SubElement(element, "title").text = writable(hint)
        element.tail = "\n"
        return element


def legend_width(texts: Iterable[str]) -> float:
    """Of the legend with these texts."""
    return sum(18 + width_of(text, 12) + 14 for text in texts)


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """A guess on the safe side, as wide fonts such as DejaVu Sans take it."""
    return len(text) * size * (0.64 if bold else 0.58)


def shortened(text: str, size: float, width: float, *, bold: bool = False) -> str:
    """`text` where it fits into `width`, else its two ends: names often differ in the last word."""
    fitting = int(width / width_of("x", size, bold=bold))
    if len(text) <= fitting:
        return text
    kept = max(fitting - 3, 2)
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def writable(text: str) -> str:
    """`text` without the control characters that no XML may hold."""
    return _UNWRITABLE.sub("\ufffd", text)


def _short(value: float) -> str:
    """In tenths of a pixel."""
    assert math.isfinite(value), "who draws leaves out what is no number"
    return f"{value:.1f}".removesuffix(".0")
