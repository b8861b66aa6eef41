"""What Triton's first intermediate code (TTIR) proves of addresses. Pure text, no Triton.

Three things that tests of small tensors rarely see: whether the compiler knows the 16-byte alignment, whether
offsets stay right past 2**31 elements, and where sums are rounded to 16 bits at each step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

_HEADER = re.compile(r"tt\.func public @\w+\((.*?)\)\s*(?:attributes\s*\{[^{}]*\})?\s*\{$", re.MULTILINE)
_LOCATION = re.compile(r'\s*loc\((?:[^()"]|"[^"]*"|\([^()]*\))*\)')
_ARGUMENT = re.compile(r"%(\w+): ([^{,]+?)\s*(\{[^}]*\})?(?:,|$)")
_RESULT = re.compile(r"%(\w+)(?::\d+)? = (.*)$")
_VALUE = re.compile(r"%(\w+)")
_PLACE = re.compile(r'^#(loc\d*) = loc\((?:"([^"]+)":(\d+):\d+\)|(.*)\)$)', re.MULTILINE)
_NAMED = re.compile(r"loc\(#(loc\d*)\)$")
_HALF_SUM = re.compile(
    r"(?:arith\.addf .* : (?:tensor<[^>]*x)?|tt\.dot .* -> tensor<[^>]*x)(b?f16)>?(?: loc|$)"
)
_REDUCED = '"tt.reduce"'
_CARRIED = re.compile(r"[(,] ?%(\w+) = %(\w+)")


class _Body(NamedTuple):
    """The body of a loop or of a branch."""

    result: str  # of the whole; "" if it has none
    carried: list[str]  # what a loop hands from turn to turn


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
    operations: dict[str, str] = {}
    handed: dict[str, set[str]] = defaultdict(set)  # what a loop or a branch hands on, by who gets it
    offsets: list[str] = []
    regions: list[_Body] = []
    condition: list[str] = []  # what a while loop hands to its body
    for line in map(str.strip, _LOCATION.sub("", ttir).splitlines()):
        opens, closes = line.endswith("{"), line.startswith("}")
        found = _RESULT.match(line)
        if found:
            operations[found[1]] = found[2]
        if closes and not opens:  # "} else {" and "} do {" go on
            regions.pop()
        elif opens and not closes:
            pairs = _CARRIED.findall(line) if "iter_args(" in line or "scf.while" in line else []
            regions.append(_Body(found[1] if found else "", [name for name, _ in pairs]))
            for name, first in pairs:
                handed[name].add(first)
        elif line.startswith("scf.yield"):
            values = _VALUE.findall(line)
            handed[regions[-1].result].update(values)
            for name, value in zip(regions[-1].carried, values, strict=False):
                handed[name].add(value)
        elif line.startswith("scf.condition"):
            condition = _VALUE.findall(line)[1:]
            handed[regions[-1].result].update(condition)
        elif line.startswith("^bb"):
            for name, value in zip(_VALUE.findall(line), condition, strict=False):
                handed[name].add(value)
        if "tt.addptr" in line:
            offsets.append(_VALUE.findall(line.split("tt.addptr", 1)[1])[1])
    return tuple(sorted(_narrow_products(operations, handed, offsets)))


def narrow_sums(ttir: str) -> tuple[str, ...]:
    """Where numbers are added up in 16 bits, in a reduction or from turn to turn: "fp16 (norm.py:12)"."""
    places = {name: (file, line, others) for name, file, line, others in _PLACE.findall(ttir)}
    found: dict[str, None] = {}
    carried: list[set[str]] = []  # what each loop around hands on, or that it is a reduction
    for line in map(str.strip, ttir.splitlines()):
        half = _HALF_SUM.search(line)
        handed = {name for around in carried for name in around}
        operands = {_REDUCED, *_VALUE.findall(line.partition(" = ")[2])}
        if half and ("tt.dot" in line or handed & operands):
            kind = {"f16": "fp16", "bf16": "bf16"}[half[1]]
            found[f"{kind} ({_user_line(line, places)})"] = None
        code = _LOCATION.sub("", line)
        if code.startswith("}"):
            del carried[-1:]
        if code.endswith("{"):
            is_loop = "iter_args(" in code or "scf.while" in code
            names = {name for name, _ in _CARRIED.findall(code)} if is_loop else set[str]()
            carried.append({_REDUCED} if _REDUCED in code else names)
    return tuple(found)


def _user_line(line: str, places: dict[str, tuple[str, str, str]]) -> str:
    """File and line of the innermost call that is not in Triton's own library."""
    named = _NAMED.search(line)
    todo = [named[1]] if named else []
    while todo:
        file, number, others = places.get(todo.pop(0), ("", "", ""))
        if file and "/triton/language/" not in file:
            return f"{file.rsplit('/', 1)[-1]}:{number}"
        todo += re.findall(r"#(loc\d*)", others)
    return "?"


def _narrow_products(operations: dict[str, str], handed: dict[str, set[str]], offsets: list[str]) -> set[str]:
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
        todo += handed[name]
    return narrow
