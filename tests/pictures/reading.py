"""What a picture's SVG says: its shapes, its words, and what lies outside of its sheet."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from tpkernels.pictures.svg import width_of

SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + tag))


def words(svg: str) -> list[str]:
    return [element.text or "" for element in shapes(svg, "text")]


def hinted(svg: str, tag: str) -> dict[str, ElementTree.Element]:
    """Shapes by what is shown to who points at them."""
    found = {shape.findtext(f"{SVG}title"): shape for shape in shapes(svg, tag)}
    return {hint: shape for hint, shape in found.items() if hint}


def outside(svg: str) -> list[str]:
    """Shapes and words that are cut by the edge of the sheet."""
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.get("viewBox").split())
    return [
        ElementTree.tostring(element, encoding="unicode")
        for element in root.iter()
        for left, top, right, bottom in _boxes(element)
        if left < -0.05 or top < -0.05 or right > width + 0.05 or bottom > height + 0.05
    ]


def _boxes(element: ElementTree.Element) -> Iterator[tuple[float, float, float, float]]:
    tag, number = element.tag.removeprefix(SVG), lambda name: float(element.get(name, "0"))
    if tag == "rect":
        x, y = number("x"), number("y")
        yield x, y, x + number("width"), y + number("height")
    elif tag == "line":
        yield number("x1"), number("y1"), number("x2"), number("y2")
    elif tag == "circle":
        x, y, r = number("cx"), number("cy"), number("r")
        yield x - r, y - r, x + r, y + r
    elif tag == "polyline":
        for point in element.get("points").split():
            x, y = map(float, point.split(","))
            yield x, y, x, y
    elif tag == "text":
        size = number("font-size")
        # Pillow's letters; `width_of` leaves room for wider ones
        width = 0.9 * width_of(element.text or "", size, bold=element.get("font-weight") == "600")
        left = number("x") - {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor")] * width
        yield left, number("y") - size, left + width, number("y") + size / 4
