"""What a comparison found, as text, Markdown, JSON, JUnit or annotations of GitHub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from xml.sax.saxutils import quoteattr

from tpkernels.gate.causes import Change


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel, or any other thing that is compared."""

    name: str
    cells: Sequence[str]
    changes: Sequence[Change] = ()  # the worst first
    fails: bool = False
    place: tuple[str, int] | None = None  # file and line


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    headings: Sequence[str]  # of the cells
    rows: Sequence[Row]
    summary: str

    @property
    def table(self) -> list[tuple[str, ...]]:
        """Rows that changed, with their name first and their worst change last."""
        named = ("", *self.headings, "severity", "what changed")
        changed = [row for row in self.rows if row.changes]
        worst = [(row.name, *row.cells, row.changes[0].severity, row.changes[0].text) for row in changed]
        return [named, *worst] if changed else []


def text(page: Page) -> str:
    table = page.table
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    others = [
        f"{'FAIL' if row.fails else 'ok':<5}{row.name}: {change.severity}: {change.text}"
        for row in page.rows
        for change in row.changes
    ]
    parts = (page.title, "\n".join(lines), "\n".join(others), page.summary)
    return "\n\n".join(filter(None, parts))


def markdown(page: Page) -> str:
    table = page.table
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table]
    if lines:
        lines.insert(1, "|---" * len(table[0]) + "|")
    return "\n\n".join(filter(None, (f"### {page.title}", "\n".join(lines), page.summary)))


def as_json(page: Page) -> str:
    return json.dumps(asdict(page), indent=1)


def junit(page: Page) -> str:
    """A case a row; what does not fail is output of its case."""
    failed = sum(row.fails for row in page.rows)
    lines = [f"<testsuite name={quoteattr(page.title)} tests='{len(page.rows)}' failures='{failed}'>"]
    for row in page.rows:
        told = "&#10;".join(quoteattr(f"{one.severity}: {one.text}")[1:-1] for one in row.changes)
        element = f"<failure message={quoteattr(row.changes[0].text)}>{told}</failure>" if row.fails else ""
        output = f"<system-out>{told}</system-out>" if told and not row.fails else ""
        lines.append(f"  <testcase name={quoteattr(row.name)}>{element}{output}</testcase>")
    return "\n".join([*lines, "</testsuite>"])


def github(page: Page) -> str:
    """A line a change that is not for the better: an error if its row fails."""
    lines = []
    for row in page.rows:
        where = "" if row.place is None else f"file={row.place[0]},line={row.place[1]},"
        for change in row.changes:
            if change.severity != "better":
                kind = "error" if row.fails else "notice"
                title = f"{row.name}: {change.severity}".replace(",", "%2C").replace(":", "%3A")
                lines.append(f"::{kind} {where}title={title}::{change.text.replace('%', '%25')}")
    return "\n".join([*lines, page.summary])


FORMATS: Mapping[str, Callable[[Page], str]] = {
    "text": text,
    "markdown": markdown,
    "json": as_json,
    "junit": junit,
    "github": github,
}
