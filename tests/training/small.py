"""A small run: its settings, and its trainer on each rank."""

import torch

from tests.models.small import LLAMA
from tpkernels import create_parallel_state, plan_groups
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

CPU = torch.device("cpu")
TINY = LLAMA.with_sizes(vocab_size=256)


def config_for(text, **changes):
    usual = {"model": TINY, "data": str(text), "steps": 6, "batch": 8, "tokens": 8, "warmup": 2, "seed": 5}
    return TrainConfig(**{**usual, "dtype": torch.float64, **changes})


def trainer_for(config, tensor=None):
    """tensor: tensor-parallel ranks, by default all; the others are data-parallel"""
    world = torch.distributed.get_world_size()
    return Trainer(config, create_parallel_state(plan_groups(world_size=world, tensor=tensor or world)), CPU)


def losses_of(trainer, steps):
    return [trainer.step().loss for _ in range(steps)]
