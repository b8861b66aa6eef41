"""What ranks run in tests of the transport that nobody has asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ops.parallel_behaviour import block, operands_of, with_gradients
from tests.ops.parallel_cases import Setting, prepare
from tests.ops.transport_cases import using
from tpkernels.comm.calls import GroupCalls
from tpkernels.comm.transports import select
from tpkernels.dispatch import backends
from tpkernels.ops.tensor_parallel.parallel import start_rows, start_sum


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def heard(name: str) -> Iterator[list[str]]:
    """What a logger says until the end."""
    logger, lines = logging.getLogger(name), Lines()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines.said
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
        logger.propagate = propagate


def opened(group: dist.ProcessGroup) -> list[tuple[str, tuple[int, int]]]:
    """(what it is for, the shape of a shard) of each exchange that is open."""
    return [key[:2] for key in select._of_group[id(group)]._open]


def on_this_way(how: str) -> Any:
    """What makes this rank another one than its peers see in the plain case."""
    rank = dist.get_rank()
    ways = {
        "interpreted on one rank": lambda: patch.object(backends, "backend", "triton" if rank else "torch"),
        "no tags": lambda: patch.object(GroupCalls, "matches_tags", lambda self, device: False),
        "two networks": lambda: patch.object(os, "readlink", lambda path: f"{path} of {rank}"),
        "small": lambda: prepare(Setting(small_pieces=False)),
    }
    return ways.get(how, nullcontext)() or nullcontext()


def block_over(how: str) -> tuple[list[str], float, list[str]]:
    """(what exchanges a block opened are for, how far it is from c10d, why)."""
    prepare(Setting())
    group, operands = dist.new_group(), operands_of(0)
    with using("c10d"):
        expected = with_gradients(lambda *t: block(*t, sequence_parallel=True, group=group), operands)
    group = dist.new_group()
    place = " apart" if how == "two machines" else ""
    with using(f"auto{place}"), on_this_way(how), heard("tpkernels.choices") as said:
        found = with_gradients(lambda *t: block(*t, sequence_parallel=True, group=group), operands)
    off = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    return sorted({purpose for purpose, _ in opened(group)}), off, said


def _moved(group: dist.ProcessGroup, dtype: torch.dtype, rows: int, cols: int = 8) -> bool:
    """Whether a gather, a reduce and an all-reduce of so many rows a rank are exact; whole numbers are."""
    rank, ranks = dist.get_rank(group), group.size()
    shards = [(torch.arange(rows * cols).view(rows, cols) % 7 + owner).to(dtype) for owner in range(ranks)]
    full = torch.cat(shards)
    gathered = start_rows("op", "x", shards[rank], group).wait()
    options: dict[str, Any] = {"like": full, "group": group, "overlap": True}

    def partial_of(chunk: slice) -> Tensor:
        return full[chunk] * (rank + 1)

    count, times = full.shape[0], sum(range(1, ranks + 1))
    ours = start_sum("op", partial_of, count, cols, scatter=True, **options).wait()
    total = start_sum("op", partial_of, count, cols, scatter=False, **options).wait()
    return bool(gathered.equal(full) and ours.equal(shards[rank] * times) and total.equal(full * times))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def all_kinds_of_tensors() -> tuple[dict[str, bool], int]:
    """Whether each arrives as it should, and how many shapes and dtypes moved through shared memory."""
    prepare(Setting())
    group = dist.group.WORLD
    with using("auto"):
        exact = {str(dtype): _moved(group, dtype, 4) for dtype in DTYPES}
        exact["no rows"] = _moved(group, torch.float32, 0)
        exact["no columns"] = _moved(group, torch.float32, 4, 0)
        odd = torch.ones(5, 8)
        total = start_sum("op", odd.__getitem__, 5, 8, odd, group, scatter=False, overlap=True).wait()
        exact["rows that ranks do not divide"] = total.equal(odd * group.size())
        return exact, len(opened(group))


def more_shapes_than_may_be_open() -> tuple[list[bool], list[int], list[str]]:
    """(whether all is exact, rows of what stays open, why a further one is not)."""
    prepare(Setting())
    group = dist.group.WORLD
    with using("auto"), patch.object(select, "MOST_OPEN", 3), heard("tpkernels.choices") as said:
        x = torch.ones(1, 64)
        exact = [
            start_rows("op", "x", x.expand(rows, 64), group).wait().shape[0] == rows * group.size()
            for rows in (2, 3, 4, 5, 6, 2, 5)
        ]
        return exact, [rows for _, (rows, _) in opened(group)], said


def sums_that_are_half_open() -> tuple[list[bool], list[str]]:
    """(whether all-reduces are exact, what is open for them) if not all that they need may be open."""
    prepare(Setting())
    exact, open_for = [], []
    for most in (1, 2):
        group = dist.new_group()
        with using("auto"), patch.object(select, "MOST_OPEN", most):
            start_rows("op", "x", torch.ones(4 * most, 8), group).wait()  # opens a gather
            x = torch.ones(16 * group.size(), 8)
            total = start_sum("op", x.__getitem__, *x.shape, x, group, scatter=False, overlap=True).wait()
            exact.append(total.equal(x * group.size()))
        open_for.append(" ".join(purpose for purpose, _ in opened(group)))
    return exact, open_for


def cannot_open_on_one_rank() -> tuple[list[bool], list[str], int]:
    """(whether all calls are exact, what is said, how many exchanges are open) if a rank lacks memory."""
    prepare(Setting())

    def fail(*_: object) -> None:
        raise MemoryError("planted")

    group = dist.group.WORLD
    with using("auto"), heard("tpkernels.comm") as said:
        with patch.object(os, "ftruncate", fail) if dist.get_rank() == 1 else nullcontext():
            exact = [_moved(group, torch.float32, 4)]
        exact.append(_moved(group, torch.float32, 6))  # also when there would be memory again
        return exact, said, len(opened(group))
