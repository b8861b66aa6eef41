"""What our code takes from torch, read from its syntax and looked up in the torch that is installed.

A name that is chained to an import of torch is followed (`torch.cuda.Stream`), and so is what is asked of
values whose class is known from an annotation, a constructor or what a function is said to return. Other
values are not followed. Calls are compared with the signature: Python's own, the one in the
documentation of a binding, or the schema of an operator, which must also have an entry for the device type.

A name that is asked for by `hasattr`, or under `except AttributeError` or `ImportError`, may be missing.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from bench.cuda_build.lookup import (
    Found,
    Thing,
    is_set_in_python,
    is_torchs,
    member,
    result,
    thing_of,
    with_subclasses,
)
from bench.cuda_build.signatures import compare

_OURS = "torch.ops.tpkernels", "torch.classes.tpkernels"  # from the extension, and what torch.compile sees
_MISSING = object()


def read(paths: Sequence[Path], device_type: str = "") -> Found:
    """Of all these sources."""
    found = Found(device_type)
    for path in paths:
        read_source(path.read_text(), str(path), found)
    return found


def read_source(source: str, where: str, found: Found) -> None:
    tree = ast.parse(source)
    optional: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            optional.add(f"torch.Tensor.{node.attr}")  # what we, or Megatron, put on tensors
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            optional.add(ast.unparse(node.args[1]).strip("'"))
    _Reader(where, found, optional).module(tree)


class _Reader:
    """Goes through one file in the order of its text, with what each name stands for."""

    def __init__(self, where: str, found: Found, optional: set[str]) -> None:
        self._where, self._found, self._optional = where, found, optional
        self._scopes: list[dict[str, Thing | None]] = [{}]
        self._fields: list[dict[str, Thing]] = []  # of the classes that we are in
        self._guarded = 0

    def module(self, tree: ast.Module) -> None:
        self._statements(tree.body)

    # statements

    def _statements(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    if is_torchs(alias.name):
                        module = self._module(alias.name, node)
                        bound = alias.asname or "torch"
                        self._bind(bound, module if alias.asname else Thing("torch", torch))
                    else:
                        self._bind(alias.asname or alias.name.partition(".")[0], None)
            case ast.ImportFrom():
                self._import_from(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._expressions(node.decorator_list)
                self._bind(node.name, None)
                self._function(node)
            case ast.ClassDef():
                self._expressions([*node.decorator_list, *node.bases])
                self._bind(node.name, None)
                with self._scope():
                    self._fields.append(self._fields_of(node))
                    self._statements(node.body)
                    self._fields.pop()
            case ast.Assign():
                thing = self._of(node.value)
                for target in node.targets:
                    self._assign(target, node.value, thing)
            case ast.AnnAssign():
                annotated = self._annotated(node.annotation)
                thing = None if node.value is None else self._of(node.value)
                self._assign(node.target, None, annotated or thing)
            case ast.If():
                if "TYPE_CHECKING" in ast.dump(node.test):
                    with self._guard():  # for the type checker only
                        self._statements(node.body)
                    self._statements(node.orelse)
                else:
                    self._of(node.test)
                    self._branches(node.body, node.orelse, narrowed=self._narrowed(node.test))
                    if _leaves(node.body):  # as `if not isinstance(...): return` does
                        self._forget(node.test)
            case ast.Assert():
                self._of(node.test)
                self._forget(node.test)
            case ast.Try():
                caught = {_text(handler.type) for handler in node.handlers}
                if any("AttributeError" in text or "ImportError" in text for text in caught):
                    with self._guard():
                        self._statements(node.body)
                else:
                    self._statements(node.body)
                for handler in node.handlers:
                    if handler.type is not None:
                        self._of(handler.type)
                    self._bind(handler.name or "", None)
                    self._statements(handler.body)
                self._statements([*node.orelse, *node.finalbody])
            case ast.For() | ast.AsyncFor():
                self._of(node.iter)
                self._assign(node.target, None, None)
                self._branches([*node.body, *node.orelse], [])
            case ast.While():
                self._of(node.test)
                self._branches([*node.body, *node.orelse], [])
            case ast.Match():
                self._of(node.subject)
                self._branches(*(case.body for case in node.cases), [])
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._of(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, None, None)
                self._statements(node.body)
            case _:
                self._inside(node)

    def _branches(self, *bodies: Sequence[ast.stmt], narrowed: Sequence[str] = ()) -> None:
        """One of them is run: what they bind to different things is not known afterwards.

        narrowed: names of which it is not known there what they are
        """
        before, after = self._scopes[-1], []
        for body in bodies:
            self._scopes[-1] = dict(before)
            with self._scope():
                for name in narrowed:
                    self._bind(name, None)
                self._statements(body)
                bound = self._scopes[-1]
            self._scopes[-1] |= {
                name: thing for name, thing in bound.items() if thing or name not in narrowed
            }
            if not _leaves(body):
                after.append(self._scopes[-1])
        if not after:
            self._scopes[-1] = before
            return
        names = {name for scope in after for name in scope}
        self._scopes[-1] = {
            name: after[0].get(name) if all(s.get(name) == after[0].get(name) for s in after) else None
            for name in names
        }

    def _forget(self, test: ast.expr) -> None:
        """What names stand for that were asked for their class, from here on."""
        for name in self._narrowed(test):
            self._bind(name, None)

    def _narrowed(self, test: ast.expr) -> list[str]:
        """Names that are asked for their class: a subclass may have more."""
        calls = [
            node for node in ast.walk(test) if isinstance(node, ast.Call) and _called(node) == "isinstance"
        ]
        return [call.args[0].id for call in calls if isinstance(call.args[0], ast.Name)]

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or not is_torchs(module):
            for alias in node.names:
                self._bind(alias.asname or alias.name, None)
            return
        home = self._module(module, node)
        for alias in node.names:
            thing = None if home is None else self._attribute(home, alias.name, node)
            self._bind(alias.asname or alias.name, thing)

    def _module(self, name: str, node: ast.stmt | ast.expr) -> Thing | None:
        self._found.names.add(name)
        try:
            return Thing(name, import_module(name))
        except ImportError as error:
            self._missing(name, node, str(error))
            return None

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        self._expressions([default for default in [*arguments.defaults, *arguments.kw_defaults] if default])
        with self._scope():
            for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                annotation = argument.annotation
                self._bind(argument.arg, None if annotation is None else self._annotated(annotation))
            for starred in (arguments.vararg, arguments.kwarg):
                if starred is not None:
                    self._bind(starred.arg, None)
            if node.returns is not None:
                self._annotated(node.returns)
            self._statements(node.body)

    def _fields_of(self, node: ast.ClassDef) -> dict[str, Thing]:
        """The annotated ones, and those that are arguments of `__init__`."""
        fields: dict[str, Thing] = {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if thing := self._annotated(statement.annotation):
                    fields[statement.target.id] = thing
            elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                arguments = [*statement.args.args, *statement.args.kwonlyargs]
                typed = {each.arg: self._annotated(each.annotation) for each in arguments if each.annotation}
                for target, value in _fields_set(statement):
                    if isinstance(value, ast.Name) and (thing := typed.get(value.id)):
                        fields[target] = thing
        return fields

    def _assign(self, target: ast.expr, value: ast.expr | None, thing: Thing | None) -> None:
        match target:
            case ast.Name():
                self._bind(target.id, thing)
            case ast.Tuple() | ast.List():
                same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
                for i, element in enumerate(target.elts):
                    its = value.elts[i] if same and isinstance(value, ast.Tuple | ast.List) else None
                    self._assign(element, its, None if its is None else self._of(its))
            case ast.Starred():
                self._assign(target.value, None, None)
            case ast.Attribute():
                owner = self._of(target.value)
                if owner is not None and owner.is_instance and owner.value is not torch.Tensor:
                    self._attribute(owner, target.attr, target)
            case _:
                self._inside(target)

    # expressions

    def _expressions(self, nodes: Sequence[ast.expr]) -> None:
        for node in nodes:
            self._of(node)

    def _inside(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._of(child)
            else:
                self._inside(child)

    def _of(self, node: ast.expr) -> Thing | None:
        match node:
            case ast.Name():
                return self._known(node.id)
            case ast.Attribute():
                return self._of_attribute(node)
            case ast.Call():
                return self._of_call(node)
            case ast.NamedExpr():
                thing = self._of(node.value)
                self._assign(node.target, None, thing)
                return thing
            case ast.IfExp() | ast.BoolOp():
                with self._scope():
                    for name in self._narrowed(node):
                        self._bind(name, None)
                    self._inside(node)
                return None
            case ast.Lambda():
                with self._scope():
                    for argument in [*node.args.args, *node.args.kwonlyargs]:
                        self._bind(argument.arg, None)
                    self._of(node.body)
                return None
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                with self._scope():
                    for generator in node.generators:
                        self._of(generator.iter)
                        self._assign(generator.target, None, None)
                        self._expressions(generator.ifs)
                    if isinstance(node, ast.DictComp):
                        self._expressions([node.key, node.value])
                    else:
                        self._of(node.elt)
                return None
            case _:
                self._inside(node)
                return None

    def _of_attribute(self, node: ast.Attribute) -> Thing | None:
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and self._fields:
            return self._fields[-1].get(node.attr)
        owner = self._of(node.value)
        return None if owner is None else self._attribute(owner, node.attr, node)

    def _attribute(self, owner: Thing, name: str, node: ast.stmt | ast.expr) -> Thing | None:
        full = f"{owner.name}.{name}"
        if full in _OURS:
            return None
        self._found.names.add(full)
        if not owner.is_instance:
            value = getattr(owner.value, name, _MISSING)
            if value is _MISSING and isinstance(owner.value, ModuleType):
                try:
                    value = import_module(full)
                except ImportError:
                    value = _MISSING
            if value is _MISSING:
                self._missing(full, node)
                return None
            return thing_of(full, value)
        for kind in with_subclasses(owner.value):
            if (value := inspect.getattr_static(kind, name, _MISSING)) is not _MISSING:
                return member(full, kind, name, value)
        if not is_set_in_python(owner.value, name):
            self._missing(full, node)
        return None

    def _of_call(self, node: ast.Call) -> Thing | None:
        if _called(node) in ("import_module", "importlib.import_module"):
            first = node.args[0]
            if isinstance(first, ast.Constant) and is_torchs(str(first.value)):
                return self._module(str(first.value), node)
        callee = self._of(node.func)
        self._expressions([argument for argument in node.args])
        self._expressions([keyword.value for keyword in node.keywords])
        if callee is None or callee.is_instance or not callable(callee.value):
            return None
        unpacked = any(isinstance(argument, ast.Starred) for argument in node.args)
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        open_ended = unpacked or len(keywords) < len(node.keywords)
        where = f"{self._where}:{node.lineno}"
        compare(callee, where, None if open_ended else len(node.args), keywords, self._found)
        return result(callee)

    def _annotated(self, node: ast.expr) -> Thing | None:
        """The class of torch that an annotation means: alone, or with None."""
        match node:
            case ast.BinOp(op=ast.BitOr()):
                sides = [self._annotated(node.left), self._annotated(node.right)]
                found = [side for side in sides if side is not None]
                is_none = [isinstance(side, ast.Constant) for side in (node.left, node.right)]
                return found[0] if len(found) == 1 and any(is_none) else None
            case ast.Name() | ast.Attribute():
                thing = self._of(node)
                if thing is None or thing.is_instance or not isinstance(thing.value, type):
                    return None
                return Thing(thing.name, thing.value, is_instance=True)
            case _:
                self._inside(node)
                return None

    # names

    def _known(self, name: str) -> Thing | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def _bind(self, name: str, thing: Thing | None) -> None:
        self._scopes[-1][name] = thing

    def _missing(self, name: str, node: ast.stmt | ast.expr, why: str = "is not there") -> None:
        if self._guarded or {name, name.rpartition(".")[2]} & self._optional:
            self._found.absent.add(name)
        else:
            self._found.problems.append(f"{self._where}:{node.lineno}: {name} {why}")

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._scopes.append({})
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        self._guarded += 1
        try:
            yield
        finally:
            self._guarded -= 1


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether nothing that follows is run after it."""
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _fields_set(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of what a function sets on `self`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for each, value in pairs:
                if isinstance(each, ast.Attribute) and _text(each.value) == "self":
                    yield each.attr, value
