"""How much of the transfers of column and row linear hides behind their products, on a throttled link.

Three ways are timed in turn: one after the other (`overlap=False`), overlapped, and the floor: the same
products and the same bytes at once, neither waiting for the other. The floor is measured, because moving
bytes takes processor time, too: a product lasts longer during a transfer. The products' and the transfers'
own times are reported, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.case import Case, Computation, Work
from bench.cases.blocking import world
from bench.measure import Seconds, Way, interleave
from bench.slow_link import throttle
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.comm.transports.rows import Terms
from tpkernels.ops import column_linear, row_linear

TOKENS, IN, OUT_SHARD = 2048, 1024, 6144  # 4 MiB a rank travel, and a product is 26 GFLOP
ROUNDS = 11


def listed(seconds: Seconds) -> str:
    """Efficiency is what overlap saves, in parts of what it could."""
    naive, ours, floor = (low(seconds[name]) for name in ("naive", "ours", "floor"))
    times = ", ".join(f"{name} {1e3 * low(taken):.0f} ms" for name, taken in seconds.items())
    told = f"second-lowest of {len(seconds['ours'])} rounds"
    return f"efficiency {(naive - ours) / (naive - floor):.2f}: {times} ({told})"


def low(seconds: Sequence[float]) -> float:
    """The second-lowest: the lowest may be a burst that the link let through."""
    return sorted(seconds)[1]


def measure(case: str, megabits: float, rounds: int = ROUNDS) -> tuple[Work, Seconds]:
    """On both ranks: one of column or row, forward or backward, "column forward"."""
    ways, wire_bytes = _ways(case)
    kind, direction = case.split()
    work = Work(
        op=f"{kind}_linear",
        shape=f"{TOKENS}x{IN}x{OUT_SHARD}-slow_link{megabits:g}mbit-world2",
        pass_=direction,
        naive="the same without overlap",
        world=2,
        flops=(2 if direction == "backward" else 1) * 2 * TOKENS * IN * OUT_SHARD,
        wire_bytes=wire_bytes,
    )
    Case(work, {name: _computation(ways[name]) for name in ("ours", "naive")}).check()
    throttle(1e6 * megabits)
    return work, interleave(ways, rounds, seconds_of_slowest)


def _ways(case: str) -> tuple[dict[str, tuple[Way, Computation]], int]:
    """Each way with what is done before it without being timed, and the bytes that a rank sends."""
    group = world()
    tp = TensorParallel(group, sequence_parallel=True)
    torch.manual_seed(0)
    kind, direction = case.split()
    x_shard, x = torch.randn(TOKENS // 2, IN), torch.randn(TOKENS, IN)
    h = torch.randn(TOKENS, OUT_SHARD)
    w_up, w_down = torch.randn(OUT_SHARD, IN) / 32, torch.randn(IN, OUT_SHARD) / 64
    leaf, weight, dy = (x_shard, w_up, h) if kind == "column" else (h, w_down, x_shard)
    leaf, weight = leaf.requires_grad_(), weight.requires_grad_()
    op = column_linear if kind == "column" else row_linear
    made: list[Tensor] = []

    def nothing() -> None: ...

    def forward(overlap: bool) -> Sequence[Tensor]:
        made[:] = [op(leaf, weight, None, group, sequence_parallel=True, overlap=overlap)]
        return made

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(made[0], [leaf, weight], dy)

    all_x, all_dy, fixed = (x, h, weight.detach()) if kind == "column" else (h, x, weight.detach())

    def products() -> Sequence[Tensor]:
        if direction == "forward":
            return [all_x @ fixed.T]
        return [all_dy @ fixed, all_dy.T @ all_x]

    gathers = direction == "backward" or kind == "column"
    reduces = (kind == "column") == (direction == "backward")

    def transfers(meanwhile: Callable[[], Sequence[Tensor]] = lambda: []) -> Sequence[Tensor]:
        gathering = tp.gather("benchmark", "x", x_shard.detach()) if gathers else None
        reducing = tp.reduce("benchmark", Terms(TOKENS, IN, x, x.__getitem__)) if reduces else None
        found = [*meanwhile()]
        if gathering is not None:
            found.append(gathering.all())
        if reducing is not None:
            found.append(reducing.wait())
        return found

    def way(overlap: bool) -> tuple[Way, Computation]:
        if direction == "forward":
            return nothing, lambda: forward(overlap)
        return lambda: forward(overlap), backward

    return {
        "naive": way(False),
        "ours": way(True),
        "floor": (nothing, lambda: transfers(products)),
        "products": (nothing, products),
        "transfers": (nothing, transfers),
    }, x_shard.nbytes * (gathers + reduces)


def _computation(way: tuple[Way, Computation]) -> Computation:
    prepare, timed = way

    def run() -> Sequence[Tensor]:
        prepare()
        return timed()

    return run


def seconds_of_slowest(way: tuple[Way, Way]) -> float:
    """Of the slowest rank, known to all."""
    prepare, timed = way
    prepare()
    dist.barrier()
    start = time.perf_counter()
    timed()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()
