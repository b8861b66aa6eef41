"""The part of `doctor` that starts two processes and lets them talk."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tpkernels.runtime.initialize import destroy_model_parallel, initialize_model_parallel

RANKS = 2


def rank_main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    state = initialize_model_parallel(tensor_model_parallel_size=RANKS)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=state.process_group("tp"))
    if total.item() != 3:
        raise RuntimeError(f"all-reduce of 1 and 2 gave {total.item()} on rank {rank}")
    destroy_model_parallel()
    dist.destroy_process_group()


def main() -> None:
    # gloo resolves the host's name otherwise, and many containers cannot
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start = time.perf_counter()
    with TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(rank_main, args=(store,), nprocs=RANKS)
    print(f"{RANKS} gloo processes formed a group and agreed in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
