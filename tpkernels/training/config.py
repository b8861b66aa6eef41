"""The configuration of a training run, and its files.

`TrainConfig` has one field for each option of `train`, with its default. Files are a folder of checkpoints,
checked before the first step, and JSON lines.
"""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from tpkernels import tp_invariance
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.files import parsed, read_bytes, replace_text, unused
from tpkernels.layers.block import Recompute
from tpkernels.models.config import GPTConfig
from tpkernels.ops.quantize import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The configuration of a run, independent of its ranks: they do not change the result."""

    model: GPTConfig
    data: str = field(metadata={"help": "any text, or ids: .bin (16 bits), .bin32"})
    steps: int = field(default=200, metadata={"help": "of the optimizer"})
    batch: int = field(default=16, metadata={"help": "excerpts a step, over all data-parallel ranks"})
    tokens: int = field(default=128, metadata={"help": "in an excerpt"})
    accumulate: int = field(default=1, metadata={"help": "microbatches that a rank's batch is computed in"})
    warmup: int = field(default=10, metadata={"help": "steps until the peak rate"})
    seed: int = field(default=1234, metadata={"help": "of weights, batches and dropout"})
    peak_rate: float = field(default=2e-3, metadata={"help": "learning rate after warming up"})
    floor_rate: float = field(default=2e-4, metadata={"help": "learning rate at the end"})
    weight_decay: float = field(default=0.1, metadata={"help": "of matrices"})
    max_norm: float = field(default=1.0, metadata={"help": "of all gradients, which are scaled down to it"})
    dropout: float = field(default=0.0, metadata={"help": "probability"})
    dtype: torch.dtype = field(
        default=torch.float32, metadata={"help": "of weights (default: bfloat16 on GPUs, float32 on the CPU)"}
    )
    recompute: Recompute = field(default="none", metadata={"help": "what of a block backward computes again"})
    sequence_parallel: bool = field(
        default=False, metadata={"help": "split tokens over tensor-parallel ranks"}
    )
    overlap: bool = field(default=True, metadata={"help": "transfers and products one after the other"})
    fp8: str | None = field(
        default=None,
        metadata={"help": "products of the blocks in fp8: rowwise or blockwise, with +head the head's"},
    )
    tp_invariant: int = field(
        default=0, metadata={"help": "the same bits at every --tp that divides N, a power of two; 0: not"}
    )

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "tokens", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("warmup", "peak_rate", "floor_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number of 0 or more, got {getattr(self, name)}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm: expected more than 0, got {self.max_norm}")
        if self.dropout and (self.tp_invariant or tp_invariance.default.segments):
            raise ValueError(
                f"dropout: expected 0 with TP-invariance, got {self.dropout}: each rank draws its own numbers"
            )
        if self.recipe is None:
            return
        if self.tp_invariant or tp_invariance.default.segments:
            raise ValueError(
                f"fp8: expected none with TP-invariance, got {self.fp8}: scales, and with them the bits, "
                "depend on the number of features of a rank"
            )
        if self.dtype == torch.float64:
            raise ValueError(f"fp8: expected weights in bfloat16 or float32, got float64 with {self.fp8}")

    @property
    def recipe(self) -> Recipe | None:
        """The fp8 recipe of the products; None without fp8."""
        return Recipe.named(self.fp8) if self.fp8 else None


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float) -> float:
    """Return the learning rate of step `step`, from 0: linear warm-up, then cosine decay.

    The rate is `peak` after `warmup` steps, and `floor` at the last step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= steps - 1:
        return floor
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


_ABANDONED = ".abandoned"


def checkpoint_of(folder: Path, done: int) -> Path:
    return folder / f"step-{done:08}"


def prepare_folder(folder: Path, *, resume: bool) -> None:
    """Prepare `folder` for checkpoints, or raise on all ranks; called by all of them."""
    with raise_on_all_ranks(f"--save {folder}"):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            if not resume and _steps(folder):
                raise FileExistsError(
                    f"{folder} holds checkpoints of another run; pass --resume to continue from the last, or "
                    "another folder"
                )
            for path in folder.iterdir():  # of an interrupted save; the next save clears it
                if path.name.endswith(".unfinished") and path.is_symlink():
                    raise FileExistsError(f"expected no symbolic link at {path}; remove it")


def rename_later_checkpoints(folder: Path, done: int) -> None:
    """Rename checkpoints of later steps, because this run will write them again; called by all ranks.

    They exist if a run died before `latest` named them, or if a user wrote an earlier name into `latest`.
    """
    with raise_on_all_ranks(f"--resume from {folder}, after {done} steps"):
        if dist.get_rank() == 0:
            for step, path in _steps(folder).items():
                if step > done:
                    path.rename(unused(path.with_name(path.name + _ABANDONED)))


def _steps(folder: Path) -> dict[int, Path]:
    named = ((re.fullmatch(r"step-(\d{8,})", path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in named if match}


def open_lines_after(path: Path, done: int) -> TextIO:
    """Open a file for the lines of later steps.

    Lines of steps after the last checkpoint are dropped, because these steps run again, and so are lines
    without a step, as a run leaves that is killed while it writes.
    """
    if not (done and path.is_file()):
        return path.open("w", encoding="utf-8")
    lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    replace_text(path.resolve(), "".join(f"{line}\n" for line in lines if 0 < _step_of(line) <= done))
    return path.open("a", encoding="utf-8")


def _step_of(line: str) -> int:
    """Return the step of a line, 0 if it has none."""
    try:
        found = parsed(line)
    except ValueError:
        return 0
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else 0
