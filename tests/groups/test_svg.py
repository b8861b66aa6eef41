"""The picture of a plan, read back from its XML."""

import re
from functools import cache
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest

from tests.products import once
from tpkernels.groups.draw import shown_kinds
from tpkernels.groups.plan import plan_groups

SVG = "{http://www.w3.org/2000/svg}"
EM = 0.55  # an average character of a wide font, in font sizes

PLANS = {
    "canonical": plan_groups(world_size=16, tensor=2, pipeline=4),
    "one": plan_groups(world_size=1),
    "partly_filled": plan_groups(world_size=12, tensor=3, pipeline=2),
    "experts": plan_groups(world_size=16, tensor=2, context=2, expert=2, pipeline=2),
    "all_lines": plan_groups(
        world_size=128, tensor=2, context=2, expert=4, pipeline=8, virtual_pipeline=2, split_rank=3
    ),
    "data_only": plan_groups(world_size=128),
    "pipeline_first": plan_groups(world_size=24, tensor=2, pipeline=3, order="pp-dp-tp-cp-ep"),
}
CANONICAL = PLANS["canonical"]
LARGE = plan_groups(world_size=131072, tensor=8, pipeline=16)


@cache
def panels_of(plan, **how):
    panels = ET.fromstring(plan.to_svg(**how)).findall(f"{SVG}g")
    return dict(zip([*shown_kinds(plan), "model"], panels, strict=True))


def tiles_of(panel):
    """(tooltip, fill) by rank."""
    tiles = {}
    for element in panel.iter(f"{SVG}g"):
        if element.find(f"{SVG}title") is not None:
            rank = int(element.findtext(f"{SVG}text").removeprefix("g"))
            assert rank not in tiles, f"g{rank} is drawn twice"
            tiles[rank] = element.findtext(f"{SVG}title"), element.find(f"{SVG}rect").get("fill")
    return tiles


def texts_of(element):
    return [text.text for text in element.iter(f"{SVG}text")]


def boxes(element, x=0, y=0):
    """(left, top, right, bottom, text) of every rect and text in the picture, texts by their lengths."""
    if shift := re.fullmatch(r"translate\((\d+) (\d+)\)", element.get("transform", "")):
        x, y = x + int(shift[1]), y + int(shift[2])
    left, top = x + int(element.get("x", 0)), y + int(element.get("y", 0))
    if element.tag == f"{SVG}rect":
        yield left, top, left + int(element.get("width")), top + int(element.get("height")), None
    if element.tag == f"{SVG}text":
        width = len(element.text) * int(element.get("font-size")) * EM
        left -= width / 2 if element.get("text-anchor") == "middle" else 0
        yield left, top - int(element.get("font-size")), left + width, top, element.text
    for child in element:
        yield from boxes(child, x, y)


def assert_first_holds_the_others(element):
    left, top, right, bottom, _ = zip(*boxes(element), strict=True)
    assert (left[0], top[0], right[0], bottom[0]) == (min(left), min(top), max(right), max(bottom))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_svg_shows_every_rank_once_and_a_fill_is_shared_exactly_within_a_group(plan):
    for kind, panel in panels_of(plan).items():
        fills = {rank: fill for rank, (_, fill) in tiles_of(panel).items()}
        assert sorted(fills) == list(range(plan.world_size))
        members = [rank for rank in fills if plan.is_member(rank, kind)]
        assert {rank for rank, fill in fills.items() if fill == "none"} == set(fills) - set(members)
        for one, other in combinations(members, 2):
            together = other in plan.group_of(one, kind)
            assert (fills[one] == fills[other]) == together, (kind, one, other)


def test_tooltips_name_groups_and_positions():
    panels = panels_of(CANONICAL)
    assert tiles_of(panels["embedding"])[4][0] == "g4: in no group of this kind"
    assert tiles_of(panels["tp"])[5][0] == "g5: group [g4, g5], position 1"
    assert tiles_of(panels["pp"])[4][0] == "g4: group [g0, g4, g8, g12], position 1"


def test_tile_number_finds_its_group_in_the_legend():
    for kind, panel in panels_of(CANONICAL).items():
        texts = texts_of(panel)
        for number, ranks in enumerate(CANONICAL.groups[kind]):
            legend = "[" + ", ".join(f"g{rank}" for rank in ranks) + "]"
            assert texts[texts.index(legend) - 1] == str(number)
            assert [texts[texts.index(f"g{rank}") + 1] for rank in ranks] == [str(number)] * len(ranks)


@once(plan={**PLANS, "large": LARGE}, gpus_per_node=[1, 3, 8, 72])
def test_nothing_reaches_out_of_its_panel_or_the_picture_or_into_other_texts(plan, gpus_per_node):
    svg = ET.fromstring(plan.to_svg(gpus_per_node=gpus_per_node))
    assert svg.get("viewBox") == f"0 0 {svg.get('width')} {svg.get('height')}"
    paper = svg.find(f"{SVG}rect")
    assert (paper.get("width"), paper.get("height")) == (svg.get("width"), svg.get("height"))
    for element in (svg, *svg.findall(f"{SVG}g")):
        assert_first_holds_the_others(element)
    lines = {}
    for left, _, right, bottom, text in boxes(svg):
        if text is not None:
            lines.setdefault(bottom, []).append((left, right, text))
    for spans in map(sorted, lines.values()):
        for (_, right, one), (left, _, other) in pairwise(spans):
            assert right <= left, (one, other)


def test_large_world_is_cut_short_and_says_so():
    plan = plan_groups(world_size=131072, tensor=8, pipeline=16)
    svg = plan.to_svg()
    assert "groups" not in vars(plan)  # the cached property was not touched
    assert len(svg) < 500_000
    assert "first 16 of 16,384 nodes" in svg
    panels = panels_of(LARGE)
    assert sorted(tiles_of(panels["pp"])) == list(range(128))
    assert texts_of(panels["tp"])[0] == "16,384 tensor model-parallel groups of 8 GPUs"
    assert texts_of(panels["embedding"])[0] == "8,192 embedding groups of 2 GPUs"
    for kind in ("dp", "tp", "pp", "model"):  # the legend accounts for every group
        texts = texts_of(panels[kind])
        listed = [text for text in texts if text.startswith("[")]
        more = int(texts[-1].removeprefix("... and ").removesuffix(" more").replace(",", ""))
        assert len(listed) + more == LARGE.world_size // len(LARGE.group_of(0, kind))


def test_max_nodes_limits_what_is_drawn():
    assert "first 1 of 2 nodes" in CANONICAL.to_svg(max_nodes=1)
    assert "first" not in CANONICAL.to_svg(max_nodes=2)
    for panel in panels_of(CANONICAL, gpus_per_node=4, max_nodes=3).values():
        assert sorted(tiles_of(panel)) == list(range(12))


def test_svg_is_deterministic_and_self_contained():
    svg = CANONICAL.to_svg()
    assert svg == plan_groups(world_size=16, tensor=2, pipeline=4).to_svg()
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert "<style" not in svg


@pytest.mark.parametrize("name", ["gpus_per_node", "max_nodes"])
def test_to_svg_refuses_a_size_below_one(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        CANONICAL.to_svg(**{name: 0})
