"""What a picture's SVG says: its words, and where the shapes lie that have a hint."""

from __future__ import annotations

import re
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"

Box = tuple[float, float, float, float]  # left, top, right, bottom


def words(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def hinted(svg: str) -> dict[str, Box]:
    """Shapes by what is shown to who points at them."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    found = {group.findtext(f"{SVG}title"): group for group in groups}
    return {hint: _box(group) for hint, group in found.items() if hint}


def fills(svg: str) -> dict[str, str]:
    """Their colours."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    found = {group.findtext(f"{SVG}title"): group for group in groups}
    styles = {hint: group.find(f".//{SVG}path").get("style", "") for hint, group in found.items() if hint}
    return {hint: re.search(r"fill: (#\w+)", style)[1] for hint, style in styles.items()}


def _box(group: ElementTree.Element) -> Box:
    dots = [(float(dot.get("x")), float(dot.get("y"))) for dot in group.iter(f"{SVG}use")]
    if not dots:
        numbers = list(map(float, re.findall(r"-?[\d.]+(?:e-?\d+)?", group.find(f"{SVG}path").get("d"))))
        dots = list(zip(numbers[::2], numbers[1::2], strict=True))
    xs, ys = zip(*dots, strict=True)
    return min(xs), min(ys), max(xs), max(ys)
