"""Whether a CUDA build of torch has all that our CUDA path takes from it: `make check-torch`.

It needs no GPU, and ends with 1 if something is missing. Names are read from the syntax of our sources: those
chained to an import of torch (`torch.cuda.Stream`), and attributes of arguments that are annotated with a
binding such as ProcessGroup. Keywords of calls are compared with the signature, the schema of an operator or
the documentation of a binding; an operator must have an entry for CUDA. A name under `hasattr`,
`except AttributeError` or `except ImportError` may be missing. The Makefile compiles the extension first.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import tpkernels
from tpkernels.comm.transports import rendezvous
from tpkernels.extension import ExtensionState, extension

# packages that some of our modules need
OPTIONAL = {"megatron", "peft", "safetensors", "spmd_types", "transformers"}
OURS = ("torch.ops.tpkernels", "torch.classes.tpkernels")
FOR_ALL = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")  # dispatch keys of every device


@dataclass
class Found:
    """The names and operators that were looked up, and a line for each problem."""

    device_type: str = "CUDA"
    names: set[str] = field(default_factory=set)
    operators: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Print a line for each check, and its problems."""
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}")
    if not torch.backends.cuda.is_built():
        print("expected a CUDA build of torch, which `make check-torch` installs")
        return 1
    checks: Sequence[Callable[[], Iterator[str]]] = (modules, names, csrc)
    problems = 0
    for check in checks:
        title, *wrong = check()
        print(f"{check.__name__}: {title}", *wrong, sep="\n  ")
        problems += len(wrong)
    print(f"{problems} problems" if problems else "all there")
    return bool(problems)


def modules() -> Iterator[str]:
    """Each of our modules can be imported."""
    root, wrong, left_out, count = Path(tpkernels.__file__).parent, [], set(), 0
    for module in pkgutil.walk_packages([str(root)], "tpkernels."):
        if module.name.rpartition(".")[2] in ("_C", "__main__"):
            continue
        try:
            import_module(module.name)
            count += 1
        except Exception as error:  # any error is reported
            if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in OPTIONAL:
                left_out.add((error.name or "").partition(".")[0])
            else:
                wrong.append(f"{module.name}: {type(error).__name__}: {error}")
    yield f"{count} imported" + (f", without those of {', '.join(sorted(left_out))}" if left_out else "")
    yield from wrong


def names() -> Iterator[str]:
    """Names, keywords, entries of operators, and the methods of `_SymmetricMemory` that we call."""
    found = Found()
    for path in sorted(Path(tpkernels.__file__).parent.rglob("*.py")):
        look_up(path.read_text(), str(path), found)
    yield f"{len(found.names)} names, {len(found.operators)} operators with an entry for CUDA"
    yield from (*found.problems, *lacking(rendezvous.Handle, c10d._SymmetricMemory))


def csrc() -> Iterator[str]:
    """The extension was compiled against this build, and loads."""
    loaded = extension()
    yield loaded.detail
    if loaded.state is not ExtensionState.LOADED:
        yield f"expected it loaded, it is {loaded.state.value}"


def lacking(ours: type, theirs: type) -> Iterator[str]:
    """Yield the members of a protocol of ours that a class of torch lacks, or names otherwise."""
    for name, member in vars(ours).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        if not hasattr(theirs, name):
            yield f"{theirs.__name__}.{name} is not there"
        elif inspect.isfunction(member):
            for keyword in [*inspect.signature(member).parameters][1:]:
                if not _takes(getattr(theirs, name), keyword):
                    yield f"{theirs.__name__}.{name} takes no {keyword}"


def look_up(source: str, where: str, found: Found) -> None:
    """Look up what one source takes from torch."""
    tree = ast.parse(source)
    reader = _Reader(where, found, tree)
    reader.visit(tree)


class _Reader(ast.NodeVisitor):
    """Follows names of one file; those that are bound anywhere else than by an import are left out."""

    def __init__(self, where: str, found: Found, tree: ast.Module) -> None:
        self._where, self._found = where, found
        nodes = list(ast.walk(tree))
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._bound, self._imported = bound, dict[str, str]()
        self._arguments: list[Mapping[str, type]] = [{}]  # annotated ones of the functions around
        self._optional = {  # attributes that `hasattr` asks for
            str(getattr(node.args[1], "value", ""))
            for node in nodes
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr"
        }
        self._guarded = False

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                self._resolved(alias.name, node)
                self._imported[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "torch" and not node.level:
            for alias in node.names:
                self._resolved(f"{node.module}.{alias.name}", node)
                self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Try(self, node: ast.Try) -> None:
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        before = self._guarded
        self._guarded |= "AttributeError" in caught or "ImportError" in caught
        for statement in node.body:
            self.visit(statement)
        self._guarded = before
        for other in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(other)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        annotated = ((one.arg, self._annotated(one.annotation)) for one in arguments if one.arg not in stored)
        others = {one.arg for one in arguments}
        around = {name: kind for name, kind in self._arguments[-1].items() if name not in others}
        self._arguments.append(around | {name: kind for name, kind in annotated if kind is not None})
        self.generic_visit(node)
        self._arguments.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._arguments[-1].get(getattr(node.value, "id", ""))
        if owner is not None:
            self._member(owner, node)
        elif (dotted := self._dotted(node)) is not None:
            self._resolved(dotted, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        dotted = self._dotted(node.func)
        if dotted is None or dotted.startswith(OURS) or (value := _value_of(dotted)) is None:
            return
        for keyword in node.keywords:
            if keyword.arg is not None and not _takes(value, keyword.arg):
                self._tell(node, f"{dotted} takes no {keyword.arg}")
        if schemas := _schemas_of(value):
            self._found.operators.add(schemas[0].name)
            if not any(_has_entry(schema, self._found.device_type) for schema in schemas):
                self._tell(node, f"{schemas[0].name} has no entry for {self._found.device_type}")

    def _annotated(self, annotation: ast.expr | None) -> type | None:
        """Return the binding that an annotation names, also `X | None`, such as ProcessGroup."""
        if isinstance(annotation, ast.BinOp):
            annotation = annotation.left
        dotted = None if annotation is None else self._dotted(annotation)
        value = None if dotted is None else _value_of(dotted)
        return value if isinstance(value, type) and _is_of_a_binding(value) else None

    def _member(self, owner: type, node: ast.Attribute) -> None:
        name = f"{owner.__name__}.{node.attr}"
        self._found.names.add(name)
        may_be = [owner, *owner.__subclasses__()]  # a backend is annotated as one, and is NCCL's
        if not any(hasattr(kind, node.attr) for kind in may_be) and node.attr not in self._optional:
            self._tell(node, f"{name} is not there")

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the full name of a chain of attributes that begins with an import of torch."""
        if isinstance(node, ast.Name) and node.id not in self._bound:
            return self._imported.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._dotted(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def _resolved(self, dotted: str, node: ast.AST) -> None:
        if dotted.startswith(OURS):
            return
        self._found.names.add(dotted)
        if _value_of(dotted) is None and dotted.rpartition(".")[2] not in self._optional:
            self._tell(node, f"{dotted} is not there")

    def _tell(self, node: Any, what: str) -> None:
        if not self._guarded:
            self._found.problems.append(f"{self._where}:{node.lineno}: {what}")


def _value_of(dotted: str) -> Any:
    """Return a module, or an attribute of one; None if there is none. An attribute that is None is there."""
    first, *parts = dotted.split(".")
    value: Any = import_module(first)
    path = first
    for part in parts:
        path = f"{path}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = import_module(path)
            except (ImportError, TypeError):
                return None
        if value is None:
            return ...
    return value


def _is_of_a_binding(kind: type) -> bool:
    return any(base.__name__ == "pybind11_object" for base in kind.__mro__)


def _schemas_of(value: Any) -> Sequence[Any]:
    """Return the schemas of an operator, or of a function of torch that is one; none of other values."""
    if isinstance(value, torch._ops.OpOverload):
        return [value._schema]
    if isinstance(value, torch._ops.OpOverloadPacket):
        return [getattr(value, name)._schema for name in value.overloads()]
    name = getattr(value, "__name__", "")
    if inspect.isbuiltin(value) and getattr(torch, name, None) is value:
        schemas: Sequence[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        return schemas
    return []


def _has_entry(schema: Any, device_type: str) -> bool:
    overload = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        return any(has_kernel(overload, key) for key in (device_type, *FOR_ALL))
    except RuntimeError:  # an operator of TorchScript, which goes to no device
        return True


def _takes(value: Any, keyword: str) -> bool:
    """Whether a callable takes a keyword; True if it shows no signature, as functions of tensors do not."""
    if isinstance(value, torch._ops.OpOverload):
        return any(argument.name == keyword for argument in value._schema.arguments)
    init = getattr(value, "__init__", None) if isinstance(value, type) else None
    documented = (init or value).__doc__ or ""
    if re.match(r"\w+\(\w+: ", documented):  # of a binding, which names its arguments and their types
        return re.search(rf"\b{keyword}: |\barg\d|\*\*", documented) is not None
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
