"""Which module of ours needs which: read from the sources, so that nothing is imported to find out.

Imports inside functions count, since the functions are called; those for type checkers do not, since they
never run. `from package import name` needs the module that defines the name, not all that the package's
`__init__` imports: else everything would need everything. Counted, too: modules that are named in strings
(programs, patches, `import_module`), and commands of `python -m tpkernels` that a file calls or starts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("tpkernels", "tests", "bench", "examples")
COMMANDS = {"tpkernels": "tpkernels.cli", "bench": "bench"}  # `python -m` -> package of its commands
LAUNCHER, LAUNCHERS = "launcher", "tpkernels.kernels"  # its first argument names a module of that package
POOLS = re.compile(r"\branks[124]\b")  # fixtures of the root conftest, which import `tests.ranks`
LEAVES = (ast.Name, ast.Constant, ast.alias, ast.operator, ast.expr_context)
DOTTED = re.compile(r"(?:tpkernels|tests|bench)(?:\.\w+)+")
IMPORT = re.compile(r"(?:from ((?:tpkernels|tests|bench)[\w.]*) )?import ([\w., ]+)")


def modules_imported(tree: ast.AST, *, types: bool = True) -> set[str]:
    """Names of modules, and of what is imported from them: in functions, and for type checkers if `types`."""
    found = set()
    for node in nodes(tree, types=types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def nodes(tree: ast.AST, *, types: bool, functions: bool = True) -> list[ast.AST]:
    """All of a tree, but for what stands under TYPE_CHECKING, or in functions."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            continue
        if isinstance(node, ast.If) and not types and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, LEAVES):
            waiting += ast.iter_child_nodes(node)
    return found


@dataclass(frozen=True)
class Graph:
    """The modules of a checkout."""

    root: Path

    @cached_property
    def paths(self) -> dict[str, Path]:
        """File of each module, below the root."""
        found = sorted(path for folder in FOLDERS for path in (self.root / folder).rglob("*.py"))
        return {module_of(path.relative_to(self.root)): path.relative_to(self.root) for path in found}

    @cached_property
    def packages(self) -> dict[str, dict[str, tuple[str, str]]]:
        """What each `__init__` gives on: its name there -> module, name in that module."""
        return {
            name: {
                alias.asname or alias.name: (node.module or "", alias.name)
                for node in nodes(ast.parse(self._names_of(path)), types=True)
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
            for name, path in self.paths.items()
            if path.name == "__init__.py"
        }

    @cached_property
    def needs(self) -> dict[str, set[str]]:
        """The modules that each module imports itself."""
        return {name: self._needs(name) - {name} for name in self.paths}

    @cached_property
    def needed_by(self) -> dict[str, set[str]]:
        turned: dict[str, set[str]] = {name: set() for name in self.paths}
        for name, needed in self.needs.items():
            for other in needed:
                turned[other].add(name)
        return turned

    def users(self, package: str) -> set[str]:
        """Who imports anything inside a package, and so runs its `__init__`."""
        inside = f"{package}."
        return {name for name, its in self.needs.items() if any(other.startswith(inside) for other in its)}

    def readers(self, path: Path) -> set[str]:
        """Who names a file."""
        named = re.compile(rf"(?:^|[/ ]){re.escape(path.name)}(?:$|[ :])", re.MULTILINE)
        return {name for name, text in self._text.items() if path.name in text and named.search(text)}

    def home(self, package: str, name: str) -> str:
        """The module that defines `name` of `package`."""
        if f"{package}.{name}" in self.paths:
            return f"{package}.{name}"
        module, original = self.packages.get(package, {}).get(name, ("", ""))
        return self.home(module, original) if module in self.paths and module != package else package

    @cached_property
    def _read(self) -> dict[str, tuple[set[str], set[str]]]:
        """What each module imports, and the strings in it."""
        found = {}
        for name in self.paths:
            read = nodes(self._parsed(name), types=False, functions=not name.endswith("conftest"))
            found[name] = (self._imported(read), strings(read))
        return found

    def _names_of(self, init: Path) -> str:
        """An `__init__`, or the stub beside it, where the names are that it imports when they are used."""
        stub = (self.root / init).with_suffix(".pyi")
        return (stub if stub.exists() else self.root / init).read_text()

    def _parsed(self, name: str) -> ast.Module:
        return ast.parse(self._source(name))

    def _source(self, name: str) -> str:
        return (self.root / self.paths[name]).read_text()

    @cached_property
    def _text(self) -> dict[str, str]:
        return {name: "\n".join(said) for name, (_, said) in self._read.items()}

    def _needs(self, name: str) -> set[str]:
        imports, said = self._read[name]
        found = set(imports)
        if "test_" in name.rpartition(".")[2]:
            found |= {f"{parent}.conftest" for parent in parents(name)}
        if name.startswith("tests.") and name != "tests.conftest" and POOLS.search(self._source(name)):
            found.add("tests.ranks")
        for string in said:
            found |= self._named_in(string)
        for program, package in COMMANDS.items():
            starts = f"{program}.__main__" in found or package in found or ("-m" in said and program in said)
            if starts and name.startswith("tests."):
                found |= {f"{package}.{word}" for word in {s.partition(" ")[0] for s in said}}
                found.add(f"{program}.__main__")
        return found & self.paths.keys()

    def _imported(self, read: Sequence[ast.AST]) -> set[str]:
        found, bound = set(), dict[str, str]()  # bound: local name -> package
        for node in read:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.add(alias.name)
                    top = alias.name.partition(".")[0]
                    bound[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module in self.paths:
                for alias in node.names:
                    found.add(home := self.home(node.module, alias.name))
                    bound[alias.asname or alias.name] = home
            elif isinstance(node, ast.Call) and dotted(node.func) == [LAUNCHER]:
                found |= {f"{LAUNCHERS}.{word}" for word in strings(node.args[:1])}
        return self._used(read, {name: home for name, home in bound.items() if home in self.packages}, found)

    def _used(self, read: Sequence[ast.AST], bound: Mapping[str, str], found: set[str]) -> set[str]:
        """Packages in `found` become what is used of them: `tpkernels.GPT` is a module of `models`."""
        used: dict[str, set[str]] = {}
        for node in read if bound else ():
            if isinstance(node, ast.Attribute) and (names := dotted(node)) and names[0] in bound:
                package = home = bound[names[0]]
                for name in names[1:]:
                    home = self.home(home, name) if home in self.packages else home
                used.setdefault(package, set()).add(home)
        return (found - used.keys()).union(*used.values())

    def _named_in(self, string: str) -> set[str]:
        """Modules in a string: by their full name, or imported by a program."""
        found = set[str]()
        if not any(folder in string for folder in FOLDERS):
            return found
        for match in DOTTED.finditer(string):
            name = match[0]
            while name and name not in self.paths:
                name = name.rpartition(".")[0]
            if name not in self.packages:
                found.add(name)
        for match in IMPORT.finditer(string):
            names = [word.split()[0] for word in match[2].split(",") if word.split()]
            found |= {self.home(match[1], word) if match[1] else word for word in names}
        return found


def module_of(path: Path) -> str:
    """path: below the root"""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def parents(name: str) -> list[str]:
    """Packages around a module, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def dotted(node: ast.expr) -> list[str]:
    """[a, b, c] of the expression a.b.c; empty for any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return [*start, node.attr]
    return []


def strings(read: Sequence[ast.AST]) -> set[str]:
    """All that a source says, but not its docstrings."""
    docs = {id(node.value) for node in read if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in read
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }
