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

NAMES: dict[GroupKind, str] = {
    "dp": "data_parallel",
    "tp": "tensor model-parallel",
    "pp": "pipeline model-parallel",
    "cp": "context_parallel",
    "dp_cp": "data_parallel with context",
    "ep": "expert model-parallel",
    "expert_dp": "expert data_parallel",
    "embedding": "embedding",
    "position_embedding": "position embedding",
}
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
        if plan.split_rank is not None:
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


def name_of(rank: int, unit: Unit) -> str:
    """Return the short name of a rank.

    >>> name_of(3, "GPU"), name_of(3, "rank")
    ('g3', 'r3')
    """
    return f"{unit[0].lower()}{rank}"


def group_text(ranks: Ranks, unit: Unit = "GPU") -> str:
    """Format a group's ranks as "[g0, g2]", shortened in the middle if there are many."""
    return "[" + ", ".join(_shortened(ranks, name_of(0, unit)[:-1])) + "]"


def describe(plan: Groups, *, max_groups: int, unit: Unit) -> str:
    """Describe the groups of each shown kind, and the ranks of each replica of the model."""
    lines = [headline(plan), ""]
    for kind in shown_kinds(plan):
        count = plan.count_groups(kind)
        shown = [group_text(ranks, unit) for ranks in plan.first_groups(kind, max_groups)]
        if count > max_groups:
            shown.append(f"... and {count - max_groups} more")
        lines.append(f"{count} {NAMES[kind]} group{'s' * (count != 1)}:")
        lines += _wrap(shown)
    count = plan.count_groups("model")
    lines += [
        "",
        f"{count} full model{'s' * (count != 1)} partitioned over {plan.world_size} {unit}s:",
    ]
    lines += [
        f"    model {i} is partitioned into {unit.lower()}s {','.join(_shortened(ranks))}"
        for i, ranks in enumerate(plan.first_groups("model", max_groups))
    ]
    if count > max_groups:
        lines.append(f"    ... and {count - max_groups} more")
    return "\n".join(lines)


def describe_rank(plan: Groups, rank: int) -> str:
    """Describe the position of one rank in each kind of group."""
    width = max(len(NAMES[kind]) for kind in shown_kinds(plan))
    lines = [f"rank {rank} of {plan.world_size}"]
    for kind in shown_kinds(plan):
        if plan.is_member(rank, kind):
            ranks = plan.group_of(rank, kind)
            place = f"{plan.index_in(rank, kind)} of {len(ranks)} in {group_text(ranks)}"
        else:
            place = "not a member"
        lines.append(f"    {NAMES[kind]:<{width}}  {place}")
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


PURPOSES: dict[GroupKind, str] = {
    "tp": "one layer's weights are split over these ranks",
    "cp": "one sequence is split over these ranks",
    "ep": "one layer's experts are spread over these ranks",
    "dp": "the same weights on these ranks, other samples",
    "pp": "the layers are split over these ranks",
    "model": "these ranks together hold one whole model",
    "dp_cp": "gradients of ordinary weights are summed here",
    "expert_dp": "gradients of experts are summed here",
    "embedding": "stages that hold the word embedding",
    "position_embedding": "stages that hold the position embedding",
}

# Paul Tol's "light" scheme for cells with text and for colour-blind readers, with indigo in place of olive;
# ordered so that fills that some readers confuse, such as pink and mint, are not neighbours.
SAFE_FILLS = ("#77aadd", "#ee8866", "#eedd88", "#5b5ea6", "#ffaabb", "#bbcc33", "#99ddff", "#44bb99")
# Lightness and chroma of more fills. Three bands, because hues 8 golden angles apart are close, and
# groups 8 apart often have the same position on neighbouring nodes.
BANDS = ((0.86, 0.08), (0.47, 0.11), (0.70, 0.12))
GOLDEN_ANGLE = math.radians(137.508)

Size = tuple[int, int]

INK, QUIET, LINE = "#1c2530", "#5b6875", "#c9d1d9"
PAPER, CARD, NODE, SLOT = "#eef1f4", "#ffffff", "#f6f8fa", "#e9edf1"

MARGIN, PANEL_GAP, PADDING = 24, 16, 16
TILE_HEIGHT, TILE_GAP = 34, 4
NODE_TITLE, NODE_PADDING, NODE_GAP = 18, 8, 10
PANEL_TITLE, LEGEND_TOP = 46, 16
SWATCH, SWATCH_HEIGHT, LEGEND_GAP, LEGEND_ROWS = 24, 15, 6, 8
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

    def at(self, cell: int) -> tuple[int, int]:
        row, column = divmod(cell, self.columns)
        return column * (self.width + self.gap), row * (self.height + self.gap)


@dataclass(frozen=True)
class _DrawnNodes:
    """The drawn nodes, and the GPUs in each."""

    ranks: range
    tiles: _Lattice
    nodes: _Lattice
    note: str
    unit: Unit


@dataclass(frozen=True)
class _DrawnGroup:
    ranks: Ranks
    text: str
    fill: str
    ink: str


@dataclass(frozen=True)
class _Panel:
    """The groups of one kind that have a rank on the map, by first rank."""

    title: str
    purpose: str
    total: int
    unit: Unit
    groups: list[_DrawnGroup]
    group_at: dict[int, int]


def to_svg(plan: Groups, *, gpus_per_node: int, max_nodes: int, unit: Unit) -> str:
    """Draw the groups of the first `max_nodes` nodes as a self-contained SVG document."""
    machine = _drawn_nodes(
        plan.world_size,
        gpus_per_node=check.positive(gpus_per_node, "gpus_per_node"),
        max_nodes=check.positive(max_nodes, "max_nodes"),
        unit=unit,
    )
    kinds: list[GroupKind] = [*shown_kinds(plan), "model"]
    panels = [_panel(plan, kind, machine) for kind in kinds]
    cards = _cards(panels, machine)
    width = cards.size[0] + 2 * MARGIN
    columns = cards.size[0] // _width_of("x", 18, bold=True)
    header = textwrap.wrap(headline(plan), columns, break_on_hyphens=False)
    top = MARGIN + 24 * len(header) + 30
    height = top + cards.size[1] + MARGIN

    svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}")
    svg.attrib |= {"width": str(width), "height": str(height), "font-family": "system-ui, sans-serif"}
    ET.SubElement(svg, "title").text = headline(plan)
    _rect(svg, (width, height), fill=PAPER, radius=0)
    for i, line in enumerate(header):
        _text(svg, MARGIN, MARGIN + 14 + 24 * i, line, size=18, bold=True)
    _text(svg, MARGIN, top - 18, machine.note, size=13, fill=QUIET)
    for i, panel in enumerate(panels):
        x, y = cards.at(i)
        _draw_panel(_at(svg, MARGIN + x, top + y), panel, machine, (cards.width, cards.height))
    ET.indent(svg, " ")
    return ET.tostring(svg, encoding="unicode") + "\n"


def _drawn_nodes(world_size: int, *, gpus_per_node: int, max_nodes: int, unit: Unit) -> _DrawnNodes:
    nodes = -(-world_size // gpus_per_node)
    drawn = min(nodes, max_nodes)
    ranks = range(min(world_size, drawn * gpus_per_node))
    slots = min(world_size, gpus_per_node)
    tile_width = max(38, _width_of(name_of(ranks[-1], unit), 12, bold=True) + 8)
    tiles = _Lattice(slots, _columns(slots), tile_width, TILE_HEIGHT, TILE_GAP)
    width = max(tiles.size[0], _width_of(f"node {drawn - 1}", 11)) + 2 * NODE_PADDING
    height = tiles.size[1] + 2 * NODE_PADDING + NODE_TITLE
    note = f"{nodes:,} node{'s' * (nodes != 1)}" if nodes == drawn else f"first {drawn:,} of {nodes:,} nodes"
    note += f", {_counted(slots, unit)} per node; the small number on a {unit} is its group"
    return _DrawnNodes(ranks, tiles, _Lattice(drawn, _columns(drawn), width, height, NODE_GAP), note, unit)


def _panel(plan: Groups, kind: GroupKind, machine: _DrawnNodes) -> _Panel:
    # the first rank is in a group of every kind, and the other groups of a kind are as large as its own
    ranks, unit = machine.ranks, machine.unit
    size = len(plan.group_of(0, kind))
    total = plan.count_groups(kind)
    name = "whole-model replica" if kind == "model" else f"{NAMES[kind].replace('_', '-')} group"
    groups: list[Ranks] = []
    group_at: dict[int, int] = {}
    for rank in ranks:
        if rank not in group_at and plan.is_member(rank, kind):
            groups.append(plan.group_of(rank, kind))
            group_at |= dict.fromkeys(groups[-1], len(groups) - 1)
    purpose = PURPOSES[kind]
    if kind == "model" and plan.expert > 1:
        purpose += ", experts aside"
    if any(rank not in group_at for rank in ranks):
        purpose += "; others outlined"
    painted = [
        _DrawnGroup(members, group_text(members, unit), fill, _ink_on(fill))
        for members, fill in zip(groups, _fills(len(groups)), strict=True)
    ]
    title = f"{total:,} {name}{'s' * (total != 1)} of {_counted(size, unit)}"
    return _Panel(title, purpose, total, unit, painted, group_at)


def _cards(panels: list[_Panel], machine: _DrawnNodes) -> _Lattice:
    """Return the grid of panels, with cells as wide and high as the largest panel."""
    titles = [_width_of(panel.title, 15, bold=True) for panel in panels]
    purposes = [_width_of(panel.purpose, 12) for panel in panels]
    inner = max(machine.nodes.size[0], *titles, *purposes)
    legend = max(_legend(panel, inner)[0].size[1] for panel in panels)
    width = inner + 2 * PADDING
    height = PANEL_TITLE + machine.nodes.size[1] + LEGEND_TOP + legend + 2 * PADDING
    columns = max(1, min(_columns(len(panels)), MAX_WIDTH // width))
    return _Lattice(len(panels), columns, width, height, PANEL_GAP)


def _legend(panel: _Panel, width: int) -> tuple[_Lattice, list[str]]:
    """Return the cells of a legend and its groups' texts; the last row counts groups left out."""
    texts = [_fitting_text(group, width - SWATCH - 6, panel.unit) for group in panel.groups]
    cell = SWATCH + 6 + max(_width_of(text, 12) for text in texts)
    columns = max(1, (width + LEGEND_GAP) // (cell + LEGEND_GAP))
    texts = texts[: columns * LEGEND_ROWS]
    rows = -(-len(texts) // columns)
    columns = -(-len(texts) // rows)
    rows += len(texts) < panel.total
    cell = min(cell + 12, (width + LEGEND_GAP) // columns - LEGEND_GAP)
    return _Lattice(rows * columns, columns, cell, SWATCH_HEIGHT, LEGEND_GAP), texts


def _draw_panel(parent: ET.Element, panel: _Panel, machine: _DrawnNodes, size: Size) -> None:
    _rect(parent, size, fill=CARD, stroke=LINE, radius=10)
    inner = _at(parent, PADDING, PADDING)
    _text(inner, 0, 13, panel.title, size=15, bold=True)
    _text(inner, 0, 32, panel.purpose, size=12, fill=QUIET)
    for node in range(machine.nodes.count):
        x, y = machine.nodes.at(node)
        _draw_node(_at(inner, x, PANEL_TITLE + y), node, panel, machine)
    legend = _at(inner, 0, PANEL_TITLE + machine.nodes.size[1] + LEGEND_TOP)
    _draw_legend(legend, panel, size[0] - 2 * PADDING)


def _draw_node(parent: ET.Element, node: int, panel: _Panel, machine: _DrawnNodes) -> None:
    _rect(parent, (machine.nodes.width, machine.nodes.height), fill=NODE, stroke=LINE, radius=8)
    _text(parent, NODE_PADDING, 18, f"node {node}", size=11, fill=QUIET)
    size = (machine.tiles.width, machine.tiles.height)
    for slot in range(machine.tiles.count):
        x, y = machine.tiles.at(slot)
        tile = _at(parent, NODE_PADDING + x, NODE_PADDING + NODE_TITLE + y)
        rank = node * machine.tiles.count + slot
        if rank not in machine.ranks:
            _rect(tile, size, fill=SLOT)
        elif rank in panel.group_at:
            _draw_member(tile, rank, panel, size)
        else:
            _draw_outsider(tile, name_of(rank, machine.unit), size)


def _draw_member(tile: ET.Element, rank: int, panel: _Panel, size: Size) -> None:
    number = panel.group_at[rank]
    group = panel.groups[number]
    name = name_of(rank, panel.unit)
    ET.SubElement(tile, "title").text = f"{name}: group {group.text}, position {group.ranks.index(rank)}"
    _rect(tile, size, fill=group.fill)
    _text(tile, size[0] // 2, 16, name, size=12, fill=group.ink, bold=True, centred=True)
    _text(tile, size[0] // 2, 28, str(number), size=9, fill=group.ink, centred=True)


def _draw_outsider(tile: ET.Element, name: str, size: Size) -> None:
    ET.SubElement(tile, "title").text = f"{name}: in no group of this kind"
    _rect(tile, size, fill="none", stroke=LINE)
    _text(tile, size[0] // 2, 21, name, size=12, fill=QUIET, centred=True)


def _draw_legend(parent: ET.Element, panel: _Panel, width: int) -> None:
    cells, texts = _legend(panel, width)
    for number, text in enumerate(texts):
        group = panel.groups[number]
        entry = _at(parent, *cells.at(number))
        _rect(entry, (SWATCH, SWATCH_HEIGHT), fill=group.fill, radius=3)
        _text(entry, SWATCH // 2, 11, str(number), size=9, fill=group.ink, centred=True)
        _text(entry, SWATCH + 6, 12, text, size=12)
    if len(texts) < panel.total:
        rest = _at(parent, *cells.at(cells.count - cells.columns))
        _text(rest, 0, 12, f"... and {panel.total - len(texts):,} more", size=12, fill=QUIET)


def _columns(count: int) -> int:
    """Return the columns of a full rectangle at most three times as wide as high, else of a square."""
    narrowest = math.ceil(math.sqrt(count))
    full = [n for n in range(narrowest, math.isqrt(3 * count) + 1) if count % n == 0]
    return full[0] if full else narrowest


def _fills(count: int) -> list[str]:
    if count <= len(SAFE_FILLS):
        return list(SAFE_FILLS[:count])
    return [_oklch(*BANDS[i % len(BANDS)], hue=4.5 + i * GOLDEN_ANGLE) for i in range(count)]


def _oklch(lightness: float, chroma: float, *, hue: float) -> str:
    """Convert OKLCH to an sRGB fill; equal lightness looks equally light in each hue."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963 * a + 0.2158 * b) ** 3
    medium = (lightness - 0.1056 * a - 0.0639 * b) ** 3
    short = (lightness - 0.0895 * a - 1.2915 * b) ** 3
    linear = (
        4.0767 * long - 3.3077 * medium + 0.2310 * short,
        -1.2684 * long + 2.6098 * medium - 0.3413 * short,
        -0.0042 * long - 0.7034 * medium + 1.7076 * short,
    )
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, part)) ** (1 / 2.2)):02x}" for part in linear)


def _ink_on(fill: str) -> str:
    """Return the colour of text on a fill: white on dark fills, by WCAG's luminance."""
    red, green, blue = ((int(fill[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.2 else INK


def _fitting_text(group: _DrawnGroup, width: int, unit: Unit) -> str:
    """Format as many of a group's ranks as fit into `width`."""
    text = group.text
    kept = min(len(group.ranks), 16) - 2
    while _width_of(text, 12) > width and kept > 1:
        kept -= 1
        text = f"{group_text(group.ranks[:kept], unit)[:-1]}, ..., {name_of(group.ranks[-1], unit)}]"
    return text


def _width_of(text: str, size: int, *, bold: bool = False) -> int:
    """Estimate an upper bound of a text's width, as in a wide font such as DejaVu Sans."""
    return math.ceil(len(text) * size * (0.64 if bold else 0.58))


def _counted(count: int, unit: Unit) -> str:
    return f"{count:,} {unit}{'s' * (count != 1)}"


def _at(parent: ET.Element, x: int, y: int) -> ET.Element:
    return ET.SubElement(parent, "g", transform=f"translate({x} {y})")


def _rect(parent: ET.Element, size: Size, *, fill: str, stroke: str = "none", radius: int = 5) -> None:
    width, height = map(str, size)
    ET.SubElement(parent, "rect", width=width, height=height, rx=str(radius), fill=fill, stroke=stroke)


def _text(
    parent: ET.Element,
    x: int,
    y: int,
    text: str,
    *,
    size: int,
    fill: str = INK,
    bold: bool = False,
    centred: bool = False,
) -> None:
    element = ET.SubElement(parent, "text", x=str(x), y=str(y), fill=fill)
    element.set("font-size", str(size))
    if bold:
        element.set("font-weight", "600")
    if centred:
        element.set("text-anchor", "middle")
    element.text = text
