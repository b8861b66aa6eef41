"""The pages' pictures are what `make pictures` draws from the records, and say what the code does."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from tests.pictures.reading import words
from tpkernels.buckets.layout import (
    ALIGNMENT,
    DEFAULT_BUCKET_BYTES,
    SMALLEST_BUCKET_BYTES,
    LayoutRules,
    lay_out_buckets,
)
from tpkernels.groups.plan import plan_groups

pytest.importorskip("matplotlib", reason="matplotlib draws pictures")

from matplotlib.text import Text

from docs.pictures import DOCS, DRAWN, LAYOUT, groups_built, way_of_x

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
CLIP = re.compile(r"\b[pm][0-9a-f]{10}\b")  # made of its path
DOTS = 2.0  # by which versions of matplotlib place words elsewhere


@pytest.mark.parametrize("name", DRAWN)
def test_picture_is_drawn_from_what_is_committed_and_its_words_lie_apart(name):
    picture = DRAWN[name]()
    drawn, committed = (CLIP.sub("", text) for text in (picture.svg, (DOCS / name).read_text()))
    assert NUMBER.sub("", drawn) == NUMBER.sub("", committed), "run `make pictures`"
    assert words(drawn) == words(committed), "run `make pictures`"
    numbers, before = ([float(number) for number in NUMBER.findall(text)] for text in (drawn, committed))
    assert numbers == pytest.approx(before, abs=DOTS), "run `make pictures`"

    figure = picture.figure()
    figure.draw_without_rendering()
    width, height = figure.bbox.max
    said = set(words(picture.svg))  # without marks of an axis that lie outside of it
    shown = [text for text in figure.findobj(Text) if text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    boxes = [(text, box) for text, box in boxes if text and set(text.splitlines()) <= said]
    assert {line for text, _ in boxes for line in text.splitlines()} == said
    assert [text for text, box in boxes if box.min.min() < 0 or box.x1 > width or box.y1 > height] == []
    assert [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []


def test_drawing_of_the_package_names_all_its_folders():
    rooms = {path.parent.name for path in (DOCS.parent / "tpkernels").glob("*/__init__.py")}
    assert rooms - {word for text in words(way_of_x().svg) for word in text.split()} == set()


def test_groups_that_are_drawn_are_those_of_the_plan():
    plan = plan_groups(world_size=16, tensor=2, pipeline=4)
    built = groups_built(16, 2, 4)
    assert built == {kind: [list(group) for group in plan.groups[kind]] for kind in built}


def test_recorded_buckets_are_those_that_the_rules_make():
    """So a change of the rules asks for another record."""
    sizes = [[size // 4 for _, size in bucket] for bucket in json.loads(LAYOUT.read_text())["buckets"]]
    numels = [numel for bucket in sizes for numel in bucket]
    rules = LayoutRules(DEFAULT_BUCKET_BYTES, SMALLEST_BUCKET_BYTES, ALIGNMENT, padding=ALIGNMENT)
    layout = lay_out_buckets(numels, [""] * len(numels), [4] * len(numels), rules)
    assert layout.bucket_of == [number for number, bucket in enumerate(sizes) for _ in bucket]


def test_pages_show_every_picture_and_the_readme_at_most_two():
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    shown = {page: re.findall(r"!\[[^]]*\]\((?:docs/)?([^)]+\.svg)\)", page.read_text()) for page in pages}
    assert {Path(name).name for names in shown.values() for name in names} == {
        path.name for path in DOCS.glob("*.svg") if path.name != "favicon.svg"
    }
    assert len(shown[pages[0]]) <= 2
