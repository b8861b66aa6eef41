"""Whole training steps on tensor-parallel ranks: our trainer, and torch's own parallelism with torch's AdamW.

Both begin with the same weights and take the same batches, so that losses can be compared before anything is
timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from bench.cases.plain_llama import PlainLlama, split_by_torch
from tpkernels import GPTConfig, create_parallel_state, plan_groups
from tpkernels.cli.train import SMALL
from tpkernels.interop.whole import whole_state_dict
from tpkernels.training.schedule import learning_rate
from tpkernels.training.trainer import TrainConfig, Trainer

Step = Callable[[], float]  # the loss

DATA = Path(__file__).parents[2] / "data" / "alice.txt"


@dataclass(frozen=True)
class Timed:
    losses: list[tuple[float, float]]  # of the first steps, ours and torch's
    seconds: dict[str, list[float]]  # of the steps after them
    processor_seconds: dict[str, list[float]]  # of all threads of this rank, in these steps


def demo_config() -> TrainConfig:
    """What `make demo` trains."""
    return TrainConfig(
        model=GPTConfig(**SMALL),
        data=str(DATA),
        steps=150,
        batch=16,
        tokens=128,
        peak_rate=2e-3,
        floor_rate=2e-4,
        sequence_parallel=True,
    )


def time_training(config: TrainConfig, checked: int, rounds: int) -> Timed:
    """Both train on all ranks of the world, step by step in turn."""
    state = create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=dist.get_world_size()))
    trainer = Trainer(config, state, torch.device("cpu"))
    torchs = torch_step(trainer)
    ways: dict[str, Step] = {"ours": lambda: trainer.step().loss, "torch": torchs}
    losses = [(ways["ours"](), ways["torch"]()) for _ in range(checked)]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor_seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds):
        for name in list(ways)[:: -1 if round_ % 2 else 1]:
            dist.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
            processor_seconds[name].append(time.process_time() - processor_start)
    return Timed(losses, seconds, processor_seconds)


def torch_step(ours: Trainer) -> Step:
    """A step of torch's own, from the weights of `ours`: loss, backward, clipping, AdamW."""
    config = ours.config
    weights = [whole_state_dict(ours.model)]
    dist.broadcast_object_list(weights)
    model = PlainLlama(config.model, config.tokens)
    model.take(weights[0])
    split_by_torch(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    adam = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,  # the fastest of torch's three here
    )
    done = 0

    def step() -> float:
        nonlocal done
        rate = learning_rate(
            done, steps=config.steps, warmup=config.warmup, peak=config.peak_rate, floor=config.floor_rate
        )
        for group in adam.param_groups:
            group["lr"] = rate
        ids, targets = (part.t().contiguous() for part in ours.batches.at(done))
        adam.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.max_norm)
        adam.step()
        done += 1
        value = loss.detach()
        return (value.full_tensor() if isinstance(value, DTensor) else value).item()

    return step
