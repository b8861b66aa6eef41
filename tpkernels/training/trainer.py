"""A training run: a model, its batches and its optimizer, one step after the other.

Batches of ids come from a file, in the same sequence for any number of ranks and from any step on. The bytes
of a text are its ids. A `.bin` file holds ids as little-endian 16-bit numbers, as many tools write them, and
a `.bin32` file as 32-bit numbers. Files are memory-mapped: they may be larger than memory.

AdamW's states are sharded over data-parallel ranks: each updates its shard, then all gather parameters.
Gradients are reduced in buckets during backward, and each rank keeps its shard of each. States and a copy of
the parameters are fp32 and exist for that shard only: 12 bytes an element, divided by the number of ranks.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tpkernels import tp_invariance
from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.checkpoints import dcp
from tpkernels.errors import warn
from tpkernels.groups.random import manual_seed
from tpkernels.groups.state import ParallelState, use
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.clip import exact_norm
from tpkernels.layers.replicas import Copies, Watch
from tpkernels.models.gpt import GPT
from tpkernels.ops.quantize import reuse_quantized_weights
from tpkernels.ops.replicas import from_all_ranks
from tpkernels.training.config import TrainConfig, checkpoint_of, learning_rate
from tpkernels.training.profile import phase

STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"  # a parameter in fp32
BETAS, EPS = (0.9, 0.95), 1e-8


class ShardedAdamW:
    """AdamW over the tensor- and data-parallel ranks of `state`, with sharded states."""

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        *,
        weight_decay: float = 0.1,
    ) -> None:
        """weight_decay: for matrices; vectors do not decay"""
        self._state = state
        self._is_invariant = tp_invariance.default.segments > 0
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        tensor_group = state.process_group("tp") if state.size("tp") > 1 else None
        self.buckets = GradientBuckets(
            self._named,
            state.process_group("dp"),
            reduce="reduce_scatter",
            grad_dtype=torch.float32,
            tensor_parallel_group=tensor_group,
        )
        self._shards = [nn.Parameter(shard.float()) for shard in self.buckets.parameter_shards()]
        first = state.rank_in("tp") == 0
        self._counted = self._runs(lambda p: first or Attributes.of(p).tensor_model_parallel)
        self._decaying = self._runs(lambda p: p.ndim > 1)
        self._weight_decay = weight_decay
        self._adam = torch.optim.AdamW(self._shards, lr=0.0, betas=BETAS, eps=EPS, weight_decay=0.0)

    def zero(self) -> None:
        self.buckets.zero()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for all backwards of a step except the last."""
        return self.buckets.no_sync()

    @phase("optimizer step")
    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float) -> float:
        """Update parameters by all ranks' gradients, clipped to `max_norm`; return the unclipped norm."""
        self.buckets.finish()
        gradients = self.buckets.gradient_shards()
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm}: the step is not taken")
        scale = min(1.0, max_norm / (norm + 1e-6))
        for shard, gradient, decaying in zip(self._shards, gradients, self._decaying, strict=True):
            shard.grad = gradient.mul_(scale)
            for run in decaying:
                shard[run].mul_(1 - learning_rate * self._weight_decay)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        if self._is_invariant:
            exact_step(self._adam)
        else:
            self._adam.step()
        self.buckets.gather_parameters(self._shards)
        return norm

    def unsharded(self) -> torch.optim.AdamW:
        """Gather a full AdamW for a checkpoint, with states and fp32 parameters.

        Called by all ranks. It takes 12 bytes an element on each rank.
        """
        whole = self.blank()
        wholes = {MASTER: self.buckets.unshard(self._shards)}
        if self._adam.state:
            for key in STATES:
                wholes[key] = self.buckets.unshard([self._adam.state[shard][key] for shard in self._shards])
        for index, (_, parameter) in enumerate(self._named):
            whole.state[parameter] = {key: tensors[index] for key, tensors in wholes.items()}
            if self._adam.state:
                whole.state[parameter]["step"] = self._adam.state[self._shards[0]]["step"].clone()
        return whole

    def blank(self) -> torch.optim.AdamW:
        """Return a full AdamW without states, into which a checkpoint is loaded."""
        return torch.optim.AdamW([parameter for _, parameter in self._named], lr=0.0, weight_decay=0.0)

    @torch.no_grad()
    def take(self, whole: torch.optim.AdamW) -> None:
        """Take over the states of an `unsharded` optimizer, on any number of ranks."""
        kept = [whole.state[parameter] for _, parameter in self._named]
        expected = {MASTER, *((*STATES, "step") if "step" in kept[0] else ())}
        for (name, _), state in zip(self._named, kept, strict=True):
            if not expected <= state.keys():
                raise ValueError(
                    f"optimizer: expected {sorted(expected)} of '{name}', as runs save, got {sorted(state)}"
                )
        for shard, value in zip(
            self._shards, self.buckets.shard([state[MASTER] for state in kept]), strict=True
        ):
            shard.copy_(value)
        self._adam.state.clear()
        if "step" in kept[0]:
            for shard in self._shards:
                self._adam.state[shard] = {"step": kept[0]["step"].clone()}
            for key in STATES:
                cut = self.buckets.shard([state[key] for state in kept])
                for shard, value in zip(self._shards, cut, strict=True):
                    self._adam.state[shard][key] = value
        self.buckets.gather_parameters(self._shards)

    def _runs(self, holds: Callable[[nn.Parameter], bool]) -> list[list[slice]]:
        """Return, for each shard, slices of the elements whose parameters fulfil `holds`."""
        marks = self.buckets.shard(
            [torch.tensor(holds(p), device=p.device).expand(p.shape) for _, p in self._named]
        )
        return [_runs_of(mark) for mark in marks]

    @phase("clipping: norm of the gradients")
    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Return the norm over the full model: all ranks' shards, replicated parameters once."""
        groups = [self._state.process_group(kind) for kind in ("dp", "tp")]
        if self._is_invariant:
            own = [g[run] for g, counted in zip(gradients, self._counted, strict=True) for run in counted]
            return exact_norm(own, gradients[0].device, groups)
        square = torch.zeros(1, dtype=torch.float64, device=gradients[0].device)
        for gradient, counted in zip(gradients, self._counted, strict=True):
            for run in counted:
                square += torch.linalg.vector_norm(gradient[run], dtype=torch.float64).square()
        for group in groups:
            square = from_all_ranks(square, group).sum(0)
        return float(square.sqrt())


def _runs_of(mark: Tensor) -> list[slice]:
    """Return the slices in which a mark is true."""
    values, lengths = mark.unique_consecutive(return_counts=True)
    stops = lengths.cumsum(0).tolist()
    runs = zip(values.tolist(), lengths.tolist(), stops, strict=True)
    return [slice(stop - length, stop) for value, length, stop in runs if value]


@torch.no_grad()
def exact_step(adam: torch.optim.AdamW) -> None:
    """Compute the step of `adam.step()` by operations that each round once, as in IEEE 754.

    torch's own step multiplies and adds in one kernel, where a compiler may round once (fma) or twice. A
    kernel's vectors and its remaining elements are compiled separately, so an element's result may depend on
    its position in a shard, and with it on the tensor-parallel size. This step's results do not.

    adam: without weight decay, amsgrad and maximize
    """
    for group in adam.param_groups:
        (beta1, beta2), eps, rate = group["betas"], group["eps"], group["lr"]
        for parameter in group["params"]:
            gradient, state = parameter.grad, adam.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            steps = state["step"].item()
            state["exp_avg"].mul_(beta1).add_(gradient * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
            spread = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**steps)).add_(eps)
            parameter.sub_((state["exp_avg"] / spread).mul_(rate / (1 - beta1**steps)))


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
        self._segments = segments = tp_invariance.default.segments  # those of the model's layers
        if config.tp_invariant not in (0, segments):
            raise ValueError(
                f"tp_invariant: expected the {segments} segments that this process computes with, got "
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
        if config.sequence_parallel and segments and config.tokens % segments:
            raise ValueError(
                f"tokens: expected a number that the {segments} segments of TP-invariance divide, got "
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
        how = {"done": self.done, "ranks": self._ranks(), "segments": self._segments, "fp8": self._fp8}
        extra = {**how, **self._batches()}
        dcp.save(path, self.model, self.optimizer.unsharded(), extra=extra, state=self.state)
        return path

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of any number of ranks; called by all ranks."""
        full = self.optimizer.blank()
        with warnings.catch_warnings():
            # they do not: see below
            warnings.filterwarnings("ignore", message=".*random streams stay as they are")
            extra = dcp.load(path, self.model, full, state=self.state)
        ours = self._batches()
        if not isinstance(extra, dict) or not {"done", "ranks", "segments", "fp8", *ours} <= extra.keys():
            raise ValueError(
                f"{path}: expected a checkpoint of a training run, got one with extra {extra!r:.60}"
            )
        for name, value in ours.items():
            if extra[name] != value:
                raise ValueError(
                    f"{path}: expected {name} {extra[name]}, which the run began with, got {value}: it would "
                    "go on with other batches"
                )
        segments, fp8 = extra["segments"], extra["fp8"]
        if segments != self._segments:
            warn(
                f"{path} was computed with {segments} segments of TP-invariance (0: off); this run, with "
                f"{self._segments}, goes on with equal losses within rounding, not to the bit",
                stacklevel=2,
            )
        if fp8 != self._fp8:
            warn(
                f"{path} was computed with {fp8 or 'no'} fp8; this run, with {self._fp8 or 'none'}, "
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
        named = self.model.named_parameters()
        return self.state.ranks("tp"), {n: p for n, p in named if not Attributes.of(p).tensor_model_parallel}

    def _batches(self) -> dict[str, int]:
        """Return the options that determine the excerpts of a step."""
        chosen = {name: getattr(self.config, name) for name in ("seed", "batch", "tokens")}
        return {**chosen, "ids": len(self.batches.file)}

    @property
    def _fp8(self) -> str:
        """The recipe as text, equal for equivalent recipes."""
        return str(self.config.recipe or "")

    def _ranks(self) -> list[int]:
        return [self.state.size("tp"), self.state.size("dp")]
