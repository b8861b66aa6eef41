"""`reshard` against what it replaces, and against one copy of the bytes that it moves, interleaved.

torchrun --nproc-per-node 2 -m bench.cases.reshard [--processor]

With --processor times are the calling thread's on its processor, which other processes disturb less.

    reshard      from one tensor-parallel size to another, on the same ranks
    checkpoint   dcp.save and dcp.load, in a folder that lies in memory
    gather       full_state_dict on rank 0, its broadcast, load_full_state_dict
    memcpy       each rank copies as many bytes as it gets, from its own memory to its own
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels import GPT, create_parallel_state, model_config, plan_groups, reshard, use
from tpkernels.checkpoints import dcp
from tpkernels.checkpoints.full_state_dict import full_state_dict, load_full_state_dict

ROUNDS = 9
LAYOUTS = ((2, 1), (1, 2))


def built_over(tensor: int) -> GPT:
    config = model_config("llama3-8b", hidden_size=1024, num_layers=6, num_heads=16, num_kv_heads=8)
    with use(create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))):
        return GPT(config.with_sizes(ffn_hidden_size=2816, vocab_size=16384))


def gather(model: GPT, other: GPT) -> None:
    full = full_state_dict(model)
    known = [[(name, tensor.shape, tensor.dtype) for name, tensor in full.items()]]
    dist.broadcast_object_list(known)
    for name, shape, dtype in known[0]:
        full.setdefault(name, torch.empty(shape, dtype=dtype))
        dist.broadcast(full[name], 0)
    load_full_state_dict(other, full)


def ways(model: GPT, other: GPT, folder: Path) -> dict[str, Callable[[], object]]:
    numbers = count()
    moved = reshard(model, to=other)
    received = torch.ones(moved.received + moved.copied, dtype=torch.uint8)
    into = torch.zeros_like(received)

    def checkpoint() -> None:
        path = folder / str(next(numbers))
        dcp.save(path, model)
        dcp.load(path, other)

    return {
        "reshard": lambda: reshard(model, to=other),
        "checkpoint": checkpoint,
        "gather": lambda: gather(model, other),
        "memcpy": lambda: into.copy_(received),
    }


def seconds_of(ways: dict[str, Callable[[], object]], folder: Path) -> dict[str, list[float]]:
    """Of the slowest rank, by way."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    clock = time.thread_time if "--processor" in sys.argv else time.perf_counter
    for turn in range(ROUNDS + 1):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            started = clock()
            ways[way]()
            took = torch.tensor(clock() - started)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[way].append(took.item())
            if dist.get_rank() == 0:
                for each in folder.iterdir():
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
    return {way: sorted(times[1:]) for way, times in found.items()}


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = [tempfile.mkdtemp(dir="/dev/shm")]
    dist.broadcast_object_list(folder)
    for before, after in LAYOUTS:
        model, other = built_over(before), built_over(after)
        measured = ways(model, other, Path(folder[0]))
        moved = reshard(model, to=other)
        times = seconds_of(measured, Path(folder[0]))
        if dist.get_rank() == 0:
            print(
                f"tp={before} to tp={after}: {sum(p.numel() for p in other.parameters()) / 1e6:.0f} M "
                f"parameters a rank, {moved.received / 2**20:.0f} MiB received, "
                f"{moved.copied / 2**20:.0f} MiB copied"
            )
            for way, its in times.items():
                low, middle, high = (its[len(its) * part // 4] for part in (1, 2, 3))
                ratio = middle / times["reshard"][len(its) // 2]
                print(
                    f"  {way:12} {middle:7.3f} s ({low:.3f} to {high:.3f})  {ratio:6.2f} of reshard",
                    flush=True,
                )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
