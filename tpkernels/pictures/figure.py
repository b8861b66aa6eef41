"""Drawing with matplotlib, an optional package: SVG for a page, PNG with it.

Nothing here imports matplotlib before a picture is drawn, and without it a page has no pictures. The HTML
page stands by itself: nothing in it is loaded from elsewhere.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NO_MATPLOTLIB = "no pictures: expected matplotlib, which draws them; pip install matplotlib"
INK, QUIET, GRID, PAPER = "#1c2530", "#5b6875", "#e1e5ea", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET, GREY = "#2f6fb5", "#d9822b", "#3c8d5a", "#7a5195", "#a3adb8"
WIDTH = 9.8  # inches
FEW = 4  # files that are named one by one
DOTS_PER_INCH = 160  # of a PNG

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE = {
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a dollar is a dollar
    "axes.edgecolor": GRID,
    "axes.labelcolor": QUIET,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": QUIET,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.labelcolor": QUIET,
    "legend.borderaxespad": 0.0,
    "legend.handlelength": 1.0,
    "legend.handleheight": 0.9,
    "xtick.color": QUIET,
    "xtick.major.size": 0,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tpkernels",  # the same picture is the same file
}
# XML has no way to write these, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Picture:
    """A chart, drawn when it is asked for.

    height: in inches, of what `draw` puts below heading, note and legend
    legend: colours and what they stand for
    """

    heading: str
    height: float
    draw: Callable[[Figure], None]
    note: str = ""
    legend: Sequence[tuple[str, str]] = ()
    width: float = WIDTH

    @cached_property
    def svg(self) -> str:
        """The picture as an SVG element for a page; empty without matplotlib."""
        if not can_draw():
            return ""
        root = ET.fromstring(self._saved("svg"))
        for metadata in root.findall(f"{{{_SVG}}}metadata"):
            root.remove(metadata)
        title = ET.Element(f"{{{_SVG}}}title")
        title.text = writable(self.heading)
        root.insert(0, title)
        for group in root.iter(f"{{{_SVG}}}g"):
            name = group.attrib.pop("id", "")  # two pictures of a page would have the same
            if name.startswith(_HINT):
                hint = ET.Element(f"{{{_SVG}}}title")
                hint.text = name.removeprefix(_HINT)
                group.insert(0, hint)
        ET.register_namespace("", _SVG)
        ET.register_namespace("xlink", _XLINK)
        return ET.tostring(root, encoding="unicode") + "\n"

    @cached_property
    def png(self) -> bytes:
        return self._saved("png")

    def write(self, path: Path) -> None:
        """Write it as SVG or, to a path of any other suffix, as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            path.write_text(self.svg, encoding="utf-8")
        else:
            path.write_bytes(self.png)

    def figure(self) -> Figure:
        """Return the drawn figure of matplotlib."""
        from matplotlib.figure import Figure

        with _styled():
            top = 0.32 * bool(self.heading) + 0.2 * bool(self.note) + 0.26 * bool(self.legend)
            figure = Figure((self.width, top + self.height))
            figure.set_layout_engine("constrained", rect=(0, 0, 1, self.height / (top + self.height)))
            self._head(figure)
            self.draw(figure)
        return figure

    def _saved(self, form: str) -> bytes:
        file = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        with _styled():
            self.figure().savefig(file, format=form, dpi=DOTS_PER_INCH, metadata=metadata)
        return file.getvalue()

    def _head(self, figure: Figure) -> None:
        """Draw heading, note and legend, from the top down."""
        from matplotlib.patches import Patch

        left, y, inch = 0.1 / self.width, 1 - 0.06 / figure.get_figheight(), 1 / figure.get_figheight()
        if self.heading:
            heading = shortened(self.heading, 13, self.width)
            figure.text(left, y, heading, size=12, weight="bold", va="top")
            y -= 0.28 * inch
        if self.note:
            figure.text(left, y, shortened(self.note, 9, self.width), color=QUIET, va="top")
            y -= 0.2 * inch
        if self.legend:
            patches = [Patch(color=colour, label=shortened(name, 9, 2)) for colour, name in self.legend]
            figure.legend(handles=patches, loc="upper left", bbox_to_anchor=(left, y), ncols=len(patches))


@contextmanager
def _styled() -> Iterator[None]:
    """Set our style, whatever the user's own matplotlibrc says."""
    matplotlib: Any = import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


_HINT = "hint: "


def hint(artist: Artist, text: str) -> None:
    """Show `text` when somebody points at `artist` in the SVG."""
    artist.set_gid(_HINT + writable(text))


def can_draw() -> bool:
    try:
        import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def save(pictures: Mapping[Path, Picture]) -> str:
    """Write each picture as the PNG of that path; returns a line about what was written, or why none was."""
    if not can_draw():
        return NO_MATPLOTLIB
    for path, picture in pictures.items():
        picture.write(path)
    if len(pictures) <= FEW:
        return ", ".join(str(path) for path in pictures) or "none"
    return f"{len(pictures)} in {', '.join(dict.fromkeys(str(path.parent) for path in pictures))}"


def draw_empty(axes: Axes, text: str) -> None:
    """Write into empty axes why they are empty."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", color=QUIET, transform=axes.transAxes)


def shortened(text: str, size: float, inches: float) -> str:
    """Return one line that fits into so many inches at `size` points, its middle left out if need be.

    Names often differ in their last word.
    """
    text = " ".join(writable(text).split())
    fitting = int(72 * inches / (0.64 * size))  # DejaVu's letters are wide
    if len(text) <= fitting:
        return text
    kept = max(fitting - 3, 2)
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def writable(text: str) -> str:
    """Return `text` without the control characters that no XML may hold."""
    return _UNWRITABLE.sub("\ufffd", text)


_PAGE_STYLE = f"""
body {{ font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: {INK} }}
body {{ max-width: 62em; margin: 2em auto; padding: 0 1em }}
h2 {{ margin: 2em 0 .6em }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .2em 1.5em .2em 0; vertical-align: top }}
thead th {{ border-bottom: 1px solid {QUIET} }}
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
svg {{ max-width: 100%; height: auto; display: block; margin: .5em 0 }}
p {{ color: {QUIET} }}
pre {{ white-space: pre-wrap; background: #f4f6f8; padding: 1em }}
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the HTML of a page. sections: headings, or "", and the HTML below them"""
    body = "\n".join(f"{f'<h2>{text(heading)}</h2>' * bool(heading)}\n{html}" for heading, html in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{text(title)}</title>
<style>{_PAGE_STYLE}</style>
</head>
<body>
<h1>{text(title)}</h1>
{body}
</body>
</html>
"""


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    lines = "\n".join(f"<tr><th>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    return f"<table>{lines}</table>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return a table whose first column has names. numbers: whether the others have numbers"""
    kind = ' class="number"' if numbers else ""
    names = f"<th>{text(head[0])}</th>" + "".join(f"<th{kind}>{text(name)}</th>" for name in head[1:])
    lines = "\n".join(
        f"<tr><th>{text(row[0])}</th>{''.join(f'<td{kind}>{text(word)}</td>' for word in row[1:])}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table>"


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def verbatim(words: str) -> str:
    return f"<pre>{text(words)}</pre>"


def text(words: str) -> str:
    return escape(writable(words))
