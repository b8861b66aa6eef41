"""What ranks run to compare tensor-parallel sizes to the bit: runs, logits, and what is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.segments import tp_invariance
from tpkernels import GPT, create_parallel_state, manual_seed, plan_groups
from tpkernels.checkpoints import dcp
from tpkernels.checkpoints.full_state_dict import full_state_dict
from tpkernels.groups.state import use
from tpkernels.models.config import GPTConfig
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import MASTER, STATES, StepReport, Trainer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """Of a run, by bits."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: str  # a sum of weights, fp32 weights and Adam's states
    seconds: tuple[float, ...] = field(compare=False)  # of each step

    @property
    def sum(self) -> str:
        """Twelve digits that any bit of it changes."""
        return hashlib.sha256(f"{self.losses} {self.norms} {self.state}".encode()).hexdigest()[:12]


def trained(
    config: TrainConfig,
    segments: int,
    *,
    tensor: int | None = None,
    save: Path | None = None,
    until: int | None = None,
    resume: Path | None = None,
) -> Outcome | None:
    """Train; the outcome on rank 0.

    segments: of TP-invariance; 0: plain
    tensor: tensor-parallel ranks, by default all; the others are data-parallel
    until: a step to stop after, and to save at where there is a folder; resume: one to go on from
    """
    with tp_invariance(segments):
        world = dist.get_world_size()
        state = create_parallel_state(plan_groups(world_size=world, tensor=tensor or world))
        trainer = Trainer(config, state, CPU)
        if resume is not None:
            found = dcp.latest(resume)
            assert found is not None
            trainer.resume(found)
        reports = []
        while trainer.done < (until or config.steps):
            reports.append(trainer.step())
        if save is not None:
            trainer.save(save)
        return outcome_of(trainer, reports)


def outcome_of(trainer: Trainer, reports: Sequence[StepReport]) -> Outcome | None:
    """On rank 0; called by all ranks."""
    full = {f"weight {name}": tensor for name, tensor in full_state_dict(trainer.model).items()}
    kept = trainer.optimizer.unsharded()
    for key in (MASTER, *STATES):
        values = [kept.state[parameter][key] for parameter in trainer.model.parameters()]
        full |= {f"{key} {name}": tensor for name, tensor in _full(trainer, values).items()}
    if dist.get_rank():
        return None
    losses, norms = (tuple(getattr(report, name) for report in reports) for name in ("loss", "norm"))
    seconds = tuple(report.seconds for report in reports)
    return Outcome(losses, norms, bits_of(full), seconds)


def _full(trainer: Trainer, values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Full tensors of shards in the order of parameters, as a model of fp32 holds them."""
    holder = GPT(trainer.config.model, state=trainer.state, dtype=torch.float32)
    with torch.no_grad():
        for parameter, value in zip(holder.parameters(), values, strict=True):
            parameter.copy_(value)
    return full_state_dict(holder)


def bits_of(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def answers(model: GPTConfig, dtype: torch.dtype, segments: int) -> tuple[Tensor, Tensor]:
    """Logits of a batch, and what is written after it; on all ranks."""
    with tp_invariance(segments), torch.no_grad():
        world = dist.get_world_size()
        state = create_parallel_state(plan_groups(world_size=world, tensor=world))
        with use(state):
            manual_seed(3)
        built = GPT(model, state=state, dtype=dtype).eval()
        ids = torch.arange(10).view(2, 5) * 7
        drawn = torch.Generator().manual_seed(1)
        return built(ids), built.generate(ids, 6, temperature=0.8, top_k=40, generator=drawn)
