"""Every kind of group on a few ranks: their plan, each rank's place in it, and one collective per kind.

torchrun --standalone --nproc-per-node 2 examples/groups.py
"""

import os
import sys

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.groups.draw import describe_rank
from tpkernels.groups.plan import KINDS
from tpkernels.groups.state import ParallelState


def sum_of_ranks(state: ParallelState) -> dict[str, int]:
    """One all-reduce in each group that this rank belongs to, checked against the plan."""
    sums: dict[str, int] = {}
    for kind in KINDS:
        if not state.is_member(kind):
            continue
        total = torch.tensor(state.rank)
        dist.all_reduce(total, group=state.process_group(kind))
        if total.item() != sum(state.ranks(kind)):
            raise RuntimeError(f"{kind} group {state.ranks(kind)} summed to {total.item()}")
        sums[kind] = int(total.item())
    return sums


def show(title: str, tensor: int, pipeline: int) -> None:
    """One way to split the world; rank 0 tells for all."""
    state = tpkernels.initialize_model_parallel(tensor, pipeline)
    told = [""] * dist.get_world_size()
    sums = ", ".join(f"{kind} {total}" for kind, total in sum_of_ranks(state).items())
    dist.all_gather_object(told, f"{describe_rank(state.plan, state.rank)}\n    sums of ranks: {sums}")
    if state.rank == 0:
        print(f"\n=== {title} ===\n{state.plan.describe()}\n\n" + "\n".join(told), flush=True)
    tpkernels.destroy_model_parallel()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    show("tensor parallel: every layer's weights are split over all ranks", world, 1)
    show("pipeline parallel: every rank holds some of the layers", 1, world)
    show("data parallel: every rank holds the whole model", 1, 1)
    if dist.get_rank() == 0:
        print(f"\nall groups of {world} ranks were formed, used and destroyed, three times over")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --standalone --nproc-per-node 2 examples/groups.py")
    main()
