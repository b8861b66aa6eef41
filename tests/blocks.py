"""Blocks of code on pages of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-{self.number}"


def blocks_of(page: str, text: str) -> list[Block]:
    return [Block(page, i, *match) for i, match in enumerate(FENCE.findall(text))]


def write_files(page: Path, folder: Path) -> None:
    """What a page shows as files: blocks that begin with "# NAME.EXTENSION"."""
    for block in blocks_of(page.name, page.read_text()):
        if named := FILE.match(block.text):
            (folder / named[1]).write_text(block.text)
