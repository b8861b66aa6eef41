"""The picture, read back from its XML."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest

from tests.products import once
from tpkernels.groups.draw import shown_kinds
from tpkernels.groups.plan import GroupKind, GroupPlan, plan_groups

SVG = "{http://www.w3.org/2000/svg}"
EM = 0.55  # an average character of a wide font, in font sizes

PLANS = {
    "canonical": plan_groups(world_size=16, tensor=2, pipeline=4),
    "one": plan_groups(world_size=1),
    "two": plan_groups(world_size=2),
    "tensor_only": plan_groups(world_size=8, tensor=8),
    "partly_filled": plan_groups(world_size=12, tensor=3, pipeline=2),
    "experts": plan_groups(world_size=16, tensor=2, context=2, expert=2, pipeline=2),
    "split": plan_groups(world_size=64, tensor=8, pipeline=4, split_rank=2),
    "all_lines": plan_groups(
        world_size=128, tensor=2, context=2, expert=4, pipeline=8, virtual_pipeline=2, split_rank=3
    ),
    "data_only": plan_groups(world_size=128),
    "pipeline_first": plan_groups(world_size=24, tensor=2, pipeline=3, order="pp-dp-tp-cp-ep"),
}
LARGE = plan_groups(world_size=131072, tensor=8, pipeline=16)
ALL = {**PLANS, "large": LARGE}

every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
every_plan_and_a_large_one = pytest.mark.parametrize("plan", ALL.values(), ids=ALL.keys())


@dataclass(frozen=True)
class Tile:
    tooltip: str
    fill: str
    ink: str


@cache
def panels_of(plan: GroupPlan, **how: int) -> dict[GroupKind, ET.Element]:
    kinds: list[GroupKind] = [*shown_kinds(plan), "model"]
    panels = ET.fromstring(plan.to_svg(**how)).findall(f"{SVG}g")
    return dict(zip(kinds, panels, strict=True))


def tiles_of(panel: ET.Element) -> dict[int, Tile]:
    tiles: dict[int, Tile] = {}
    for element in panel.iter(f"{SVG}g"):
        if element.find(f"{SVG}title") is not None:
            label = element.findtext(f"{SVG}text")
            rank = int(label.removeprefix("g"))
            assert rank not in tiles, f"g{rank} is drawn twice"
            fill, ink = element.find(f"{SVG}rect").get("fill"), element.find(f"{SVG}text").get("fill")
            tiles[rank] = Tile(element.findtext(f"{SVG}title"), fill, ink)
    return tiles


def texts_of(element: ET.Element) -> list[str]:
    return [text.text for text in element.iter(f"{SVG}text")]


def placed(element: ET.Element, x: float = 0, y: float = 0) -> Iterator[tuple[ET.Element, float, float]]:
    """Every rect and text with its place in the picture."""
    if shift := re.fullmatch(r"translate\((\d+) (\d+)\)", element.get("transform", "")):
        x, y = x + int(shift[1]), y + int(shift[2])
    if element.tag in (f"{SVG}rect", f"{SVG}text"):
        yield element, x + int(element.get("x", 0)), y + int(element.get("y", 0))
    for child in element:
        yield from placed(child, x, y)


def span_of(text: ET.Element, x: float) -> tuple[float, float]:
    """From where to where a text reaches, by its number of characters."""
    width = len(text.text) * int(text.get("font-size")) * EM
    left = x - width / 2 if text.get("text-anchor") == "middle" else x
    return left, left + width


def box_of(element: ET.Element, x: float, y: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a text or a rect."""
    if element.tag == f"{SVG}text":
        left, right = span_of(element, x)
        return left, y - int(element.get("font-size")), right, y
    return x, y, x + int(element.get("width")), y + int(element.get("height"))


def assert_first_holds_the_others(boxes: list[tuple[float, float, float, float]]) -> None:
    left, top, right, bottom = boxes[0]
    assert left <= min(box[0] for box in boxes)
    assert top <= min(box[1] for box in boxes)
    assert right >= max(box[2] for box in boxes)
    assert bottom >= max(box[3] for box in boxes)


@every_plan
def test_svg_shows_every_rank_once_and_a_fill_is_shared_exactly_within_a_group(plan: GroupPlan) -> None:
    for kind, panel in panels_of(plan).items():
        tiles = tiles_of(panel)
        assert sorted(tiles) == list(range(plan.world_size))
        outside = {rank for rank, tile in tiles.items() if tile.fill == "none"}
        assert outside == {rank for rank in range(plan.world_size) if not plan.is_member(rank, kind)}
        members = [rank for rank in tiles if plan.is_member(rank, kind)]
        for one, other in combinations(members, 2):
            together = other in plan.group_of(one, kind)
            assert (tiles[one].fill == tiles[other].fill) == together, (kind, one, other)


def test_embedding_panel_and_tooltips_name_groups_and_positions() -> None:
    tiles = tiles_of(panels_of(PLANS["canonical"])["embedding"])
    assert [rank for rank, tile in tiles.items() if tile.fill == "none"] == list(range(4, 12))
    assert tiles[4].tooltip == "g4: in no group of this kind"
    panels = panels_of(PLANS["canonical"])
    assert tiles_of(panels["tp"])[5].tooltip == "g5: group [g4, g5], position 1"
    assert tiles_of(panels["pp"])[4].tooltip == "g4: group [g0, g4, g8, g12], position 1"


def test_tile_number_finds_its_group_in_the_legend() -> None:
    plan = PLANS["canonical"]
    for kind, panel in panels_of(plan).items():
        texts = texts_of(panel)
        for number, ranks in enumerate(plan.groups[kind]):
            legend = "[" + ", ".join(f"g{rank}" for rank in ranks) + "]"
            assert texts[texts.index(legend) - 1] == str(number)
            for rank in ranks:
                assert texts[texts.index(f"g{rank}") + 1] == str(number)


@once(plan=ALL, gpus_per_node=[1, 3, 8, 72])
def test_nothing_reaches_out_of_its_panel_or_the_picture(plan: GroupPlan, gpus_per_node: int) -> None:
    svg = ET.fromstring(plan.to_svg(gpus_per_node=gpus_per_node))
    assert svg.get("viewBox") == f"0 0 {svg.get('width')} {svg.get('height')}"
    paper = svg.find(f"{SVG}rect")
    assert (paper.get("width"), paper.get("height")) == (svg.get("width"), svg.get("height"))
    assert_first_holds_the_others([box_of(*place) for place in placed(svg)])
    for panel in svg.findall(f"{SVG}g"):
        assert_first_holds_the_others([box_of(*place) for place in placed(panel)])


@every_plan_and_a_large_one
def test_texts_on_a_line_do_not_overlap(plan: GroupPlan) -> None:
    for panel in panels_of(plan).values():
        lines: dict[float, list[tuple[float, float, str]]] = {}
        for element, x, y in placed(panel):
            if element.tag == f"{SVG}text":
                lines.setdefault(y, []).append((*span_of(element, x), element.text))
        for spans in map(sorted, lines.values()):
            for (_, right, one), (left, _, other) in pairwise(spans):
                assert right <= left, (one, other)


def test_large_world_is_cut_short_and_says_so() -> None:
    started = time.process_time()
    plan = plan_groups(world_size=131072, tensor=8, pipeline=16)
    svg = plan.to_svg()
    assert "groups" not in vars(plan)  # the cached property was not touched
    assert time.process_time() - started < 2
    assert len(svg) < 500_000
    assert "first 16 of 16,384 nodes" in svg
    panels = panels_of(LARGE)
    assert sorted(tiles_of(panels["pp"])) == list(range(128))
    assert texts_of(panels["tp"])[0] == "16,384 tensor model-parallel groups of 8 GPUs"
    assert texts_of(panels["embedding"])[0] == "8,192 embedding groups of 2 GPUs"


def test_legend_accounts_for_every_group() -> None:
    for kind in ("dp", "tp", "pp", "model"):
        texts = texts_of(panels_of(LARGE)[kind])
        listed = [text for text in texts if text.startswith("[")]
        more = int(texts[-1].removeprefix("... and ").removesuffix(" more").replace(",", ""))
        assert len(listed) + more == LARGE.world_size // len(LARGE.group_of(0, kind))


def test_max_nodes_limits_what_is_drawn() -> None:
    plan = PLANS["canonical"]
    assert "first 1 of 2 nodes" in plan.to_svg(max_nodes=1)
    assert "first" not in plan.to_svg(max_nodes=2)
    for panel in panels_of(plan, gpus_per_node=4, max_nodes=3).values():
        assert sorted(tiles_of(panel)) == list(range(12))


def test_svg_is_deterministic_and_self_contained() -> None:
    svg = PLANS["experts"].to_svg()
    assert svg == plan_groups(world_size=16, tensor=2, context=2, expert=2, pipeline=2).to_svg()
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "<style" not in svg


def test_to_svg_refuses_a_size_below_one() -> None:
    for name, value in (("gpus_per_node", 0), ("gpus_per_node", -3), ("max_nodes", 0), ("max_nodes", -3)):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {value}"):
            PLANS["canonical"].to_svg(**{name: value})
