"""SVG to PNG: what is drawn where, and that nothing is dropped in silence."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pictures.samples import SAMPLES
from tpkernels.pictures import png
from tpkernels.pictures.png import NoPillow, save, to_png
from tpkernels.pictures.svg import Picture
from tpkernels.topology.plan import plan_groups

ROOT = Path(__file__).parents[2]
Image = pytest.importorskip("PIL.Image", reason="Pillow draws PNGs")


def opened(svg):
    return Image.open(io.BytesIO(to_png(svg)))


def sheet():
    return Picture(100, 60, "sheet")


PICTURES = SAMPLES | {
    "drawn_before": (ROOT / "docs" / "overlap-timeline.svg").read_text(encoding="utf-8"),
    "plan": plan_groups(world_size=16, tensor=2, pipeline=4).to_svg(),
    "large_plan": plan_groups(world_size=4096, tensor=8, pipeline=8).to_svg(),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_of_ours_becomes_pixels(name):
    svg = PICTURES[name]
    width, height = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups()
    image = opened(svg)
    assert image.size == (2 * int(width), 2 * int(height))
    assert len(image.getcolors(1 << 24)) > 10  # letters have soft edges


def test_shapes_are_where_they_should_be():
    picture = sheet()
    picture.rect(10, 10, 20, 10, fill="#ff0000")
    picture.line(0, 40, 100, 40, stroke="#0000ff", width=2)
    picture.circle(80, 20, 8, fill="#00aa00")
    image = opened(picture.to_svg())
    reds = [(x, y) for x in range(200) for y in range(120) if image.getpixel((x, y)) == (255, 0, 0)]
    assert (min(reds), max(reds)) == ((20, 20), (59, 39))
    assert image.getpixel((100, 80)) == image.getpixel((199, 79)) == (0, 0, 255)
    assert image.getpixel((100, 83)) == image.getpixel((100, 75)) == (255, 255, 255)
    assert image.getpixel((160, 40)) == (0, 170, 0)
    assert image.getpixel((178, 40)) != (0, 170, 0)


@pytest.mark.parametrize(
    ("anchor", "left", "right"), [("start", 99, 175), ("middle", 62, 138), ("end", 25, 101)]
)
def test_words_stand_on_their_line_at_their_anchor(anchor, left, right):
    picture = sheet()
    picture.text(50, 40, "HHH", size=16, anchor=anchor, fill="#000000")
    image = opened(picture.to_svg()).convert("L").point(lambda grey: 255 * (grey < 128))
    x1, y1, x2, y2 = image.getbbox()
    assert left <= x1 < x2 <= right
    assert y2 == pytest.approx(80, abs=1)
    assert 20 <= y2 - y1 <= 26
    assert x2 - x1 > 25


def test_bold_is_bolder():
    def dark(*, bold):
        picture = sheet()
        picture.text(5, 40, "weight", size=20, bold=bold)
        return sum(grey < 128 for grey in opened(picture.to_svg()).convert("L").tobytes())

    assert dark(bold=True) > 1.1 * dark(bold=False)


def test_groups_move_what_they_hold():
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 50 50" width="50" height="50">'
        '<g transform="translate(10 20)"><g transform="translate(5 5)">'
        '<rect width="10" height="10" rx="0" fill="#ff0000" stroke="none"/></g></g></svg>'
    )
    image = opened(svg)
    assert image.getpixel((30, 50)) == image.getpixel((49, 69)) == (255, 0, 0)
    assert image.getpixel((29, 50)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ('<path d="M0 0L1 1"/>', "expected one of svg, title, g, .* got .*path"),
        ('<rect width="1" height="1" opacity=".5"/>', "rect: expected attributes of .* got .*opacity"),
        ('<g transform="rotate(30)"/>', r"expected translate\(x y\), got rotate"),
        ('<polyline points="0,0 1,1" fill="#000000"/>', "one that is not filled"),
        ('<x:rect xmlns:x="elsewhere"/>', "expected one of svg"),
    ],
)
def test_what_it_does_not_know_is_an_error(inner, message):
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" width="9" height="9">{inner}</svg>'
    with pytest.raises(ValueError, match=message):
        to_png(svg)


def test_the_same_picture_is_the_same_file():
    svg = SAMPLES["bars"]
    assert to_png(svg) == to_png(svg)


def test_a_picture_too_large_to_be_smoothed_is_drawn_all_the_same(monkeypatch):
    monkeypatch.setattr(png, "MOST_PIXELS", 1)
    assert opened(SAMPLES["curve"]).size == (2 * 760, 2 * 320)


def test_saving_names_the_files(tmp_path):
    files = {tmp_path / "new" / "a.png": SAMPLES["curve"], tmp_path / "b.png": SAMPLES["lanes"]}
    assert save(files) == f"{tmp_path}/new/a.png, {tmp_path}/b.png"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    many = {tmp_path / f"{number}.png": SAMPLES["bars_one"] for number in range(5)}
    assert save(many) == f"5 in {tmp_path}"
    assert save({}) == "none"


def test_without_pillow_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(NoPillow, match="pip install pillow"):
        to_png(SAMPLES["curve"])
    said = save({tmp_path / "a.png": SAMPLES["curve"]})
    assert said.startswith("no PNG: expected Pillow")
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


class WithoutFineStrokes:
    def getmask(self, text, stroke_width):
        raise TypeError("'float' object cannot be interpreted as an integer")


def without_freetype(size):
    raise ImportError("The _imagingft C module is not installed")


@pytest.mark.parametrize("load_default", [lambda: None, lambda size: WithoutFineStrokes(), without_freetype])
def test_pillow_that_cannot_write_is_none(load_default, monkeypatch):
    monkeypatch.setattr("PIL.ImageFont.load_default", load_default)
    with pytest.raises(NoPillow):
        to_png(SAMPLES["curve"])


def test_pillow_is_loaded_for_pixels_alone():
    program = "import sys; from tests.pictures import samples; from tpkernels.pictures import page, png; "
    subprocess.run([sys.executable, "-c", program + "assert 'PIL' not in sys.modules"], cwd=ROOT, check=True)
