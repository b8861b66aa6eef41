"""What Triton's first intermediate code (TTIR) proves of a kernel's addresses. Pure text, no Triton.

Two things that no test of small tensors can see: whether the compiler was told of 16-byte alignment, and
whether offsets stay right past 2**31 elements.
"""

from __future__ import annotations

import re
from collections import defaultdict

_HEADER = re.compile(r"tt\.func public @\w+\((.*?)\)\s*(?:attributes\s*\{[^{}]*\})?\s*\{$", re.MULTILINE)
_LOCATION = re.compile(r'\s*loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)')
_ARGUMENT = re.compile(r"%(\w+): ([^{,]+?)\s*(\{[^}]*\})?(?:,|$)")
_RESULT = re.compile(r"^\s*%(\w+)(?::\d+)? = (.*)$")
_VALUE = re.compile(r"%(\w+)")
_CARRIED = re.compile(r"%(\w+) = %(\w+)")


def aligned_arguments(ttir: str) -> frozenset[str]:
    """The arguments that the compiler knows to be multiples of 16."""
    header = _HEADER.search(_LOCATION.sub("", ttir))
    assert header, "TTIR without a public function"
    return frozenset(
        name for name, _, attributes in _ARGUMENT.findall(header[1]) if "tt.divisibility = 16" in attributes
    )


def narrow_offsets(ttir: str) -> tuple[str, ...]:
    """Products of two run-time values in 32 bits that reach an address: each may pass 2**31 and wrap.

    Empty means proven: every product that enters an offset is taken in 64 bits, or has a constant factor and
    so is a row or column number, which launches bound.
    """
    text = _LOCATION.sub("", ttir)
    operations: dict[str, str] = {}
    carried: dict[str, set[str]] = defaultdict(set)  # what a loop hands from turn to turn
    offsets: list[str] = []
    loops: list[list[str]] = []
    for line in text.splitlines():
        if found := _RESULT.match(line):
            operations[found[1]] = found[2]
        if "scf.for" in line:
            arguments = re.search(r"iter_args\((.*?)\)", line)
            pairs = _CARRIED.findall(arguments[1]) if arguments else []
            loops.append([name for name, _ in pairs])
            for name, first in pairs:
                carried[name].add(first)
        elif "scf.yield" in line and loops:
            for name, value in zip(loops.pop(), _VALUE.findall(line), strict=False):
                carried[name].add(value)
        if "tt.addptr" in line:
            offsets.append(_VALUE.findall(line.split("tt.addptr", 1)[1])[1])
    return tuple(sorted(_narrow_products(operations, carried, offsets)))


def _narrow_products(
    operations: dict[str, str], carried: dict[str, set[str]], offsets: list[str]
) -> set[str]:
    """The offending operations among all that the offsets are computed from."""
    seen: set[str] = set()
    narrow: set[str] = set()
    todo = list(offsets)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        operation = operations.get(name, "")
        sources = _VALUE.findall(operation.split(" : ")[0])
        if operation.startswith("arith.muli") and re.search(r"\bi32\b|xi32>", operation.split(" : ")[-1]):
            constant = [operations.get(source, "").startswith("arith.constant") for source in sources]
            if not any(constant):
                narrow.add(f"%{name} = {operation}")
        if not operation.startswith("scf."):
            todo += sources
        todo += carried[name]
    return narrow
