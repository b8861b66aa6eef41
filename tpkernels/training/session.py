"""A rank from its start to its end: process group, state, run, and what is said about it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from tpkernels.runtime.initialize import create_parallel_state, destroy_parallel_state
from tpkernels.topology.plan import plan_groups
from tpkernels.training.trainer import StepReport, TrainConfig, Trainer

# Of a loss, after a few steps whose gradients are added in another order.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class Session:
    """One rank of a run."""

    def __init__(self, config: TrainConfig, tensor: int) -> None:
        """tensor: tensor-parallel ranks; the others are data-parallel"""
        self.config, self.tensor = config, tensor
        self.rank = int(os.environ["RANK"])
        on_gpu = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        )
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        self._state = create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))
        self.trainer = Trainer(config, self._state, self.device)

    @property
    def tolerance(self) -> float:
        return _TOLERANCES[self.config.dtype]

    def say(self, text: str) -> None:
        """Once, by the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def describe(self) -> str:
        parameters = sum(self._whole_elements(p) for p in self.trainer.model.parameters())
        dtype = str(self.config.dtype).removeprefix("torch.")
        config, data_ranks = self.config, self._state.size("dp")
        return (
            f"{parameters / 1e6:.1f} million parameters in {dtype} over {self.tensor} tensor-parallel x "
            f"{data_ranks} data-parallel ranks on {self.device.type}; {config.steps} steps of "
            f"{config.batch} x {config.tokens} tokens from {config.data}"
        )

    def steps(self) -> Iterator[StepReport]:
        """The run, step by step."""
        while self.trainer.done < self.config.steps:
            yield self.trainer.step()

    def summary(self, reports: Sequence[StepReport]) -> str:
        speed = statistics.median(report.tokens / report.seconds for report in reports)
        seconds = sum(report.seconds for report in reports)
        return (
            f"loss {reports[0].loss:.3f} -> {reports[-1].loss:.3f} in {seconds:.0f} s, "
            f"{speed:,.0f} tokens/s (median step)"
        )

    def losses(self, steps: int, config: TrainConfig, tensor: int) -> list[float]:
        """Of the first steps of another run on the same ranks, with other sizes."""
        state = create_parallel_state(plan_groups(world_size=dist.get_world_size(), tensor=tensor))
        try:
            trainer = Trainer(config, state, self.device)
            return [trainer.step().loss for _ in range(steps)]
        finally:
            destroy_parallel_state(state)

    def sample(self, prompt: str, count: int) -> str:
        """What the model writes after `prompt`, byte by byte."""
        if not self.trainer.batches.file.is_text:
            raise ValueError("sample: expected a model of text, got one of ids")
        model = self.trainer.model.eval()
        ids = torch.tensor([list(prompt.encode())], device=self.device)
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        written = model.generate(ids, count, temperature=0.8, top_k=40, generator=generator)
        return bytes(written[0].tolist()).decode(errors="replace")

    def close(self) -> None:
        destroy_parallel_state(self._state)
        dist.destroy_process_group()

    def _whole_elements(self, parameter: torch.Tensor) -> int:
        ranks = self.tensor if getattr(parameter, "tensor_model_parallel", False) else 1
        return parameter.numel() * ranks
