"""What a call does, counted: Python calls, operators, primitives, transfers, launches, bytes.

Counts depend on the code and on torch's version, not on the machine or its load: what a rank does while it
waits for another is left out.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import ScriptObject, Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpkernels
from tpkernels import journal
from tpkernels.comm.transports.host import HostExchange

ROOT = f"{Path(tpkernels.__file__).parent}/"
WARM = 4  # calls before the one that is counted
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITES = {"copy_", "zero_", "fill_"}  # what they change in place they do not read
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # no calls from Python 3.12 on

# in C++ a narrow is a slice or not, by the thread in which rows of another rank are added
SAME = {"aten::narrow": "aten::slice"}

Counts = dict[str, dict[str, int]]  # of each kind, by names: files, operators, kernels


def counts_of(run: Callable[[], object]) -> Counts:
    """Count what a call does in this thread, once it is warm."""
    for _ in range(WARM):
        run()
    python, steps, pushing = python_calls(run), Steps(), HostExchange.pushing

    def counted(exchange: HostExchange, swap: Any, rows: Tensor, delivery: Any) -> Any:
        operators.sent["shared memory"] += rows.nbytes
        return pushing(exchange, swap, rows, delivery)

    with (
        _waits() as waiting,
        patch.object(HostExchange, "pushing", counted),
        journal.read_by(steps),
        Operators(waiting=waiting) as operators,
    ):
        run()
    counts = {
        "Python calls": python,
        "operators": operators.calls,
        "primitives": steps.primitives,
        "transfers": steps.transfers,
        "bytes sent": operators.sent,
        "bytes allocated": operators.allocated,
        "bytes read and written": operators.moved,
    }
    return added([counts])


def added(counts: Sequence[Mapping[str, Mapping[str, int]]]) -> Counts:
    """Add up the counts of several ranks, without zeros."""
    return {kind: dict(sum((Counter(each[kind]) for each in counts), Counter())) for kind in counts[0]}


def python_calls(run: Callable[[], object]) -> Counter[str]:
    """Count calls into our files, by file."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in INLINED:
            calls[code.co_filename.removeprefix(ROOT)] += not waiting

    gc.collect()
    gc.disable()  # what it ends is not of this call
    try:
        with _waits() as waiting:
            sys.setprofile(count)
            try:
                run()
            finally:
                sys.setprofile(None)
    finally:
        gc.enable()
    return calls


@contextmanager
def _waits() -> Iterator[list[None]]:
    """Gives a list that has an element while this thread waits in a loop for rows of another rank."""
    waiting: list[None] = []
    poll, own = HostExchange.poll, threading.get_ident()

    def polling(*arguments: Any) -> str:
        if threading.get_ident() != own:  # the thread that pushes
            return poll(*arguments)
        waiting.append(None)
        try:
            return poll(*arguments)
        finally:
            waiting.pop()

    with patch.object(HostExchange, "poll", polling):
        yield waiting


class Operators(TorchDispatchMode):
    """Operators of torch by name, and the bytes that they send, allocate, and read and write."""

    def __init__(
        self, counts: Callable[[Tensor], bool] = lambda tensor: True, waiting: Sequence[None] = ()
    ) -> None:
        """counts: whether bytes of a tensor count; waiting: has an element while nothing counts"""
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._waiting = counts, waiting
        self.calls, self.sent, self.allocated, self.moved = (Counter[str]() for _ in range(4))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._waiting:
            name = SAME.get(func._schema.name, func._schema.name)
            self.calls[name] += 1
            if func.namespace == "c10d":
                self.sent[name] += self._sent(func._opname, tree_leaves(args))
            else:
                before = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
                made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                new = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in made}
                self.allocated[name] += sum(size for storage, size in new.items() if storage not in before)
                self.moved[name] += self._moved(func, args, kwargs, result)
        return result

    def _sent(self, name: str, leaves: Sequence[Any]) -> int:
        """Of a collective: rings send (ranks - 1) / ranks of a whole."""
        sizes = [self._bytes(leaf) for leaf in leaves]
        group = next(leaf for leaf in leaves if isinstance(leaf, ScriptObject))
        ranks = dist.ProcessGroup.unbox(group).size()
        times = {"send": ranks, "recv_": 0, "allreduce_": 2 * (ranks - 1)}.get(name, ranks - 1)
        return times * max(sizes) // ranks

    def _moved(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        name = func._opname
        if name in ALLOCATES or func.is_view:
            return 0
        moved, changed = 0, []
        for i, argument in enumerate(func._schema.arguments):
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written:
                changed.append(value)
            if not (written and (argument.kwarg_only or name in OVERWRITES)):
                moved += self._bytes(value)
        # what was changed is a result, too
        results = result if isinstance(result, tuple | list) else [result]
        fresh = [r for r in results if not any(r is tensor for tensor in changed)]
        return moved + self._bytes([*changed, *fresh])

    def _bytes(self, value: Any) -> int:
        if isinstance(value, tuple | list):
            return sum(self._bytes(each) for each in value)
        counted = isinstance(value, Tensor) and self._counts(value)
        return value.numel() * value.element_size() if counted else 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Steps:
    """Reads the journal: who computes which primitives, and which ops move rows."""

    def __init__(self) -> None:
        self.primitives, self.transfers = Counter[str](), Counter[str]()

    def begin(self, step: journal.OpStep) -> None:
        if step.kind in ("product", "pass"):
            self.primitives[f"{step.name} by {step.by}"] += 1
        elif step.kind == "transfer":
            self.transfers[step.name] += 1

    def end(self, step: journal.OpStep) -> None:
        pass
