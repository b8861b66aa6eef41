"""Times an MLP over each transport, and reports the choice of TPKERNELS_TRANSPORT=auto."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.cli.qualify_world import Check, QualifyWorld
from tpkernels.comm.groups import start_all_gather, start_reduce_scatter
from tpkernels.ops import parallel_mlp

ROUNDS, ROUNDS_QUICK, WARM_UPS = 15, 3, 2
NAIVE = "naive"  # all-gather, products, reduce-scatter, one after the other, by torch
GPU_SIZES, CPU_SIZES = (8192, 4096, 14336), (1024, 512, 1024)  # tokens, features, features between


def check_times(world: QualifyWorld) -> Iterator[Check]:
    sizes = GPU_SIZES if world.on_gpu else CPU_SIZES
    operands = _operands(world, *sizes)
    possible = [name for name, obstacle in world.transports().items() if not obstacle]
    with ExitStack() as opened:
        ways: dict[str, Callable[[], Tensor]] = {}
        for transport in possible:
            group = opened.enter_context(world.group_over(transport))
            ways[transport] = partial(_ours, world, transport, operands, group)
        if world.ranks > 1:
            ways[NAIVE] = partial(_naive, operands, opened.enter_context(world.group_over("c10d")))
        else:
            ways["alone"] = partial(
                _ours, world, "c10d", operands, opened.enter_context(world.group_over("c10d"))
            )
        name = f"MLP {'x'.join(map(str, sizes))}"
        yield world.timed("times", name, partial(_interleaved, world, ways), "forward")


def _operands(world: QualifyWorld, tokens: int, features: int, between: int) -> list[Tensor]:
    """Return this rank's x, w_up and w_down."""
    make = torch.Generator(world.device).manual_seed(world.seed)
    dtype = torch.bfloat16 if world.on_gpu else torch.float32
    ranks = world.ranks
    shapes = (tokens // ranks, features), (between // ranks, features), (features, between // ranks)
    return [torch.randn(s, generator=make, device=world.device).mul_(s[1] ** -0.5).to(dtype) for s in shapes]


def _ours(world: QualifyWorld, transport: str, operands: list[Tensor], group: ProcessGroup) -> Tensor:
    x, w, w2 = operands
    with world.asking_for(transport):
        return parallel_mlp(x, w, None, w2, None, group, sequence_parallel=True)


def _naive(operands: list[Tensor], group: ProcessGroup) -> Tensor:
    x, w, w2 = operands
    full = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    start_all_gather(group, full, x).wait()
    partial_sum = functional.linear(functional.gelu(functional.linear(full, w), approximate="tanh"), w2)
    y = torch.empty_like(x)
    start_reduce_scatter(group, y, partial_sum, dist.ReduceOp.SUM, None).wait()
    return y


def _interleaved(world: QualifyWorld, ways: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Return milliseconds of each way in each round; each round begins with another way."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    with torch.no_grad():
        for number in range(WARM_UPS + (ROUNDS_QUICK if world.quick else ROUNDS)):
            for way in (*order[number % len(order) :], *order[: number % len(order)]):
                world.synchronize()
                dist.barrier()
                began = time.perf_counter()
                ways[way]()
                world.synchronize()
                if number >= WARM_UPS:
                    times[way].append(1e3 * (time.perf_counter() - began))
    return times


def auto_line(world: QualifyWorld, times: dict[str, float]) -> str:
    """Return in a line the transport that TPKERNELS_TRANSPORT=auto takes for the timed MLP, and why."""
    if world.ranks == 1:
        return "auto: nothing to send, a rank is alone"
    operands, heard = _operands(world, *(GPU_SIZES if world.on_gpu else CPU_SIZES)), _Heard()
    logger = logging.getLogger("tpkernels.choices")  # in which transports say what they chose, and why
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with world.group_over("auto") as group, torch.no_grad():
            faults, _ = world.all_do(partial(_ours, world, "auto", operands, group))
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    if faults:
        return f"auto: fails here: {'; '.join(faults)}"
    chosen = "; ".join(dict.fromkeys(heard.of_transports())) or "c10d (the default)"
    measured = ", ".join(f"{way} {ms:.3g} ms" for way, ms in times.items())
    return f"auto: {chosen}{'; measured: ' * bool(measured)}{measured}"


class _Heard(logging.Handler):
    """Keeps logged messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def of_transports(self) -> list[str]:
        """Return each choice with its reason, without its group."""
        return [text.rpartition(" ranks: ")[2] for text in self.messages if "process group" in text]
