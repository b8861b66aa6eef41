"""Sentences of pages and docstrings that a reader would stumble over: `python -m tests.prose`.

It reads README and docs, and docstrings of public names of the package and of `bench`; not code, tables,
headings or generated pages. It refuses words of `UNCLEAR`, sentences of more than `MOST_WORDS`, first
sentences of docstrings with more than `LONG_WORDS`, and pages where more than `LONG_SHARE` of the sentences
have more than `LONG_WORDS`, or more than `PASSIVE_SHARE` are passive. All pages together have at most
`WORDS_OF_PAGES` in their sentences.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS = 40
LONG_WORDS, LONG_SHARE = 25, 0.2
PASSIVE_SHARE = 0.35
WORDS_OF_PAGES = 22_000  # in sentences; tables and code do not count
FEW_SENTENCES = 8  # shares of fewer say nothing
UNCLEAR = {
    "of which": "say it in a sentence of its own",
    "for whom": "name the reader",
    "beside": "next to, or compared with",
    "likewise": "repeat the words",
    "by the one way": "name the way",
    "taken alternately": "interleaved",
    "the middle half": "the interquartile range",
    "told of": "say who reports it",
    "what is said of": "name the setting",
    "with how far": "name what is limited",
    "which no error tells": "without an error",
}
PASSIVE = re.compile(r"\b(?:is|are|was|were|be|been|being)\s+(?:\w+ly\s+|not\s+)?\w+(?:ed|wn|pt|lt|nt|ilt)\b")
FENCES = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)
MARKUP = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+", re.MULTILINE)
END = re.compile(r"(?<=[.!?:;])[\"')*_`]*\s+(?=[\"'(*_`]*[A-Z0-9`])")
ARGUMENT = re.compile(
    r"^[a-z_]\w*(?:, [a-z_]\w*)*: ", re.MULTILINE
)  # begins a line such as "x: (tokens, features)"
NO_SENTENCE = re.compile(
    r"^(?:.*\S {3,}\S.*|>>> .*(?:\n(?!\n).*)*)$", re.MULTILINE
)  # rows of tables, and doctests
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
GENERATED = {
    "clock-predictions.md",
    "clock-validation.md",
    "launches-counted.md",
    "measured-kernels.md",
    "models-supported.md",
    "overlap-predicted.md",
    "test-profile.md",
}
RECORDS = {  # tables of runs, written by hand: they do not count for `WORDS_OF_PAGES`
    "ci-runs.md",
    "fp8-figures.md",
    "measured-buckets.md",
    "measured-figures.md",
    "tp-invariance-figures.md",
}


def pages() -> list[Path]:
    """The pages that are written by hand, but the changelog."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if page.name not in GENERATED]


def sentences(text: str) -> list[str]:
    """The sentences of a page's paragraphs and list items."""
    text = FENCES.sub("\n\n", text)
    lines = ["" if line.lstrip().startswith(("|", "#", "![")) else line for line in text.splitlines()]
    found = []
    for paragraph in re.split(r"\n\s*\n", ITEM.sub("\n\n", "\n".join(lines))):
        words = " ".join(MARKUP.sub(r"\1", paragraph).split())
        found += [sentence for sentence in END.split(words) if len(sentence.split()) > 2]
    return found


def sentence_faults(sentence: str) -> Iterator[str]:
    """What is wrong with a sentence, a line each."""
    start = " ".join(sentence.split()[:8])
    if (count := len(sentence.split())) > MOST_WORDS:
        yield f"{count} words, at most {MOST_WORDS}: {start} ..."
    lowered = sentence.lower()
    for words, better in UNCLEAR.items():
        if words in lowered and re.search(rf"\b{words}\b", sentence, re.IGNORECASE):
            yield f"{words!r} ({better}): {start} ..."


def words_of(text: str) -> int:
    """The number of words in the sentences of a page."""
    return sum(len(sentence.split()) for sentence in sentences(text))


def words_of_pages() -> int:
    """Those of all pages but records."""
    return sum(words_of(page.read_text()) for page in pages() if page.name not in RECORDS)


def faults(text: str) -> Iterator[str]:
    """What is wrong with a page, a line each."""
    found = sentences(text)
    yield from (fault for sentence in found for fault in sentence_faults(sentence))
    if len(found) < FEW_SENTENCES:
        return
    long = sum(len(sentence.split()) > LONG_WORDS for sentence in found) / len(found)
    if long > LONG_SHARE:
        yield f"{long:.0%} of its sentences have more than {LONG_WORDS} words, at most {LONG_SHARE:.0%}"
    passive = sum(bool(PASSIVE.search(sentence)) for sentence in found) / len(found)
    if passive > PASSIVE_SHARE:
        yield f"{passive:.0%} of its sentences are passive, at most {PASSIVE_SHARE:.0%}"


def modules() -> list[Path]:
    """The modules of the package and of the benchmarks whose docstrings are read."""
    return sorted(path for room in ("tpkernels", "bench") for path in (ROOT / room).rglob("*.py"))


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a module, as "", and of its public classes and functions."""
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "name", "")
        if isinstance(node, DOCUMENTED) and name[:1] != "_" and (text := ast.get_docstring(node)):
            yield name, text


def docstring_faults(text: str) -> Iterator[str]:
    """What is wrong with a docstring, a line each."""
    found = sentences(ARGUMENT.sub("\n\n", NO_SENTENCE.sub("", text)))
    if found and (count := len(found[0].split())) > LONG_WORDS and text.startswith(found[0][:20]):
        yield f"{count} words, at most {LONG_WORDS} in a first sentence: {found[0][:60]} ..."
    yield from (fault for sentence in found for fault in sentence_faults(sentence))


def main() -> int:
    """Print each fault with its page or module; 1 if there is one."""
    found = [f"{page.relative_to(ROOT)}: {fault}" for page in pages() for fault in faults(page.read_text())]
    for module in modules():
        for name, text in docstrings(module.read_text()):
            found += [f"{module.relative_to(ROOT)}: {name}: {fault}" for fault in docstring_faults(text)]
    if (words := words_of_pages()) > WORDS_OF_PAGES:
        found.append(f"{words} words in the sentences of all pages, at most {WORDS_OF_PAGES}: say it once")
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
