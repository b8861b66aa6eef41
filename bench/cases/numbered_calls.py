"""What numbering calls costs `column_linear` on tiny tensors: with and without it, in one run, in turn.

torchrun --nproc-per-node 2 -m bench.cases.numbered_calls

Left out, in turn, is what every call pays: the number, the tag, the guard round a step, what is noted for who
watches, and the look at whether the group may be used. All messages bear one tag then, which nothing checks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm import calls, groups
from tpkernels.ops import column_linear
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.column_linear import column_forward, column_gradients

BLOCKS, CALLS = 200, 25


@contextmanager
def unnumbered(group: dist.ProcessGroup) -> Iterator[None]:
    """Calls as they would be without numbers."""
    one = calls.begin("column_linear", "all calls", group)
    with ExitStack() as stack:
        for where, name, instead in (
            (parallel, "begin_call", lambda *_: one),
            (parallel, "required_group", lambda group, op="": group),
            (groups, "required_group", lambda group, argument="", op="": group),
            (calls.Call, "wait_for", lambda self, wait: wait()),
            (column_forward, "run", column_forward.run.__wrapped__),  # type: ignore[attr-defined]
            (column_gradients, "run", column_gradients.run.__wrapped__),  # type: ignore[attr-defined]
        ):
            stack.enter_context(patch.object(where, name, instead))
        yield


def low_time(x: Tensor, w: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> float:
    """The lowest fifth of some forwards and backwards, in seconds."""
    seconds = []
    for _ in range(CALLS + 2):
        started = time.perf_counter()
        y = column_linear(x, w, None, group, sequence_parallel=sequence_parallel)
        y.backward(torch.ones_like(y))
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[2:])[CALLS // 5]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    for sequence_parallel in (False, True):
        low_time(x, w, group, sequence_parallel)
        order, ratios, numbered_times = random.Random(1), [], []
        for _ in range(BLOCKS):
            times = {}
            for numbered in order.sample([True, False], 2):
                with ExitStack() as stack:
                    if not numbered:
                        stack.enter_context(unnumbered(group))
                    times[numbered] = low_time(x, w, group, sequence_parallel)
            ratios.append(times[True] / times[False])
            numbered_times.append(times[True])
        low, middle, high = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
        if dist.get_rank() == 0:
            how = "with" if sequence_parallel else "without"
            microseconds = 1e6 * sorted(numbered_times)[BLOCKS // 2]
            print(
                f"{how} sequence parallelism: {microseconds:.0f} µs, {middle:.3f} times without numbers "
                f"(interquartile range {low:.3f} to {high:.3f})"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
