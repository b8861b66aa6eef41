"""Our own SVG as a PNG. Pillow draws, where it is installed; it need not be.

What `svg` and `topology.svg` write is understood, and nothing else: an element or attribute that is not in
`_DRAWN` is an error, so that no picture loses a part in silence. Pillow's own font, which every installation
has, knows the letters of English.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

FEW = 4  # files that are named one by one
SCALE = 2  # pixels of the PNG to one of the SVG
FINER = 2  # each of them is drawn as so many squared, and averaged
MOST_PIXELS = 120e6  # of what is drawn: 360 MB
NO_PILLOW = "no PNG: expected Pillow 11.1 or newer, with FreeType; pip install pillow"

_SVG = "{http://www.w3.org/2000/svg}"
_PAINT = {"fill", "stroke", "stroke-width"}
_DRAWN: dict[str, set[str]] = {
    "svg": {"viewBox", "width", "height", "font-family"},
    "title": set(),
    "g": {"transform"},
    "rect": {"x", "y", "width", "height", "rx", "fill", "stroke"},
    "line": {"x1", "y1", "x2", "y2", "stroke", "stroke-width"},
    "polyline": {"points", *_PAINT},
    "circle": {"cx", "cy", "r", *_PAINT},
    "text": {"x", "y", "fill", "font-size", "font-weight", "text-anchor"},
}
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
_MOVE = re.compile(r"translate\((-?[\d.]+)[ ,](-?[\d.]+)\)")


class NoPillow(RuntimeError):
    """Pillow is not installed, is too old, or cannot write."""

    def __init__(self) -> None:
        super().__init__(NO_PILLOW)


def save(pictures: Mapping[Path, str]) -> str:
    """Write each SVG as the PNG of that path; returns a line about what was written, or why nothing was."""
    try:
        drawn = {path: to_png(svg) for path, svg in pictures.items()}
    except NoPillow as error:
        return str(error)
    for path, png in drawn.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png)
    if len(drawn) <= FEW:
        return ", ".join(str(path) for path in drawn) or "none"
    return f"{len(drawn)} in {', '.join(dict.fromkeys(str(path.parent) for path in drawn))}"


def to_png(svg: str) -> bytes:
    """The picture at twice its size; the same bytes for the same picture."""
    root = ET.fromstring(svg)
    _require_known(root)
    try:
        from PIL import Image, ImageDraw, ImageFont

        ImageFont.load_default(12.0).getmask("bold", stroke_width=0.5)
    except (ImportError, TypeError):  # absent or without FreeType; older than sizes and such strokes
        raise NoPillow from None
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    finer = FINER if width * height * (SCALE * FINER) ** 2 <= MOST_PIXELS else 1
    scale = SCALE * finer
    image = Image.new("RGB", (width * scale, height * scale), "#ffffff")
    _Pen(ImageDraw.Draw(image), scale).draw(root, 0, 0)
    file = io.BytesIO()
    image.reduce(finer).save(file, "PNG")
    return file.getvalue()


def _require_known(root: ET.Element) -> None:
    """That every element and every attribute is one that is drawn."""
    for element in root.iter():
        tag = element.tag.removeprefix(_SVG)
        if element.tag == tag or tag not in _DRAWN:
            raise ValueError(f"expected one of {', '.join(_DRAWN)} in a picture, got {element.tag}")
        if unknown := set(element.attrib) - _DRAWN[tag]:
            raise ValueError(f"{tag}: expected attributes of {sorted(_DRAWN[tag])}, got {sorted(unknown)}")
        move = element.get("transform", "translate(0 0)")
        if not _MOVE.fullmatch(move):
            raise ValueError(f"transform: expected translate(x y), got {move}")


class _Pen:
    """Draws elements on an image that is `scale` times as large as they say."""

    def __init__(self, draw: ImageDraw, scale: int) -> None:
        self._draw, self._scale = draw, scale

    def draw(self, element: ET.Element, left: float, top: float) -> None:
        """left, top: where the element's own zero is"""
        tag = element.tag.removeprefix(_SVG)
        if move := _MOVE.fullmatch(element.get("transform", "")):
            left, top = left + float(move[1]), top + float(move[2])
        if tag not in ("svg", "g", "title"):
            getattr(self, f"_{tag}")(element, left, top)
        for child in element:
            self.draw(child, left, top)

    def _rect(self, element: ET.Element, left: float, top: float) -> None:
        x, y, width, height = self._lengths(element, "x", "y", "width", "height")
        x, y = x + left * self._scale, y + top * self._scale
        stroke = _colour(element, "stroke")
        edge = self._scale // 2 if stroke else 0  # half of a stroke lies outside
        box = _pixels(x - edge, y - edge, x + width + edge, y + height + edge)
        (radius,) = self._lengths(element, "rx")
        self._draw.rounded_rectangle(
            box,
            min(radius, width / 2, height / 2),
            fill=_colour(element, "fill", "#000000"),
            outline=stroke,
            width=self._scale if stroke else 0,
        )

    def _line(self, element: ET.Element, left: float, top: float) -> None:
        ends = [element.attrib[name] for name in ("x1", "y1", "x2", "y2")]
        self._stroke(element, [(float(ends[0]), float(ends[1])), (float(ends[2]), float(ends[3]))], left, top)

    def _polyline(self, element: ET.Element, left: float, top: float) -> None:
        if element.get("fill") != "none":
            raise ValueError(f"polyline: expected one that is not filled, got {element.get('fill')}")
        pairs = [pair.split(",") for pair in element.attrib["points"].split()]
        self._stroke(element, [(float(x), float(y)) for x, y in pairs], left, top)

    def _stroke(
        self, element: ET.Element, corners: list[tuple[float, float]], left: float, top: float
    ) -> None:
        width = round(float(element.get("stroke-width", "1")) * self._scale)
        points = [((x + left) * self._scale - 0.5, (y + top) * self._scale - 0.5) for x, y in corners]
        self._draw.line(points, fill=_colour(element, "stroke"), width=width, joint="curve")

    def _circle(self, element: ET.Element, left: float, top: float) -> None:
        x, y, radius, edge = self._lengths(element, "cx", "cy", "r", "stroke-width")
        x, y = x + left * self._scale, y + top * self._scale
        stroke = _colour(element, "stroke")
        radius += edge / 2 if stroke else 0
        box = _pixels(x - radius, y - radius, x + radius, y + radius)
        fill = _colour(element, "fill", "#000000")
        self._draw.ellipse(box, fill=fill, outline=stroke, width=round(edge) if stroke else 0)

    def _text(self, element: ET.Element, left: float, top: float) -> None:
        x, y, size = self._lengths(element, "x", "y", "font-size")
        self._draw.text(
            (x + left * self._scale, y + top * self._scale),
            element.text or "",
            fill=_colour(element, "fill", "#000000"),
            font=_font(size),
            anchor=_ANCHORS[element.get("text-anchor", "start")],
            stroke_width=size / 45 if element.get("font-weight") == "600" else 0,  # the font has no bold
        )

    def _lengths(self, element: ET.Element, *names: str) -> list[float]:
        return [float(element.get(name, "0")) * self._scale for name in names]


@cache
def _font(size: float) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)


def _colour(element: ET.Element, name: str, default: str | None = None) -> str | None:
    colour = element.get(name, default)
    return None if colour == "none" else colour


def _pixels(x1: float, y1: float, x2: float, y2: float) -> tuple[int, int, int, int]:
    """The first and the last pixels of a box, as Pillow counts them; at least one."""
    left, top = round(x1), round(y1)
    return left, top, max(round(x2) - 1, left), max(round(y2) - 1, top)
