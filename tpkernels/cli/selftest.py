"""The part of `doctor` that starts two processes, as `train` starts its ranks, and lets them talk."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tpkernels.runtime.initialize import destroy_model_parallel, initialize_model_parallel
from tpkernels.training.launch import hold_lifeline, join_world, run_ranks

RANKS = 2
AS_RANK = "rank"


def rank_main() -> None:
    hold_lifeline()
    torch.set_num_threads(1)
    join_world("gloo", timedelta(seconds=30))
    state = initialize_model_parallel(tensor_model_parallel_size=RANKS)
    rank = dist.get_rank()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=state.process_group("tp"))
    if total.item() != 3:
        raise RuntimeError(f"all-reduce of 1 and 2 gave {total.item()} on rank {rank}")
    destroy_model_parallel()
    dist.destroy_process_group()


def main() -> int:
    if AS_RANK in sys.argv:
        rank_main()
        return 0
    start = time.perf_counter()
    code = run_ranks([sys.executable, "-m", "tpkernels.cli.selftest", AS_RANK], RANKS)
    if not code:
        print(f"{RANKS} gloo processes formed a group and agreed in {time.perf_counter() - start:.1f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
