"""Every kind of picture: what it says, and that nothing of it is cut, lost or malformed."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from tests.pictures.reading import words
from tests.pictures.samples import NAN, SAMPLES, STRANGE, losses
from tpkernels.pictures.figure import NO_MATPLOTLIB, Picture, hint, save, shortened

pytest.importorskip("matplotlib", reason="matplotlib draws pictures")

each_picture = pytest.mark.parametrize("name", SAMPLES)


def is_cut(picture: Picture) -> bool:
    """Whether the edge of the sheet cuts words or shapes."""
    figure = picture.figure()
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return min(box.x0, box.y0) < -0.01 or box.x1 > width + 0.01 or box.y1 > height + 0.01


@each_picture
@pytest.mark.filterwarnings("error::UserWarning")  # not ResourceWarning: others leave garbage
def test_picture_is_complete(name):
    svg = SAMPLES[name].svg
    ElementTree.fromstring(svg)  # well-formed, whatever it was told to write
    assert not is_cut(SAMPLES[name])
    assert not re.search(r"\b(nan|inf)\b", re.sub("<text.*?</text>", "", svg))
    assert not re.search(r'src=|href="[^#]|@import|url\([^#]', svg)  # it loads nothing
    assert ' id="figure_' not in svg  # which another picture of the page would have, too
    assert is_cut(Picture("", 1, lambda figure: figure.text(0.9, 0.5, "too far to the right")))


def line_of(picture: Picture) -> list[tuple[float, float]]:
    """The corners of a curve, in pixels of the sheet."""
    numbers = max(re.findall(r'd="(M[^"z]*)"[^>]*stroke: #2f6fb5', picture.svg), key=len)
    places = list(map(float, re.findall(r"-?[\d.]+", numbers)))
    return list(zip(places[::2], places[1::2], strict=True))


def test_curve_goes_from_edge_to_edge_and_down_with_the_value():
    points = line_of(losses([(1, 4.0), (2, 3.0), (3, 2.5), (4, 2.0)]))
    heights = [y for _, y in points]
    assert heights == sorted(heights)  # down on the page
    assert heights[1] - heights[0] == pytest.approx(2 * (heights[3] - heights[2]), abs=0.2)
    assert points[0][0] < 0.1 * 9.8 * 72
    assert points[-1][0] > 0.85 * 9.8 * 72


def test_what_cannot_be_drawn_is_counted():
    picture = losses([(1, 3.0), (2, NAN), (3, 2.0)])
    assert len(line_of(picture)) == 2
    assert "1 of 3 cannot be drawn" in words(picture.svg)
    assert {"step", "loss, nats per token"} <= set(words(picture.svg))
    assert {"2 of 2 cannot be drawn", "nothing to draw"} <= set(words(SAMPLES["curve_of_nothing"].svg))


def test_shortened_words_keep_both_ends_and_fit():
    assert shortened("short", 12, 2) == "short"
    cut = shortened("llama3-70b-tp8-8192-fc_down", 12, 2)
    assert (cut, len(cut)) == ("llama3-7...fc_down", 18)
    assert shortened("two\nlines", 12, 2) == "two lines"


def test_what_is_told_is_text_and_not_markup():
    def draw(figure):
        hint(figure.text(0, 0.5, "$a$ < b"), "\x00<hint>")

    svg = Picture("\x00", 1, draw).svg
    assert words(svg) == ["\ufffd", "$a$ < b"]
    assert "&lt;hint&gt;" in svg
    assert ElementTree.fromstring(svg)[0].text == "\ufffd"


def test_saving_names_the_files(tmp_path):
    files = {tmp_path / "new" / "a.png": SAMPLES["curve"], tmp_path / "b.png": SAMPLES["curve_of_equals"]}
    assert save(files) == f"{tmp_path}/new/a.png, {tmp_path}/b.png"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    many = {tmp_path / f"{number}.png": SAMPLES["curve_of_equals"] for number in range(5)}
    assert save(many) == f"5 in {tmp_path}"
    assert save({}) == "none"


def test_without_matplotlib_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = losses([(1, 2.0)], STRANGE)
    assert picture.svg == ""
    assert save({tmp_path / "a.png": picture}) == NO_MATPLOTLIB
    assert "pip install matplotlib" in NO_MATPLOTLIB
    assert list(tmp_path.iterdir()) == []
