"""One rank of a run from start to end: process group, parallel state, training, and reports."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from tpkernels import tp_invariance
from tpkernels.checkpoints import dcp
from tpkernels.checkpoints.raise_on_all_ranks import raise_on_all_ranks
from tpkernels.comm.agreement import Claim, agree
from tpkernels.groups.c10d import default_group
from tpkernels.groups.initialize import create_parallel_state, destroy_parallel_state
from tpkernels.groups.plan import plan_groups
from tpkernels.ops.replicas import from_all_ranks
from tpkernels.tp_invariance import own_segments, tp_invariant
from tpkernels.training.config import TrainConfig, open_lines_after, rename_later_checkpoints
from tpkernels.training.launch import device_of_rank, join_world
from tpkernels.training.measures import require_room
from tpkernels.training.profile import StepProfile
from tpkernels.training.report import Proof, loss_tolerance, write_report
from tpkernels.training.trainer import StepReport, Trainer


def escape_controls(text: str) -> str:
    """Escape characters that would control a terminal, or hide other characters.

    >>> escape_controls("red \\x1b[31m and \\u202e back")
    'red \\\\x1b[31m and \\\\u202e back'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def require_sizes(config: TrainConfig, tensor: int) -> None:
    """Turn TP-invariance on if the run asks for it; raise if `tensor` ranks do not divide its segments."""
    if config.tp_invariant:
        tp_invariant(config.tp_invariant)
    own_segments("--tp", tp_invariance.default.segments, tensor)


class Session:
    """One rank of a run."""

    def __init__(
        self, config: TrainConfig, tensor: int, *, saves: bool = False, timeout: float | None = None
    ) -> None:
        """tensor: the tensor-parallel size; other ranks are data-parallel
        saves: on SIGTERM finish the current step, save, and end the run
        timeout: seconds to wait for a rank in a collective
        """
        require_sizes(config, tensor)
        self.config, self.tensor = config, tensor
        self.rank = int(os.environ["RANK"])
        self.device = device_of_rank()
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        join_world(backend, None if timeout is None else timedelta(seconds=timeout))
        self._got_signal = self.was_asked_to_stop = False
        if saves:
            signal.signal(signal.SIGTERM, self._note_signal)
        world = dist.get_world_size()
        self._state = create_parallel_state(plan_groups(world_size=world, tensor=tensor))
        if world > 1:  # the file may have another path on another machine
            asked = f"train(config={replace(config, data='')}, tensor={tensor}, saves={saves})"
            agree(Claim(asked, ()), default_group())
        with raise_on_all_ranks(f"train on {world} ranks"):
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            require_room(config, tensor, world // tensor, local=local, device=self.device)
        self.trainer = Trainer(config, self._state, self.device)

    def say(self, text: str) -> None:
        """Print text on the first rank only."""
        if self.rank == 0:
            print(escape_controls(text), flush=True)

    def describe(self) -> str:
        parameters = sum(self._whole_elements(p) for p in self.trainer.model.parameters())
        dtype = str(self.config.dtype).removeprefix("torch.")
        config, data_ranks = self.config, self._state.size("dp")
        return (
            f"{parameters / 1e6:.1f} million parameters in {dtype} over {self.tensor} tensor-parallel x "
            f"{data_ranks} data-parallel ranks on {self.device.type}; {config.steps} steps of "
            f"{config.batch} x {config.tokens} tokens from {config.data}{_invariance()}"
            f"{f'; products in fp8, {config.recipe}' if config.recipe else ''}"
        )

    def resume(self, folder: Path) -> None:
        """Continue from the last complete checkpoint in `folder`, if there is one."""
        with raise_on_all_ranks(f"--resume from {folder}"):
            found = dcp.latest(folder)
        if found is None:
            rename_later_checkpoints(folder, 0)
            self.say(f"no checkpoint in {folder}: from the start")
            return
        self.trainer.resume(found)
        rename_later_checkpoints(folder, self.trainer.done)
        self.say(f"from {found}, after {self.trainer.done} steps")

    def steps(self, folder: Path | None = None, every: int = 0) -> Iterator[StepReport]:
        """Run the steps and yield their reports; with a folder save at the end, and when asked to stop."""
        while self.trainer.done < self.config.steps and not self.was_asked_to_stop:
            yield self.trainer.step()
            if folder is None:
                continue
            self.was_asked_to_stop = self._any_was_asked()
            last = self.was_asked_to_stop or self.trainer.done == self.config.steps
            if last or (every and self.trainer.done % every == 0):
                self.say(f"saved {self.trainer.save(folder)}")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # later work need not be saved

    def lines(self, path: Path) -> TextIO | None:
        """Open the first rank's file for a line per step; called by all ranks."""
        with raise_on_all_ranks(f"--json {path}"):
            return open_lines_after(path, self.trainer.done) if self.rank == 0 else None

    def _any_was_asked(self) -> bool:
        """Return whether SIGTERM has reached any rank, so that all stop after the same step."""
        asked = torch.tensor([float(self._got_signal)], device=self.device)
        for kind in ("tp", "dp"):
            asked = from_all_ranks(asked, self._state.process_group(kind)).amax(0)
        return bool(asked.item())

    def _note_signal(self, *_: object) -> None:
        self._got_signal = True

    def summary(self, reports: Sequence[StepReport]) -> str:
        speed = statistics.median(report.tokens / report.seconds for report in reports)
        seconds = sum(report.seconds for report in reports)
        return (
            f"loss {reports[0].loss:.3f} -> {reports[-1].loss:.3f} in {seconds:.0f} s, "
            f"{speed:,.0f} tokens/s (median step)"
        )

    def write_page(self, path: Path, reports: Sequence[StepReport], proof: Proof | None, sample: str) -> str:
        """Write a page about the run; return a line about its picture."""
        return write_report(
            path,
            f"Training from {self.config.data}",
            reports,
            plan=self._state.plan,
            unit="GPU" if self.device.type == "cuda" else "rank",
            known=[("run", self.describe()), ("torch", torch.__version__)],
            proof=proof,
            sample=sample,
        )

    def require_proof(self) -> None:
        """Raise if the unsharded run, with data-parallel ranks only, cannot have the same batches."""
        ranks, config = dist.get_world_size(), self.config
        if tp_invariance.default.segments and ranks > 2:
            raise ValueError(
                f"prove: expected at most 2 ranks with TP-invariance, got {ranks}: all are data-parallel in "
                "the unsharded run"
            )
        if config.batch % ranks or config.batch // ranks % config.accumulate:
            raise ValueError(
                f"prove: expected a batch that {ranks} data-parallel ranks and {config.accumulate} parts "
                f"divide, got {config.batch}"
            )

    def require_sample(self, prompt: str, count: int) -> None:
        """Raise if the model cannot write `count` bytes after `prompt`."""
        model, length = self.config.model, len(prompt.encode()) + count
        if not self.trainer.batches.file.is_text or model.vocab_size > 256:
            raise ValueError(
                f"sample: expected a model of a text's bytes, got one of {model.vocab_size} ids from "
                f"{self.config.data}"
            )
        if not prompt:
            raise ValueError("sample: expected a prompt to continue from, got an empty one")
        if model.max_positions is not None and length > model.max_positions:
            raise ValueError(
                f"sample: expected at most {model.max_positions} bytes with the prompt, got {length}"
            )

    def profile(self, folder: Path) -> StepProfile:
        """Profile a later step."""
        profile = StepProfile(folder, self.rank, done=self.trainer.done, steps=self.config.steps)
        self.trainer.step_context = profile
        return profile

    def prove(self, losses: Sequence[float]) -> Proof:
        """Print losses of the first steps next to those of other layouts.

        Raises if they differ by more than rounding.
        """
        count, overlap = len(losses), self.config.overlap
        other = self.losses(count, replace(self.config, overlap=not overlap), self.tensor)
        alone = self.losses(count, replace(self.config, sequence_parallel=False), 1)
        ranks = f"{self.tensor} tensor-parallel rank{'s' * (self.tensor != 1)}"
        layouts = [ranks, f"the same, {'sequential' if overlap else 'overlapped'}", "unsharded"]
        proof = Proof(layouts, [losses, other, alone], loss_tolerance(self.config))
        self.say(f"\n{proof.table()}\n  {proof.bound()}")
        if not proof.holds:
            raise RuntimeError(
                f"sharded and unsharded losses differ by {proof.worst:.1e}, expected {proof.allowed:.0e}"
            )
        return proof

    def losses(self, steps: int, config: TrainConfig, tensor: int) -> list[float]:
        """Return the losses of the first steps of another run on the same ranks, with other sizes."""
        state = create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))
        try:
            trainer = Trainer(config, state, self.device)
            return [trainer.step().loss for _ in range(steps)]
        finally:
            destroy_parallel_state(state)

    def sample(self, prompt: str, count: int) -> str:
        """Return `prompt` and the model's continuation, byte by byte."""
        model = self.trainer.model.eval()
        ids = torch.tensor([list(prompt.encode())], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        written = model.generate(ids, count, temperature=0.8, top_k=40, generator=generator)
        return escape_controls(bytes(written[0].tolist()).decode(errors="replace"))

    def close(self) -> None:
        destroy_parallel_state(self._state)
        dist.destroy_process_group()

    def _whole_elements(self, parameter: torch.Tensor) -> int:
        ranks = self.tensor if getattr(parameter, "tensor_model_parallel", False) else 1
        return parameter.numel() * ranks


def _invariance() -> str:
    segments = tp_invariance.default.segments
    return f"; the same bits at every tensor-parallel size that divides {segments}" if segments else ""
