"""The launches that a script makes, as tables of gate.toml: what `check --init` is told by a script of yours.

`python -m tpkernels.gate.user_kernels.recording`, see `children`. Only in this process torch takes "cuda" for
the CPU, a GPU is pretended, and each launch of Triton is noted instead of made: outputs stay as they were
allocated, so that a test's comparison fails, which ends that test and nothing else.
"""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tpkernels.gate.child import one_line_error
from tpkernels.gate.user_kernels.children import Answer, ItemOfChild, serve
from tpkernels.gate.user_kernels.pretended_gpu import pretended_gpu
from tpkernels.gate.user_kernels.record import DTYPES, contiguous

LARGE = 1 << 22  # elements, past which the interpreter takes long: the smallest of such launches is kept
KINDS = {getattr(torch, name): kind for kind, name in DTYPES.items()}  # torch's dtype -> Triton's name
TRITON_DTYPES = (*(name for name in DTYPES.values() if hasattr(tl, name)), "float8e4nv", "float8e5")


class Unsaid(Exception):
    """Why no table can say a launch."""


def answered(item: ItemOfChild) -> Answer:
    """item: the command to "run", such as "launches.py". Returns the launches to keep."""
    noted = Noted()
    with pretended_gpu(), patch.object(JITFunction, "run", noted.launch):
        ended = _run(shlex.split(item["run"]))
    script = shlex.split(item["run"])[0]
    files = [str(Path(script).resolve())] if script.endswith(".py") else []
    return {"launches": list(noted.kept()), "unsaid": noted.unsaid, "ended": ended, "files": files}


def _run(argv: Sequence[str]) -> str:
    """Run a file of Python or a module as the main program; returns the words for how it failed, or ""."""
    is_file = argv[0].endswith(".py")
    folder = str(Path(argv[0]).resolve().parent) if is_file else ""
    with patch.object(sys, "argv", list(argv)), patch.object(sys, "path", [folder, *sys.path]):
        try:
            runpy.run_path(argv[0], run_name="__main__") if is_file else runpy.run_module(
                argv[0], run_name="__main__", alter_sys=True
            )
        except SystemExit as end:
            return f"exit code {end.code}" if end.code else ""
        except Exception as error:
            return one_line_error(error)
    return ""


class Noted:
    """The launches so far: of each kernel the largest, and the largest with other alignments of its sizes."""

    def __init__(self) -> None:
        self._launches: dict[str, dict[frozenset[str], tuple[int, Answer]]] = {}
        self.unsaid: dict[str, str] = {}  # kernel -> why there is no table of it

    @property
    def launch(self) -> Callable[..., None]:
        """What stands in for `JITFunction.run`."""

        def run(kernel: Any, *given: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
            if not warmup:
                self._note(kernel, given, grid, named)

        return run

    def _note(self, kernel: Any, given: Sequence[Any], grid: Any, named: dict[str, Any]) -> None:
        name, signature = f"{kernel.fn.__module__}:{kernel.fn.__qualname__}", inspect.signature(kernel.fn)
        options = {option: named.pop(option) for option in [*named] if option not in signature.parameters}
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        try:
            blocks = grid(bound.arguments) if callable(grid) else grid
            table = table_of(kernel, bound.arguments, blocks, options)
        except Unsaid as reason:
            self.unsaid.setdefault(name, str(reason))
            return
        sizes = {**table["values"], **table["constants"]}
        aligned = frozenset(one for one, size in sizes.items() if type(size) is int and size % 16 == 0)
        elements = sum(map(prod, table["shapes"].values()))
        size = elements if elements <= LARGE else -elements
        known = self._launches.setdefault(name, {})
        if aligned not in known or known[aligned][0] < size:
            said = {"kernel": name, "file": kernel.fn.__code__.co_filename, "table": table}
            known[aligned] = size, said

    def kept(self) -> Iterator[Answer]:
        for launches in self._launches.values():
            best = sorted(launches.values(), key=lambda one: -one[0])
            yield from (said for _, said in best[:2])


def table_of(kernel: Any, arguments: Mapping[str, Any], grid: Any, options: Mapping[str, Any]) -> Answer:
    """What gate.toml says of a launch; Unsaid if it cannot. Literal sizes: nobody has named them yet."""
    table: Answer = {key: {} for key in ("signature", "constants", "shapes", "strides", "values", "fill")}
    moved = []
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        plain = parameter.do_not_specialize
        if isinstance(value, Tensor | TensorDescriptor):
            _tensor(table, name, value)
            if isinstance(value, Tensor) and value.data_ptr() % 16:
                moved.append(name)
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not plain):
            table["constants"][name] = _constant(name, value)
        elif isinstance(value, int | float):
            table["signature"][name] = parameter.annotation_type or _kind(value)
            table["values"][name] = int(value) if isinstance(value, bool) else value
        else:
            raise Unsaid(f"{name} is a {type(value).__name__}")
    table["grid"] = [int(size) for size in (grid if isinstance(grid, Sequence) else (grid,))]
    given = {name: value for name, value in options.items() if value is not None}
    for key in ("num_warps", "num_stages"):
        if key in given:
            table[key] = given.pop(key)
    table["options"] = {name: _constant(name, value) for name, value in given.items()}
    if moved:  # else pointers are, and integers by value
        whole = {name for name, value in table["values"].items() if type(value) is int and value % 16 == 0}
        table["aligned"] = [
            one.name
            for one in kernel.params
            if not one.do_not_specialize and not one.do_not_specialize_on_alignment
            if one.name in whole or (one.name in table["shapes"] and one.name not in moved)
        ]
    return table


def _tensor(table: Answer, name: str, value: Tensor | TensorDescriptor) -> None:
    block = "" if isinstance(value, Tensor) else f"[{', '.join(map(str, value.block_shape))}]"
    tensor: Tensor = value if isinstance(value, Tensor) else value.base
    kind = KINDS.get(tensor.dtype)
    if kind is None or not tensor.numel():
        raise Unsaid(f"{name} is a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}")
    strides = tensor.stride()
    shape = [size if step else 1 for size, step in zip(tensor.shape, strides, strict=True)] or [1]
    table["signature"][name] = f"tensordesc<{kind}{block}>" if block else f"*{kind}"
    table["shapes"][name] = shape
    usual = contiguous(tuple(shape))
    if any(size > 1 and step != at for size, step, at in zip(shape, strides, usual, strict=False)):
        table["strides"][name] = [step or 1 for step in strides]
    if tensor.dtype.is_floating_point:
        numbers = tensor.float()
        if numbers.numel() > 1 and 0 <= numbers.min() < numbers.max() <= 1:
            table["fill"][name] = "uniform"
    elif tensor.dtype != torch.bool:
        table["fill"][name] = [int(tensor.min()), int(tensor.max()) + 1]


def _kind(value: bool | int | float) -> str:
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _constant(name: str, value: Any) -> Any:
    value = value.value if isinstance(value, tl.constexpr) else value
    if value is None:
        return "None"
    if isinstance(value, tl.dtype):
        return next(f"tl.{one}" for one in TRITON_DTYPES if getattr(tl, one) == value)
    if isinstance(value, torch.dtype):
        return str(value)
    if not isinstance(value, bool | int | float | str):
        raise Unsaid(f"{name} is a {type(value).__name__}")
    return value


if __name__ == "__main__":
    serve(answered)
