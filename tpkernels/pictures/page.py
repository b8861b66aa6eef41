"""An HTML page that stands by itself: nothing in it is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tpkernels.pictures.figure import INK, QUIET, writable

_STYLE = f"""
body {{ font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: {INK} }}
body {{ max-width: 62em; margin: 2em auto; padding: 0 1em }}
h2 {{ margin: 2em 0 .6em }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .2em 1.5em .2em 0; vertical-align: top }}
thead th {{ border-bottom: 1px solid {QUIET} }}
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
figure {{ margin: 0 0 1.5em }}
caption, figcaption {{ text-align: left; color: {QUIET}; padding: .3em 0 .6em }}
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
<style>{_STYLE}</style>
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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True, caption: str = ""
) -> str:
    """Return a table whose first column has names. numbers: whether the others have numbers"""
    kind = ' class="number"' if numbers else ""
    names = f"<th>{text(head[0])}</th>" + "".join(f"<th{kind}>{text(name)}</th>" for name in head[1:])
    lines = "\n".join(
        f"<tr><th>{text(row[0])}</th>{''.join(f'<td{kind}>{text(word)}</td>' for word in row[1:])}</tr>"
        for row in rows
    )
    above = f"<caption>{text(caption)}</caption>" * bool(caption)
    return f"<table>{above}<thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table>"


def figure(svg: str, caption: str) -> str:
    """Return a picture with its caption below."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>"


def paragraph(words: str) -> str:
    return f"<p>{text(words)}</p>"


def verbatim(words: str) -> str:
    return f"<pre>{text(words)}</pre>"


def text(words: str) -> str:
    return escape(writable(words))
