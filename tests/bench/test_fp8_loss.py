"""Curves of losses in fp8: what the page shows is what was measured, and a run measures it."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from bench.fp8_loss import LOSSES, PICTURE, ROOT, WAYS, config_of, losses_of, picture, table

PAGE = ROOT / "docs" / "fp8.md"


def test_the_page_shows_what_was_measured():
    found = json.loads(LOSSES.read_text())
    assert table(found) in PAGE.read_text()
    assert [len(losses) for losses in found.values()] == [300] * len(WAYS)
    assert f"]({PICTURE.name})" in PAGE.read_text()


def test_differences_are_of_the_last_steps():
    found = {name: [9.0] * 10 + [float(number)] * 50 for number, name in enumerate(WAYS)}
    found["bf16"][-1] = 4.0
    assert table(found).splitlines()[2:] == [
        "| fp32 | 0.0000 | 0.0000 | 1.0600, 4.0000 |  |",
        "| bf16 | 4.0000 | 1.0600 |  | 1.0600, 4.0000 |",
        "| fp8 rowwise | 2.0000 | 2.0000 | 1.0200, 2.0000 | 2.0000, 2.0000 |",
        "| fp8 blockwise | 3.0000 | 3.0000 | 1.9800, 2.0000 | 3.0000, 3.0000 |",
    ]


def test_every_way_is_drawn():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    svg = picture(json.loads(LOSSES.read_text())).svg
    assert all(f">{name}<" in svg and way.colour in svg for name, way in WAYS.items())


def test_ways_differ_in_how_they_compute(ranks1):
    options = Namespace(steps=2, batch=2, seed=1)
    found = [ranks1.run(losses_of, config_of(way, options))[0][1] for way in WAYS.values()]
    assert len(set(found)) == len(WAYS)
    assert found == pytest.approx([found[0]] * len(WAYS), rel=2e-3)
