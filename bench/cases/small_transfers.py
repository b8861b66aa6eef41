"""From which size on memory that ranks share is faster than sockets: both in one run, interleaved.

torchrun --nproc-per-node 2 -m bench.cases.small_transfers
"""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tpkernels.comm.transports import select
from tpkernels.ops.tensor_parallel.parallel import start_rows, start_sum

ROUNDS = 150
SHARDS = ((1, 16), (4, 64), (16, 256), (32, 256), (64, 256), (64, 512), (128, 512), (256, 512), (512, 512))
WAYS = ("c10d", "shared")


def transfers_of(shard: Tensor, ranks: int) -> dict[str, Callable[[dist.ProcessGroup], Tensor]]:
    rows, cols = ranks * shard.shape[0], shard.shape[1]
    partial = torch.randn(rows, cols)

    def total(group: dist.ProcessGroup, scatter: bool) -> Tensor:
        return start_sum(
            "sum", partial.__getitem__, rows, cols, shard, group, scatter=scatter, overlap=True
        ).wait()

    return {
        "gather": lambda group: start_rows("gather", "x", shard, group).wait(),
        "reduce": lambda group: total(group, True),
        "all-reduce": lambda group: total(group, False),
    }


def low_times(call: Callable[[dist.ProcessGroup], Tensor], groups: dict[str, dist.ProcessGroup]) -> Tensor:
    """The lowest tenth of each way's times, in microseconds, by the slowest rank."""
    seconds: dict[str, list[float]] = {way: [] for way in groups}
    for turn in range(ROUNDS + 2):
        for way in WAYS[:: 1 if turn % 2 else -1]:
            dist.barrier()
            started = time.perf_counter()
            call(groups[way])
            seconds[way].append(time.perf_counter() - started)
    low = torch.tensor([1e6 * sorted(seconds[way][2:])[ROUNDS // 10] for way in WAYS])
    dist.all_reduce(low, dist.ReduceOp.MAX)
    return low


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks, groups = dist.get_world_size(), {}
    for way in WAYS:
        groups[way] = dist.new_group()
        assert isinstance(groups[way], dist.ProcessGroup)
        with patch.object(select, "requested_transport", way):
            start_rows("opening", "x", torch.zeros(1, 1), groups[way]).wait()
    for rows, cols in SHARDS:
        for name, call in transfers_of(torch.randn(rows, cols), ranks).items():
            c10d, shared = low_times(call, groups).tolist()
            if dist.get_rank() == 0:
                print(
                    f"{name:10} of shards of {4 * rows * cols / 1024:6.1f} KiB: c10d {c10d:6.0f} us, shared "
                    f"{shared:6.0f} us, ratio {shared / c10d:.2f}",
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
