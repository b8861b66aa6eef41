"""README, docs and docstrings keep to the rules of `tests/prose.py`, and its rules see what is planted."""

import pytest

from tests import prose

SHORT = "A rank sends its shard. " * prose.FEW_SENTENCES


@pytest.mark.parametrize("page", prose.pages(), ids=lambda page: page.name)
def test_page_reads_plainly(page):
    assert list(prose.faults(page.read_text())) == []


def test_pages_are_short_enough_to_be_read():
    assert prose.words_of_pages() <= prose.WORDS_OF_PAGES


def test_words_are_those_of_sentences():
    said = "A rank sends its [own\nshard](page.md). It waits then."
    text = f"# A heading\n\n{said}\n\n| a | b |\n\n```sh\nls -l\n```\n"
    assert prose.words_of(text) == 9


def test_too_many_words_are_told(monkeypatch, capsys):
    monkeypatch.setattr(prose, "WORDS_OF_PAGES", 100)
    assert prose.main() == 1
    assert "words in the sentences of all pages, at most 100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("word " * prose.MOST_WORDS + "more.", f"{prose.MOST_WORDS + 1} words"),
        ("- " + "word " * prose.MOST_WORDS + "more.", f"{prose.MOST_WORDS + 1} words"),
        ("The chunk, of which each rank has one, is sent.", "'of which'"),
        ("See [what lies\nBeside it](page.md) for more.", "'beside'"),
        (SHORT + ("word " * (prose.LONG_WORDS + 1) + ". Next ") * prose.FEW_SENTENCES, "more than 25 words"),
        ("The shard is not sent. Chunks were quickly gathered. " * prose.FEW_SENTENCES, "are passive"),
    ],
)
def test_planted_sentence_is_found(text, fault):
    found = list(prose.faults(text))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    "text",
    [
        SHORT,
        "```python\n" + "word " * 99 + "\n```\n",
        "| " + "word " * 99 + "|\n",
        "# " + "Beside " * 99,
        "The shard is not sent. Chunks were quickly gathered.",  # too few for a share
    ],
    ids=["short", "code", "table", "heading", "few"],
)
def test_what_is_no_sentence_or_plain_is_left_alone(text):
    assert list(prose.faults(text)) == []


def test_docstrings_read_plainly():
    assert [
        (module.name, name, fault)
        for module in prose.modules()
        for name, text in prose.docstrings(module.read_text())
        for fault in prose.docstring_faults(text)
    ] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""' + "word " * prose.LONG_WORDS + 'more."""', ["", "words, at most 25 in a first sentence"]),
        ('def f():\n    """Short.\n\n    Ranks lie beside it.\n    """', ["f", "'beside'"]),
        ('class A:\n    """Short.\n\n    x: ' + "word " * 41 + '\n    """', ["A", "41 words, at most 40"]),
        ('def _f():\n    """Ranks lie beside others."""', []),
        ('def f():\n    """Short.\n\n    a   beside b\n    >>> beside()\n    1\n    """', []),
    ],
    ids=["first", "word", "argument", "private", "table and doctest"],
)
def test_planted_docstring_is_found(source, found):
    texts = prose.docstrings(source)
    faults = [(name, fault) for name, text in texts for fault in prose.docstring_faults(text)]
    assert len(faults) == bool(found)
    assert all(name == found[0] and found[1] in fault for name, fault in faults)
