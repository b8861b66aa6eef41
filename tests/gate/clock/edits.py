"""Entries after an edit of a kernel's source, options or constants, in copies of the files."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton

from tpkernels import kernels
from tpkernels.gate.ahead_of_time import Entry, ast_source, gpu_target
from tpkernels.gate.catalog import recipes
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.launch import Built
from tpkernels.gate.clock.workload import of_entry

Edit = tuple[str, str, str]  # module of tpkernels.kernels, what stands there, what shall

SOURCES = Path(str(kernels.__file__)).parent


def edited(entry: Entry, folder: Path, edits: Sequence[Edit] = (), **changes: Any) -> Entry:
    """The entry after edits of its module and of what that imports, with other options or constants."""
    constants = {**entry.constants, **{k: v for k, v in changes.items() if k in entry.constants}}
    fields = {name: value for name, value in changes.items() if name not in constants}
    changed = replace(entry, constants=constants, **fields)
    if not edits:
        return changed
    own = entry.module.removeprefix("tpkernels.kernels.")
    texts = {own: (SOURCES / f"{own}.py").read_text()}
    for module, old, new in edits:
        text = texts.get(module) or (SOURCES / f"{module}.py").read_text()
        assert text.count(old) == 1, f"{module} has {text.count(old)} times: {old}"
        texts[module] = text.replace(old, new)
    stem = folder.name.replace("-", "_")
    for module in sorted(texts, key=lambda one: one == own):  # what imports the others comes last
        text = texts[module]
        for other in texts:
            text = text.replace(f"tpkernels.kernels.{other} ", f"tpkernels.kernels.{stem}_{other} ")
        path = folder / f"{module}.py"
        path.write_text(text)
        name = f"tpkernels.kernels.{stem}_{module}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return replace(changed, module=f"tpkernels.kernels.{stem}_{own}")


def clocked(name: str, edits: Sequence[Edit] = (), changes: Mapping[str, Any] | None = None) -> Cost:
    """The cost of an entry after edits. For a process whose kernels are not interpreted, see `compiling`."""
    original = recipes()[name].entry()
    with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        entry = edited(original, Path(folder), edits, **(changes or {}))
        compiled = triton.compile(ast_source(entry), target=gpu_target("sm_90"), options=entry.options)
    return cost_of(Built.of(compiled), of_entry(original))


@contextmanager
def compiling() -> Iterator[Executor]:
    """A process that compiles; tests themselves run kernels interpreted."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        interpreted = os.environ.pop("TRITON_INTERPRET", None)  # read on import
        process.submit(os.getpid).result()
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
        yield process
