"""Describes a plan in words, in the style of Megatron's documentation, and draws it as SVG.

The SVG has one map of nodes and GPUs for each kind of group, one colour for each group.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from tpkernels.groups import sizes as check
from tpkernels.groups.kinds import GroupKind, Groups, Ranks

WORDS: dict[GroupKind, tuple[str, str]] = {  # a kind's name, and what its ranks share
    "dp": ("data_parallel", "the same weights on these ranks, other samples"),
    "tp": ("tensor model-parallel", "one layer's weights are split over these ranks"),
    "pp": ("pipeline model-parallel", "the layers are split over these ranks"),
    "cp": ("context_parallel", "one sequence is split over these ranks"),
    "dp_cp": ("data_parallel with context", "gradients of ordinary weights are summed here"),
    "ep": ("expert model-parallel", "one layer's experts are spread over these ranks"),
    "expert_dp": ("expert data_parallel", "gradients of experts are summed here"),
    "embedding": ("embedding", "stages that hold the word embedding"),
    "position_embedding": ("position embedding", "stages that hold the position embedding"),
    "model": ("whole-model replica", "these ranks together hold one whole model"),
}
Size = tuple[int, int]
Unit = Literal["GPU", "rank"]  # the word for a position in the world: a rank on a CPU is no GPU
LINE_WIDTH = 96
MAX_MEMBERS = 16  # a longer group is shown by its first ranks and its last


def shown_kinds(plan: Groups) -> list[GroupKind]:
    """Return the kinds to show: always data, tensor and pipeline, others if their size is above 1."""
    kinds: list[GroupKind] = ["dp", "tp", "pp"]
    if plan.context > 1:
        kinds += ["cp", "dp_cp"]
    if plan.expert > 1:
        kinds += ["ep", "expert_dp"]
    if plan.pipeline > 1:
        kinds += ["embedding"]
    if plan.pipeline > 1 and plan.split_rank is not None:
        kinds += ["position_embedding"]
    return kinds


def headline(plan: Groups) -> str:
    """Format the world's size and parallel sizes as one line."""
    sizes = [f"tensor {plan.tensor}", f"data {plan.data}", f"pipeline {plan.pipeline}"]
    if plan.context > 1:
        sizes.insert(1, f"context {plan.context}")
    text = f"world size {plan.world_size} = " + " x ".join(sizes)
    if plan.expert > 1:
        text += f", experts over {plan.expert}"
    if plan.virtual_pipeline is not None:
        text += f", {plan.virtual_pipeline} virtual stages on each rank"
    if plan.split_rank is not None:
        text += f", decoder from stage {plan.split_rank}"
    return f"{text}  (order {'-'.join(plan.order)})"


def group_text(ranks: Ranks, unit: Unit = "GPU") -> str:
    """Format a group's ranks as "[g0, g2]", shortened in the middle if there are many."""
    return "[" + ", ".join(_shortened(ranks, unit[0].lower())) + "]"


def describe(plan: Groups, *, max_groups: int, unit: Unit) -> str:
    """Describe the groups of each shown kind, and the ranks of each replica of the model."""
    lines = [headline(plan), ""]
    for kind in shown_kinds(plan):
        count = plan.count_groups(kind)
        shown = [group_text(ranks, unit) for ranks in plan.first_groups(kind, max_groups)]
        if count > max_groups:
            shown.append(f"... and {count - max_groups} more")
        lines.append(f"{count} {WORDS[kind][0]} group{'s' * (count != 1)}:")
        lines += _wrap(shown)
    count = plan.count_groups("model")
    lines += ["", f"{count} full model{'s' * (count != 1)} partitioned over {plan.world_size} {unit}s:"]
    for i, ranks in enumerate(plan.first_groups("model", max_groups)):
        lines.append(f"    model {i} is partitioned into {unit.lower()}s {','.join(_shortened(ranks))}")
    if count > max_groups:
        lines.append(f"    ... and {count - max_groups} more")
    return "\n".join(lines)


def describe_rank(plan: Groups, rank: int) -> str:
    """Describe the position of one rank in each kind of group."""
    width = max(len(WORDS[kind][0]) for kind in shown_kinds(plan))
    lines = [f"rank {rank} of {plan.world_size}"]
    for kind in shown_kinds(plan):
        if plan.is_member(rank, kind):
            ranks = plan.group_of(rank, kind)
            place = f"{plan.index_in(rank, kind)} of {len(ranks)} in {group_text(ranks)}"
        else:
            place = "not a member"
        lines.append(f"    {WORDS[kind][0]:<{width}}  {place}")
    return "\n".join(lines)


def _shortened(ranks: Ranks, prefix: str = "") -> list[str]:
    if len(ranks) <= MAX_MEMBERS:
        return [f"{prefix}{rank}" for rank in ranks]
    return [*_shortened(ranks[: MAX_MEMBERS - 2], prefix), "...", f"{prefix}{ranks[-1]}"]


def _wrap(parts: list[str]) -> list[str]:
    """Join texts by commas into indented lines."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > LINE_WIDTH:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    return [f"    {line}" for line in lines]


INK, QUIET, LINE = "#1c2530", "#5b6875", "#c9d1d9"
PAPER, CARD, NODE = "#eef1f4", "#ffffff", "#f6f8fa"
# Paul Tol's "light" scheme for colour-blind readers, indigo in place of olive; confusable fills lie apart.
SAFE_FILLS = ("#77aadd", "#ee8866", "#eedd88", "#5b5ea6", "#ffaabb", "#bbcc33", "#99ddff", "#44bb99")
# Saturation and lightness of more fills, in percent: three bands, as hues 8 golden angles apart are close.
BANDS = ((65, 82), (45, 33), (55, 66))
GOLDEN_ANGLE = 137.508  # degrees
MARGIN, PANEL_GAP, PADDING, TITLE = 24, 16, 16, 46
TILE_HEIGHT, TILE_GAP = 34, 4
NODE_TITLE, NODE_PADDING, NODE_GAP = 18, 8, 10
LEGEND_ROW, LEGEND_ROWS = 21, 8
BOLD_FROM = 15  # sizes of titles
MAX_WIDTH = 1800  # a row takes fewer panels rather than grow wider


@dataclass(frozen=True)
class _Lattice:
    """A grid of equal cells, with gaps between them."""

    count: int
    columns: int
    width: int
    height: int
    gap: int

    @property
    def size(self) -> Size:
        x, y = self.at(self.columns * -(-self.count // self.columns) - 1)
        return x + self.width, y + self.height

    def at(self, cell: int) -> Size:
        row, column = divmod(cell, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)


@dataclass(frozen=True)
class _Map:
    """The drawn ranks, and the lattices of their tiles and nodes."""

    ranks: range
    tiles: _Lattice
    nodes: _Lattice
    unit: Unit

    def name(self, rank: int) -> str:
        return f"{self.unit[0].lower()}{rank}"


def to_svg(plan: Groups, *, gpus_per_node: int, max_nodes: int, unit: Unit) -> str:
    """Draw the groups of the first `max_nodes` nodes as a self-contained SVG document."""
    per_node = min(plan.world_size, check.positive(gpus_per_node, "gpus_per_node"))
    all_nodes = -(-plan.world_size // per_node)
    drawn = min(all_nodes, check.positive(max_nodes, "max_nodes"))
    ranks = range(min(plan.world_size, drawn * per_node))
    tile = max(38, _width_of(f"g{ranks[-1]}", 12) + 8)
    tiles = _Lattice(per_node, _columns(per_node), tile, TILE_HEIGHT, TILE_GAP)
    width = max(tiles.size[0], _width_of(f"node {drawn}", 11)) + 2 * NODE_PADDING
    height = tiles.size[1] + 2 * NODE_PADDING + NODE_TITLE
    world = _Map(ranks, tiles, _Lattice(drawn, _columns(drawn), width, height, NODE_GAP), unit)
    note = f"first {drawn:,} of " * (drawn < all_nodes) + _counted(all_nodes, "node")
    note += f", {_counted(per_node, unit)} per node; the small number on a {unit} is its group"

    kinds: list[GroupKind] = [*shown_kinds(plan), "model"]
    titles = [_width_of(_title(plan, kind, unit), 15) for kind in kinds]
    inner = max(world.nodes.size[0], _width_of("x" * 64, 12), *titles)  # no purpose is longer
    card = inner + 2 * PADDING
    columns = max(1, min(_columns(len(kinds)), MAX_WIDTH // card))
    height = TITLE + world.nodes.size[1] + LEGEND_ROW * (LEGEND_ROWS + 1) + 2 * PADDING
    cards = _Lattice(len(kinds), columns, card, height, PANEL_GAP)
    header = textwrap.wrap(headline(plan), cards.size[0] // _width_of("x", 18), break_on_hyphens=False)
    top = MARGIN + 24 * len(header) + 30
    width, height = cards.size[0] + 2 * MARGIN, top + cards.size[1] + MARGIN
    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}")
    svg.attrib |= {"width": str(width), "height": str(height), "font-family": "system-ui, sans-serif"}
    ET.SubElement(svg, "title").text = headline(plan)
    _rect(svg, (width, height), fill=PAPER, radius=0)
    for i, line in enumerate(header):
        _text(svg, MARGIN, MARGIN + 14 + 24 * i, line, size=18)
    _text(svg, MARGIN, top - 18, note, size=13, fill=QUIET)
    for kind, (x, y) in zip(kinds, map(cards.at, range(len(kinds))), strict=True):
        panel = _at(svg, MARGIN + x, top + y)
        _rect(panel, (card, cards.height), fill=CARD, stroke=LINE, radius=10)
        _draw_panel(_at(panel, PADDING, PADDING), plan, kind, world, inner)
    ET.indent(svg, " ")
    return ET.tostring(svg, encoding="unicode") + "\n"


def _draw_panel(panel: ET.Element, plan: Groups, kind: GroupKind, world: _Map, width: int) -> None:
    """Draw the map of one kind's groups, and a legend of the first."""
    groups: list[Ranks] = []
    group_at: dict[int, int] = {}
    for rank in world.ranks:
        if rank not in group_at and plan.is_member(rank, kind):
            groups.append(plan.group_of(rank, kind))
            group_at |= dict.fromkeys(groups[-1], len(groups) - 1)
    fills = _fills(len(groups))
    purpose = WORDS[kind][1] + ", experts aside" * (kind == "model" and plan.expert > 1)
    purpose += "; others outlined" * any(rank not in group_at for rank in world.ranks)
    _text(panel, 0, 13, _title(plan, kind, world.unit), size=15)
    _text(panel, 0, 32, purpose, size=12, fill=QUIET)

    size = (world.tiles.width, world.tiles.height)
    for node in range(world.nodes.count):
        x, y = world.nodes.at(node)
        place = _at(panel, x, TITLE + y)
        _rect(place, (world.nodes.width, world.nodes.height), fill=NODE, stroke=LINE, radius=8)
        _text(place, NODE_PADDING, 18, f"node {node}", size=11, fill=QUIET)
        for rank in world.ranks[node * world.tiles.count : (node + 1) * world.tiles.count]:
            x, y = world.tiles.at(rank % world.tiles.count)
            tile = _at(place, NODE_PADDING + x, NODE_PADDING + NODE_TITLE + y)
            said, fill, ink, line = "in no group of this kind", "none", QUIET, LINE
            if rank in group_at:
                group = groups[group_at[rank]]
                said = f"group {group_text(group, world.unit)}, position {group.index(rank)}"
                (fill, ink), line = fills[group_at[rank]], "none"
            ET.SubElement(tile, "title").text = f"{world.name(rank)}: {said}"
            _rect(tile, size, fill=fill, stroke=line)
            _text(tile, size[0] // 2, 16, world.name(rank), size=12, fill=ink, centred=True)
            if rank in group_at:
                _text(tile, size[0] // 2, 28, str(group_at[rank]), size=9, fill=ink, centred=True)

    legend = _at(panel, 0, TITLE + world.nodes.size[1] + PADDING)
    for number, ranks in enumerate(groups[:LEGEND_ROWS]):
        fill, ink = fills[number]
        row = _at(legend, 0, LEGEND_ROW * number)
        _rect(row, (24, 15), fill=fill, radius=3)
        _text(row, 12, 11, str(number), size=9, fill=ink, centred=True)
        fits = (width - 30) // _width_of("x", 12)
        text = textwrap.shorten(group_text(ranks, world.unit), fits, placeholder=" ...]")
        _text(row, 30, 12, text, size=12)
    if (more := plan.count_groups(kind) - LEGEND_ROWS) > 0:
        _text(legend, 0, 12 + LEGEND_ROW * LEGEND_ROWS, f"... and {more:,} more", size=12, fill=QUIET)


def _title(plan: Groups, kind: GroupKind, unit: Unit) -> str:
    # the first rank is in a group of every kind, and the other groups of a kind are as large as its own
    size, name = len(plan.group_of(0, kind)), WORDS[kind][0].replace("_", "-") + " group" * (kind != "model")
    return f"{_counted(plan.count_groups(kind), name)} of {_counted(size, unit)}"


def _fills(count: int) -> list[tuple[str, str]]:
    """Return a fill for each group, with the colour of its text."""
    if count <= len(SAFE_FILLS):
        return [(fill, "#ffffff" if fill == "#5b5ea6" else INK) for fill in SAFE_FILLS]
    hues = [(i * GOLDEN_ANGLE % 360, *BANDS[i % len(BANDS)]) for i in range(count)]
    return [(f"hsl({hue:.1f},{s}%,{light}%)", "#ffffff" if light < 50 else INK) for hue, s, light in hues]


def _columns(count: int) -> int:
    """Return the columns of a full rectangle at most three times as wide as high, else of a square."""
    narrowest = math.ceil(math.sqrt(count))
    full = [n for n in range(narrowest, math.isqrt(3 * count) + 1) if count % n == 0]
    return full[0] if full else narrowest


def _width_of(text: str, size: int) -> int:
    """Estimate an upper bound of a text's width, as in a wide font such as DejaVu Sans."""
    return math.ceil(len(text) * size * (0.64 if size >= BOLD_FROM else 0.58))


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _at(parent: ET.Element, x: int, y: int) -> ET.Element:
    return ET.SubElement(parent, "g", transform=f"translate({x} {y})")


def _rect(parent: ET.Element, size: Size, *, fill: str, stroke: str = "none", radius: int = 5) -> None:
    width, height = map(str, size)
    ET.SubElement(parent, "rect", width=width, height=height, rx=str(radius), fill=fill, stroke=stroke)


def _text(
    parent: ET.Element, x: int, y: int, text: str, *, size: int, fill: str = INK, centred: bool = False
) -> None:
    element = ET.SubElement(parent, "text", x=str(x), y=str(y), fill=fill)
    element.set("font-size", str(size))
    element.set("font-weight", "600" if size >= BOLD_FROM else "400")
    element.set("text-anchor", "middle" if centred else "start")
    element.text = text
