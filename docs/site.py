"""Writes README, pages and API reference as a searchable site: `python docs/site.py FOLDER`.

It needs mkdocs-material and pdoc. A link or an anchor that leads nowhere is an error.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.commands.build import build
from mkdocs.config import load_config
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
INDEX = Path("docs/README.md")
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")
PART = re.compile(r"^## (.*)$([^#]*)", re.MULTILINE)  # of docs/README.md: a heading, and pages
SHOWN = (".svg", ".json", ".yml")  # files of docs/ that pages link to
ASSETS = (".js", ".css")
FOUND_LAST = "---\nsearch:\n  boost: 0.1\n---\n\n"  # by a search: tables have every word
TITLE = re.compile(r"^# (.*)$", re.MULTILINE)


def pages() -> list[Path]:
    """The pages of the site, from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT) for path in found)


def with_links_of_the_site(text: str, page: Path) -> str:
    """The text without links to what the site does not have, such as sources."""

    def kept(link: re.Match[str]) -> str:
        image, words, target, _ = link.groups()
        found = (ROOT / page.parent / target).resolve()
        shown = found.suffix == ".md" or (found.parent == ROOT / "docs" and found.suffix in SHOWN)
        return link[0] if image or shown else words

    return LINK.sub(kept, text)


def copied(folder: Path) -> None:
    """Put pages, and what they show, into the folder, as they lie here."""
    of_tables = parts()["Measured"]
    for page in pages():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = with_links_of_the_site((ROOT / page).read_text(), page)
        (folder / page).write_text(FOUND_LAST + text if page in of_tables else text)
    for shown in (ROOT / "docs").glob("*.*"):
        if shown.suffix in (*SHOWN, *ASSETS):
            shutil.copy(shown, folder / "docs")


def parts() -> dict[str, list[Path]]:
    """The pages of each part of docs/README.md."""
    return {
        part: [INDEX.parent / target for _, _, target, _ in LINK.findall(links)]
        for part, links in PART.findall((ROOT / INDEX).read_text())
    }


def navigation() -> list[dict[str, Any]]:
    """The parts of docs/README.md, the API reference with the third, then what is for those who change it."""
    found: list[dict[str, Any]] = [{"Home": "README.md"}, {"All pages": str(INDEX)}]
    named = {Path("README.md"), INDEX}
    for part, listed in parts().items():
        named.update(listed)
        api = [{"API": "reference/tpkernels.html"}] if part == "Reference" else []
        found.append({part: api + listing(listed)})
    others = [page for page in pages() if page not in named]
    decisions = [page for page in others if page.parent.name == "adr"]
    found.append({"Project": listing(page for page in others if page not in decisions)})
    return [*found, {"Decisions": listing(decisions)}]


def listing(of: Iterable[Path]) -> list[dict[str, str]]:
    return [{title_of(page): str(page)} for page in of]


def title_of(page: Path) -> str:
    found = TITLE.search((ROOT / page).read_text())
    assert found, f"{page} has no title"
    return found[1].replace("`", "")


def write(folder: Path) -> None:
    with TemporaryDirectory() as made:
        source = Path(made)
        copied(source)
        subprocess.run([sys.executable, ROOT / "docs" / "reference.py", source / "reference"], check=True)
        anchors = slugify(case="lower")  # as GitHub forms them
        config = load_config(
            config_file=str(empty_config(source)),
            site_name="tpkernels",
            docs_dir=str(source),
            site_dir=str(folder.resolve()),
            theme={
                "name": "material",
                "font": False,
                "favicon": "docs/favicon.svg",
                "features": ["navigation.sections", "toc.follow"],
            },
            plugins=["search"],
            extra_javascript=["docs/tables.js"],
            extra_css=["docs/tables.css"],
            nav=navigation(),
            markdown_extensions=[
                "tables",
                "pymdownx.superfences",
                {"toc": {"slugify": anchors}},
            ],
            validation={"nav": {"omitted_files": "ignore"}, "links": {"anchors": "warn"}},
            strict=True,
        )
        build(config)


def empty_config(folder: Path) -> Path:
    """A file, as mkdocs wants one; what it would say is given to `load_config`."""
    path = folder.with_suffix(".yml")
    path.write_text("site_name: tpkernels\n")
    return path


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # mkdocs tells its warnings so
    write(Path(sys.argv[1]))
