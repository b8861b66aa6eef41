"""Writes a folder that Hugging Face's `kernels` loads: python -m tpkernels.interop.hub out/hub

The local ops and all modules that they import are copied, with imports made relative, and `layers.py` of
this folder. The variants for backends have the same files: kernels are written in Triton.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import tpkernels

SOURCE = Path(tpkernels.__file__).parent
LAYERS = Path(__file__).with_name("layers.py")
BACKENDS = ("cpu", "cuda", "rocm")
OPS = {
    "linear": ("linear",),
    "mlp": ("gated", "mlp", "swiglu"),
    "norm": ("layer_norm", "rms_norm"),
}
EMPTY = ("tpkernels", "tpkernels.ops")  # packages that give names of modules which are left out
_ABSOLUTE = re.compile(r"^( *)from tpkernels\.?(\S*) import", re.MULTILINE)
_LAZY = re.compile(r'(import_module[(,] ?f?)"tpkernels\.([^"]+)"')
_LEFT = re.compile(r'^ *(from|import) tpkernels|import_module.*"tpkernels', re.MULTILINE)


def package_files() -> dict[str, str]:
    """Return the texts of the package's files by their paths in it."""
    modules = _modules()
    files = {str(_file(module).relative_to(SOURCE)): _relative(module) for module in modules}
    files["layers.py"] = _made_relative(LAYERS.read_text(), ".")
    ops = [f"from .ops.local.{home} import {name} as {name}" for home, names in OPS.items() for name in names]
    described = f'"""Local ops of tpkernels {tpkernels.__version__}, and layers of them."""'
    files["__init__.py"] = "\n".join([described, "", "from . import layers as layers", *ops, ""])
    if left := [path for path, text in files.items() if _LEFT.search(text)]:
        raise ValueError(f"expected imports that can be made relative, got others in {left}")
    return files


def write(folder: Path) -> None:
    """Write a variant for each backend, in place of an earlier one."""
    files = package_files()
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:8]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        metadata = {"id": f"tpkernels_{backend}_{digest}", "name": "tpkernels", "version": 1}
        metadata |= {"license": "MIT", "python-depends": [], "backend": {"type": backend}}
        for path, text in {**files, "metadata.json": json.dumps(metadata, indent=1)}.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            (variant / path).write_text(text)


def _modules() -> set[str]:
    """Return the local ops, all modules that they import, lazily too, and the packages of these."""
    found: set[str] = set()
    waiting = [f"tpkernels.ops.local.{name}" for name in OPS]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        if "." in module:
            waiting.append(module.rpartition(".")[0])
        if module not in EMPTY:
            waiting += _imported(module)
    return found


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(_file(module).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tpkernels"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if _exists(inner) else str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            package = node.value.removesuffix(".")
            if _exists(node.value):
                yield node.value
            elif package != node.value and _exists(package):  # an f-string: any module of the package
                yield from (f"{package}.{file.stem}" for file in _file(package).parent.glob("[a-z]*.py"))


def _exists(module: str) -> bool:
    return re.fullmatch(r"tpkernels(\.\w+)+", module) is not None and _file(module).exists()


def _file(module: str) -> Path:
    path = SOURCE.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _relative(module: str) -> str:
    """Return a module's text with relative imports."""
    depth = module.count(".") + (_file(module).name == "__init__.py")
    return "" if module in EMPTY else _made_relative(_file(module).read_text(), "." * depth)


def _made_relative(text: str, dots: str) -> str:
    text = _ABSOLUTE.sub(lambda found: f"{found[1]}from {dots}{found[2]} import", text)
    return _LAZY.sub(lambda found: f'{found[1]}"{dots}{found[2]}", package=__package__', text)


if __name__ == "__main__":
    write(to := Path(sys.argv[1]))
    print(f"{to}: variants for {', '.join(BACKENDS)}")
