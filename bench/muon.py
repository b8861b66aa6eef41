"""`python -m bench muon`: a step of Muon on shards, against gathering every matrix on every rank."""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels
from bench.measure import Comparison, Seconds, Way, interleave, seconds_after_a_barrier, slowest
from tests.ranks import RankPool
from tpkernels.checkpoints.shards import TensorShard, shards_of
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region
from tpkernels.optim import Muon, hidden_matrices

MODELS = {
    "4 layers of 256": tpkernels.GPTConfig(vocab_size=512, hidden_size=256, num_layers=4, num_heads=4),
    "24 layers of 64": tpkernels.GPTConfig(vocab_size=512, hidden_size=64, num_layers=24, num_heads=4),
}


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--rounds", type=int, default=15, metavar="N")


def main(options: Namespace) -> int:
    rounds = options.rounds
    print(
        "| model | ranks | ours, ms | naive, ms | naive / ours | quartiles | processor time, naive / ours |"
    )
    print("|---|---|---|---|---|---|---|")
    for ranks in (2, 4):
        with RankPool(ranks) as pool:
            for name in MODELS:
                found = pool.run(step_seconds, name, rounds)
                wall = slowest([seconds for seconds, _ in found])
                compared = Comparison(wall["ours"], wall["naive"])
                low, high = compared.quartiles
                ours, naive = (1e3 * statistics.median(wall[way]) for way in ("ours", "naive"))
                busy = [sum(seconds[way] for _, seconds in found) for way in ("ours", "naive")]
                print(
                    f"| {name} | {ranks} | {ours:.1f} | {naive:.1f} | {compared.ratio:.2f} | {low:.2f} to "
                    f"{high:.2f} | {busy[1] / busy[0]:.2f} |",
                    flush=True,
                )
    return 0


def step_seconds(name: str, rounds: int) -> tuple[Seconds, dict[str, float]]:
    """Of each step, and this rank's processor time of all of them."""
    torch.manual_seed(1)
    ranks = dist.get_world_size()
    state = tpkernels.create_parallel_state(tpkernels.plan_groups(world_size=ranks, tensor=ranks))
    model = tpkernels.GPT(MODELS[name], state=state)
    matrices, _ = hidden_matrices(model)
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    shards = {shard.local: shard for shard in shards_of(model).values()}
    ours = Muon(matrices, model=model, state=state)
    naive = Naive([shards[parameter] for parameter in matrices], state.process_group("tp"))
    busy = {"ours": 0.0, "naive": 0.0}

    def timed(way: str, step: Way) -> None:
        start = time.process_time()
        step()
        busy[way] += time.process_time() - start

    ways: dict[str, Way] = {
        "ours": partial(timed, "ours", ours.step),
        "naive": partial(timed, "naive", naive.step),
    }
    return interleave(ways, rounds, seconds_after_a_barrier), busy


class Naive:
    """Every rank gathers every matrix in bfloat16, one by one, and runs torch's Muon on it."""

    def __init__(self, shards: Sequence[TensorShard], group: dist.ProcessGroup) -> None:
        self.shards = shards
        self.group = group
        self.momenta = [torch.zeros_like(shard.local) for shard in shards]

    @torch.no_grad()
    def step(self) -> None:
        for shard, momentum in zip(self.shards, self.momenta, strict=True):
            gradient = shard.local.grad
            assert gradient is not None
            momentum.lerp_(gradient, 0.05)
            full = nn.Parameter(torch.zeros(shard.shape, dtype=torch.bfloat16))
            full.grad = self._gathered(shard, gradient.lerp(momentum, 0.95))
            torch.optim.Muon([full], momentum=0.0, nesterov=False, weight_decay=0.0).step()
            shard.local.mul_(1 - 1e-4)
            for chunk in shard.chunks():
                chunk.view.add_(full[chunk.where])

    def _gathered(self, shard: TensorShard, own: Tensor) -> Tensor:
        if shard.dim is None:
            return own.bfloat16()
        rows = own.bfloat16().movedim(shard.dim, 0).contiguous()
        full = rows.new_empty(shard.shape)
        for rank, local in enumerate(gather_from_sequence_region(rows, self.group).chunk(self.group.size())):
            for chunk in shard.chunks(local.movedim(0, shard.dim), rank):
                full[chunk.where] = chunk.view
        return full
