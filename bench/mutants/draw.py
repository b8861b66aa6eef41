"""Faults of one line, drawn by a seed: the same sources give the same faults."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random

LEAST = 4  # of each room
TURNED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
TURNED |= {"is not": "is", "is": "is not", "not in": "in", "in": "not in", "and": "or", "or": "and"}
TURNED |= {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
TURNED |= {"min": "max", "max": "min", "True": "False", "False": "True"}
TURNED_CPP = {" < ": " <= ", " >= ": " > ", " == ": " != ", " && ": " || ", " + ": " - ", "true": "false"}
TOLD = {"print", "warn", "warning", "info", "debug", "log"}  # calls that only say something
TYPED = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast"}  # swapped arguments never work
ON_GPU = re.compile(r"(?<!not )\b[\w.]*(is_cuda|cuda\.is_available\(\))|(?<!!)== \"cuda\"")


@dataclass(frozen=True)
class Mutant:
    """A fault, which is known by its file and lines in other checkouts, too."""

    file: str
    line: int  # from 1; where the line stands, if there are several like it
    before: str
    after: str
    kind: str

    @property
    def room(self) -> str:
        folder, *rest = self.file.split("/")
        return "csrc" if folder == "csrc" else rest[0] if len(rest) > 1 else "top"

    @property
    def key(self) -> str:
        return f"{self.file}: {self.before.strip()} -> {self.after.strip()}"


def drawn(root: Path, seed: int, count: int, of_cpp: int) -> list[Mutant]:
    """Mutants of each room, in proportion to its lines."""
    places: dict[str, list[Mutant]] = defaultdict(list)
    lines: dict[str, int] = defaultdict(int)
    for path in sorted((root / "tpkernels").rglob("*.py")):
        text = path.read_text()
        found = Sites(str(path.relative_to(root)), text)
        places[room := Mutant(found.file, 0, "", "", "").room] += found.mutants
        lines[room] += text.count("\n")
    chosen = []
    for room in sorted(places):
        share = max(LEAST, round(count * lines[room] / sum(lines.values())))
        chosen += _chosen(places[room], share, Random(f"{seed}/{room}"))
    return chosen + _chosen(list(_of_cpp(root)), of_cpp, Random(f"{seed}/csrc"))


def _chosen(places: Sequence[Mutant], count: int, random: Random) -> list[Mutant]:
    """As many kinds as there are, alike often; no two of one line."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for place in places:
        kinds[place.kind].append(place)
    chosen: dict[tuple[str, int], Mutant] = {}
    while len(chosen) < count and kinds:
        kind = random.choice(sorted(kinds))
        one = kinds[kind].pop(random.randrange(len(kinds[kind])))
        chosen.setdefault((one.file, one.line), one)
        if not kinds[kind]:
            del kinds[kind]
    return list(chosen.values())


class Sites:
    """The faults that one source could have."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.lines = file, text.splitlines()
        self.mutants: list[Mutant] = []
        self._is_unreachable = False
        self._visit(ast.parse(text))

    def _visit(self, node: ast.AST) -> None:
        """Faults in a node and below, but not in what only says something, or is there for types alone."""
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.ImportFrom | ast.Import):
            return
        if isinstance(node, ast.If) and (test := ast.unparse(node.test)) in (
            "TYPE_CHECKING",
            "__name__ == '__main__'",
        ):
            self._visit_all(node.orelse)
            return
        if isinstance(node, ast.Call) and _name(node.func) in TOLD:
            return
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return
        self._faults(node)
        outside = self._is_unreachable
        self._is_unreachable |= _imports_what_is_absent(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._visit_all([*node.args.defaults, *(default for default in node.args.kw_defaults if default)])
            self._visit_all(node.body)
        elif isinstance(node, ast.ClassDef):
            self._visit_all(node.body)
        elif isinstance(node, ast.AnnAssign):
            self._visit_all([node.value] if node.value else [])
        elif isinstance(node, ast.If):
            self._visit_all([node.test, *node.orelse])
            self._is_unreachable |= ON_GPU.search(test.replace("'", '"')) is not None
            self._visit_all(node.body)
        else:
            self._visit_all(ast.iter_child_nodes(node))
        self._is_unreachable = outside

    def _visit_all(self, nodes: Iterator[ast.AST] | Sequence[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _faults(self, node: ast.AST) -> None:
        match node:
            case ast.Compare(left=left, comparators=[right]):
                self._turned("comparison turned", left, right)
            case ast.BoolOp(values=[left, right, *_]):
                self._turned("and, or", left, right)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) if not _is_text(left, right):
                self._turned("plus, minus", left, right)
            case ast.BinOp(left=left, op=ast.Mult() | ast.FloorDiv() | ast.Div() | ast.Mod()) if not _is_text(
                left
            ):
                self._replace("factor dropped", node, self._text(node)[: self._length(node, left)].rstrip())
            case ast.AugAssign(target=left, op=ast.Add() | ast.Sub(), value=right):
                self._turned("plus, minus", left, right)
            case ast.UnaryOp(op=ast.Not()):
                self._replace("not removed", node, self._text(node).removeprefix("not").lstrip())
            case ast.Constant(value=bool(value)):
                self._replace("flag turned", node, str(not value))
            case ast.Constant(value=int(value)) if self._text(node).isdigit():
                self._replace("off by one", node, str(value + 1))
            case ast.Expr(value=ast.Call(func=func)) if _name(func) not in (*TOLD, "__init__"):
                self._replace("call left out", node, "pass")
            case ast.Call(func=func, args=args, keywords=keywords):
                self._of_call(node, _name(func), args, keywords)
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for one in body[:-1] if isinstance(body, list) else ():
                match one:
                    case ast.If(body=[ast.Return() as leaving], orelse=[]):
                        self._replace("early return removed", leaving, "pass")

    def _of_call(self, node: ast.Call, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> None:
        if name in ("min", "max"):
            self._replace("min, max", node.func, self._text(node.func).replace(name, TURNED[name]))
        plain = len(args) >= 2 and not any(isinstance(one, ast.Starred) for one in args[:2])
        if plain and name not in TYPED and _is_of_one_line(node):
            first, second = (self._text(one) for one in args[:2])
            start, end = args[0].col_offset - node.col_offset, (args[1].end_col_offset or 0) - node.col_offset
            between = self._text(node)[start + len(first) : end - len(second)]
            if first != second and len(self._text(node)) == len(self._text(node).encode()):
                swapped = f"{second}{between}{first}"
                self._replace(
                    "arguments swapped", node, self._text(node)[:start] + swapped + self._text(node)[end:]
                )
        for one in keywords:
            if isinstance(one.value, ast.Constant | ast.Name) and one.arg and _is_of_one_line(node):
                without = self._text(node).replace(f", {self._text(one)}", "", 1)
                self._replace("flag left out", node, without)

    def _turned(self, kind: str, left: ast.expr, right: ast.expr) -> None:
        if not _is_of_one_line(left) or left.lineno != right.lineno:
            return
        line = self.lines[left.lineno - 1].encode()
        start, end = left.end_col_offset or 0, right.col_offset
        word = re.search(r"[^\s()]+(?: not| in)?", line[start:end].decode())
        if word and word[0] in TURNED:
            turned = line[start:end].decode().replace(word[0], TURNED[word[0]], 1)
            self._add(kind, left.lineno, line[:start].decode() + turned + line[end:].decode())

    def _replace(self, kind: str, node: ast.expr | ast.stmt | ast.keyword, text: str) -> None:
        if _is_of_one_line(node):
            line = self.lines[node.lineno - 1].encode()
            start, end = line[: node.col_offset].decode(), line[node.end_col_offset :].decode()
            self._add(kind, node.lineno, start + text + end)

    def _add(self, kind: str, number: int, after: str) -> None:
        before = self.lines[number - 1]
        if not self._is_unreachable and after != before:
            self.mutants.append(Mutant(self.file, number, before, after, kind))

    def _text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        line = self.lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset].decode() if _is_of_one_line(node) else ""

    def _length(self, node: ast.expr, left: ast.expr) -> int:
        """Of `a` in `a * b`, with the parentheses around it."""
        between = self._text(node)[(left.end_col_offset or 0) - node.col_offset :]
        operator = re.search(r"//|[*/%]", between)
        return (left.end_col_offset or 0) - node.col_offset + (operator.start() if operator else 0)


def _imports_what_is_absent(node: ast.AST) -> bool:
    """Whether nothing in a module or function runs here: it imports a package that is not installed."""
    names: list[str] = []
    if isinstance(node, ast.Module | ast.FunctionDef):
        for one in node.body:
            names += [alias.name for alias in one.names] if isinstance(one, ast.Import) else []
            names += [one.module or ""] if isinstance(one, ast.ImportFrom) and not one.level else []
    packages = {name.partition(".")[0] for name in names} - {"tpkernels", ""}
    return any(find_spec(package) is None for package in packages)


def _of_cpp(root: Path) -> Iterator[Mutant]:
    """Faults in C++, by the look of a line: neither in comments nor in what an error says."""
    for path in sorted((root / "csrc").glob("*.*")):
        file = str(path.relative_to(root))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"//|\"|#|template|operator|TORCH_CHECK|memory_order|^\S", line):
                continue
            for old, new in TURNED_CPP.items():
                if line.count(old) == 1:
                    yield Mutant(file, number, line, line.replace(old, new), f"{old.strip()} turned")
            if re.fullmatch(r" +[\w.>-]+\(.*\);", line) and "return" not in line:
                yield Mutant(file, number, line, f"{line[: -len(line.lstrip())]};", "call left out")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )


def _is_of_one_line(node: ast.expr | ast.stmt | ast.keyword) -> bool:
    return node.lineno == node.end_lineno
