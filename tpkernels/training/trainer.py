"""A training run: a model, its batches and its optimizer, one step after the other.

Batches of ids come from a file, in the same sequence for any number of ranks and from any step on. The bytes
of a text are its ids. A `.bin` file holds ids as little-endian 16-bit numbers, as many tools write them, and
a `.bin32` file as 32-bit numbers. Files are memory-mapped: they may be larger than memory.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tpkernels.interop import dcp
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.watch import Copies, Watch
from tpkernels.models.gpt import GPT
from tpkernels.ops.quantize import reuse_quantized_weights
from tpkernels.ops.replicas import from_all_ranks
from tpkernels.runtime.random import manual_seed
from tpkernels.runtime.state import ParallelState, use
from tpkernels.saying import warn
from tpkernels.tp_invariance import mode
from tpkernels.training.config import TrainConfig, learning_rate
from tpkernels.training.folder import checkpoint_of
from tpkernels.training.optimizer import ShardedAdamW
from tpkernels.training.profile import phase

_KINDS = {".bin": torch.uint16, ".bin32": torch.int32}


class TokenFile:
    """The ids of a file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"data: {self.path} is not a file")
        dtype = _KINDS.get(self.path.suffix, torch.uint8)
        bytes_ = self.path.stat().st_size
        if bytes_ % dtype.itemsize:
            raise ValueError(
                f"data: expected {dtype.itemsize} bytes an id in {self.path}, got {bytes_} bytes"
            )
        count = bytes_ // dtype.itemsize
        if not count:
            raise ValueError(f"data: {self.path} is empty")
        self.is_text = dtype == torch.uint8
        self.ids = torch.from_file(str(self.path), size=count, dtype=dtype)

    def __len__(self) -> int:
        return len(self.ids)

    def slices(self, starts: Tensor, tokens: int) -> Tensor:
        """Return the ids after each start: (starts, tokens)."""
        places = starts[:, None] + torch.arange(tokens)
        return self.ids[places].long()


class Excerpts:
    """Random excerpts of a file, step by step.

    The excerpts of a step depend on the seed and the step only, and each data-parallel rank takes its shard.
    So any number of ranks, and a run that continues at step n, see the same excerpts.
    """

    def __init__(self, file: TokenFile, *, batch: int, tokens: int, seed: int, rank: int, ranks: int) -> None:
        """batch: excerpts a step, over all data ranks; tokens: in each"""
        if batch < 1 or batch % ranks:
            raise ValueError(f"batch: expected a multiple of the {ranks} data-parallel ranks, got {batch}")
        if not 1 <= tokens < len(file):
            raise ValueError(
                f"tokens: expected 1 to {len(file) - 1}, as {file.path} has {len(file)} ids, got {tokens}"
            )
        self.file, self._tokens, self._seed = file, tokens, seed
        self._batch, self._own = batch, slice(rank * batch // ranks, (rank + 1) * batch // ranks)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return ids and the next ids, each (excerpts of this rank, tokens)."""
        # one generator a step: a resumed run need not draw earlier steps' numbers
        generator = torch.Generator().manual_seed((self._seed * 0x9E3779B1 + step) % 2**63)
        starts = torch.randint(len(self.file) - self._tokens, (self._batch,), generator=generator)
        excerpts = self.file.slices(starts[self._own], self._tokens + 1)
        return excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one step, equal on all ranks except the time."""

    step: int  # from 1
    loss: float
    norm: float  # of the gradients, before clipping
    rate: float
    seconds: float
    tokens: int  # over all ranks


class Trainer:
    """One rank of a run: its model, batches and optimizer."""

    def __init__(self, config: TrainConfig, state: ParallelState, device: torch.device) -> None:
        if config.tp_invariant not in (0, mode.segments):
            raise ValueError(
                f"tp_invariant: expected the {mode.segments} segments that this process computes with, got "
                f"{config.tp_invariant}; call tpkernels.tp_invariant before groups are made"
            )
        self.config, self.state, self.device = config, state, device
        file = TokenFile(config.data)
        ranks = state.size("dp")
        self.batches = Excerpts(
            file,
            batch=config.batch,
            tokens=config.tokens,
            seed=config.seed,
            rank=state.rank_in("dp"),
            ranks=ranks,
        )
        if config.batch // ranks % config.accumulate:
            raise ValueError(
                f"accumulate: expected a divisor of the {config.batch // ranks} excerpts of a rank, got "
                f"{config.accumulate}"
            )
        if config.sequence_parallel and config.tokens % state.size("tp"):
            raise ValueError(
                f"tokens: expected a number that the {state.size('tp')} tensor-parallel ranks divide, got "
                f"{config.tokens}"
            )
        if config.sequence_parallel and mode.segments and config.tokens % mode.segments:
            raise ValueError(
                f"tokens: expected a number that the {mode.segments} segments of TP-invariance divide, got "
                f"{config.tokens}"
            )
        with use(state):
            manual_seed(config.seed)
        self.model = GPT(
            config.model,
            dropout=config.dropout,
            recompute=config.recompute,
            sequence_parallel=config.sequence_parallel,
            overlap=config.overlap,
            quantize=config.recipe,
            state=state,
            device=device,
            dtype=config.dtype,
        )
        self.optimizer = ShardedAdamW(self.model, state, weight_decay=config.weight_decay)
        self._watch = Watch()
        self.done = 0  # steps
        self.step_context: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()

    def step(self) -> StepReport:
        """Take the next step inside `step_context(number)`, counted from 1; return its figures."""
        with self.step_context(self.done + 1):
            return self._step()

    def _step(self) -> StepReport:
        config, began = self.config, time.perf_counter()
        rate = learning_rate(
            self.done,
            steps=config.steps,
            warmup=config.warmup,
            peak=config.peak_rate,
            floor=config.floor_rate,
        )
        self.optimizer.zero()
        ids, targets = (rows.to(self.device) for rows in self.batches.at(self.done))
        total = torch.zeros(1, dtype=torch.float64, device=self.device)
        microbatches = list(zip(ids.chunk(config.accumulate), targets.chunk(config.accumulate), strict=True))
        # weights change in `optimizer.step` only; with one microbatch each is quantized once anyway
        with reuse_quantized_weights() if len(microbatches) > 1 else nullcontext():
            for number, (own_ids, own_targets) in enumerate(microbatches, start=1):
                with nullcontext() if number == len(microbatches) else self.optimizer.no_sync():
                    with phase("forward"):
                        loss = self.model(own_ids, own_targets) / len(microbatches)
                    with phase("backward"):
                        loss.backward()
                total += loss.detach()
        norm = self.optimizer.step(rate, config.max_norm)
        self._watch.after_step(self._copies)
        mean = from_all_ranks(total, self.state.process_group("dp")).mean()
        self.done += 1
        return StepReport(
            self.done, float(mean), norm, rate, time.perf_counter() - began, config.batch * config.tokens
        )

    def save(self, folder: Path) -> Path:
        """Write a checkpoint into `folder`, and its name into `latest`; called by all ranks."""
        self._watch.look(self._copies())  # a checkpoint keeps one rank's replicas
        path = checkpoint_of(folder, self.done)
        extra = {
            "done": self.done,
            "ranks": self._ranks(),
            "segments": mode.segments,
            "fp8": self._fp8,
            **self._batches(),
        }
        dcp.save(path, self.model, self.optimizer.unsharded(), extra=extra, state=self.state)
        return path

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of any number of ranks; called by all ranks."""
        full = self.optimizer.blank()
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*random streams stay as they are"
            )  # they do not: see below
            extra = dcp.load(path, self.model, full, state=self.state)
        ours = self._batches()
        if not isinstance(extra, dict) or not {"done", "ranks", *ours} <= extra.keys():
            raise ValueError(
                f"{path}: expected a checkpoint of a training run, got one with extra {extra!r:.60}"
            )
        for name, value in ours.items():
            if extra[name] != value:
                raise ValueError(
                    f"{path}: expected {name} {extra[name]}, which the run began with, got {value}: it would "
                    "go on with other batches"
                )
        segments = extra.get("segments", 0)
        if segments != mode.segments:
            warn(
                f"{path} was computed with {segments} segments of TP-invariance (0: off); this run, with "
                f"{mode.segments}, goes on with equal losses within rounding, not to the bit",
                stacklevel=2,
            )
        before = extra.get("fp8", "")
        if before != self._fp8:
            warn(
                f"{path} was computed with {before or 'no'} fp8; this run, with {self._fp8 or 'none'}, "
                "goes on with other losses",
                stacklevel=2,
            )
        self.done = extra["done"]
        self.optimizer.take(full)
        if extra["ranks"] != self._ranks():
            with use(self.state):  # other ranks' streams cannot continue, and must not begin again
                manual_seed((self.config.seed + 0x9E3779B1 * self.done) % 2**62)

    def _copies(self) -> Copies:
        """Return the tensor-parallel ranks, and the parameters that are replicated over them."""
        parameters = [p for p in self.model.parameters() if not Attributes.of(p).tensor_model_parallel]
        return self.state.ranks("tp"), parameters

    def _batches(self) -> dict[str, int]:
        """Return the options that determine the excerpts of a step."""
        config = self.config
        return {
            "seed": config.seed,
            "batch": config.batch,
            "tokens": config.tokens,
            "ids": len(self.batches.file),
        }

    @property
    def _fp8(self) -> str:
        """The recipe as text, equal for equivalent recipes."""
        return str(self.config.recipe or "")

    def _ranks(self) -> list[int]:
        return [self.state.size("tp"), self.state.size("dp")]
