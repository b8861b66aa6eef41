"""Messages that the troubleshooting page quotes are those that the library has."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

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
        for folder in ("tpkernels", "bench/streams")
        for path in (ROOT / folder).rglob("*.py")
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


@pytest.mark.parametrize("row", ROWS)
def test_a_quoted_message_exists(row):
    message, cause, cure = row.split(" | ")
    assert is_known(message.strip("`"))
    assert cause
    assert cure


def is_tested(name):
    """Whether `file::function` is a test."""
    path, _, function = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    body = ast.parse((ROOT / path).read_text()).body
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in body)


@pytest.mark.parametrize("row", CAUGHT_ROWS)
def test_a_caught_fault_is_shown_by_a_test(row):
    what, when, cost, shown_by = row.split(" | ")
    assert what
    assert when
    assert cost
    assert is_tested(shown_by)


def test_a_test_that_is_not_there_is_noticed():
    assert not is_tested("tests/test_troubleshooting.py::test_of_nothing")
    assert not is_tested("tests/test_nothing.py::test_of_nothing")


def test_misquoted_message_is_noticed():
    assert not is_known("rank ... waited ... hours in ...")
