"""Messages that the troubleshooting page quotes are those that the library has."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
CAUGHT = (ROOT / "docs" / "caught.md").read_text()
ROWS = re.findall(r"^\| (?!message|---)(.*) \|$", PAGE, re.MULTILINE)
CAUGHT_ROWS = re.findall(r"^\| (?!what is caught|---)(.*) \|$", CAUGHT, re.MULTILINE)
VALUE = "\0"  # stands for what differs from case to case


def template(node):
    """A string of the source, with a stand-in for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)


@cache
def messages():
    """Of the library; in C++ a message is what a statement has in quotes."""
    found = [
        template(node)
        for path in (ROOT / "tpkernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    ]
    statements = (text for path in (ROOT / "csrc").glob("*.cpp") for text in path.read_text().split(";\n"))
    return found + [VALUE.join(re.findall(r'"([^"]*)"', re.sub(r'"\s+"', "", text))) for text in statements]


def is_known(quoted):
    """Whether its fixed parts stand in one message, in this order."""
    parts = [re.escape(part.strip()) for part in quoted.split("...") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(message.replace("%s", VALUE)) for message in messages())


def test_quoted_messages_exist():
    quoted = {message.strip("`"): cause and cure for message, cause, cure in (r.split(" | ") for r in ROWS)}
    assert [message for message in quoted if not is_known(message)] == []
    assert all(quoted.values())
    assert len(quoted) > 30


def is_tested(name):
    """Whether `file::function` is a test."""
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    body = ast.parse((ROOT / path).read_text()).body
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


def test_what_is_caught_is_shown_by_a_test():
    rows = [row.split(" | ") for row in CAUGHT_ROWS]
    assert all(what and when and cost for what, when, cost, _ in rows)
    assert [shown_by for *_, shown_by in rows if not is_tested(shown_by)] == []
    assert len(rows) > 20


def test_a_test_that_is_not_there_is_noticed():
    assert not is_tested("tests/test_troubleshooting.py::test_of_nothing")
    assert not is_tested("tests/test_nothing.py::test_of_nothing")


def test_misquoted_message_is_noticed():
    assert not is_known("rank ... waited ... hours in ...")
