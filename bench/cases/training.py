"""Whole training steps on tensor-parallel ranks: our trainer, and torch's own parallelism with torch's AdamW.

Both begin with the same weights and take the same batches: their losses are compared before any timing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from bench.case import Case, Work
from bench.cases.plain_llama import PlainLlama, split_by_torch
from tpkernels import create_parallel_state, plan_groups
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.models.config import SMALL
from tpkernels.training.config import TrainConfig, learning_rate
from tpkernels.training.trainer import Trainer

Step = Callable[[], float]  # the loss

CHECKED = 4  # steps, of which the first are alike even where gradients are wrong
DATA = Path(__file__).parents[2] / "data" / "alice.txt"


def demo_config() -> TrainConfig:
    """What `make demo` trains."""
    return TrainConfig(
        model=SMALL,
        data=str(DATA),
        steps=150,
        sequence_parallel=True,
    )


def training_case(config: TrainConfig) -> Case:
    """Both train on all ranks of the world; they have taken the first steps when they are handed over."""
    ranks = dist.get_world_size()
    state = create_parallel_state(plan_groups(world_size=ranks, tensor=ranks))
    trainer = Trainer(config, state, torch.device("cpu"))
    steps: dict[str, Step] = {"ours": lambda: trainer.step().loss, "naive": torch_step(trainer)}
    case = Case(
        Work("train", f"{config.batch}x{config.tokens}", "step", "parallelize_module", world=ranks),
        {name: partial(_loss, step) for name, step in steps.items()},
    )
    for _ in range(CHECKED - 1):  # the last is checked before timing, as of every case
        case.check()
    return case


def _loss(step: Step) -> list[Tensor]:
    return [torch.tensor(step(), dtype=torch.float64)]


def torch_step(ours: Trainer) -> Step:
    """A step of torch's own, from the weights of `ours`: loss, backward, clipping, AdamW."""
    config = ours.config
    weights = [full_state_dict(ours.model)]
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
