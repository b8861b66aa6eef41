"""AdamW with states sharded over data-parallel ranks: each updates its shard, then all gather parameters.

Gradients are reduced in buckets during backward, and each rank keeps its shard of each. States and a copy of
the parameters are fp32 and exist for that shard only: 12 bytes an element, divided by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.exact_norm import exact_norm
from tpkernels.ops.replicas import from_all_ranks
from tpkernels.runtime.state import ParallelState
from tpkernels.tp_invariance import mode
from tpkernels.training.profile import phase

STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"  # a parameter in fp32


class ShardedAdamW:
    """AdamW over the tensor- and data-parallel ranks of `state`, with sharded states."""

    def __init__(
        self,
        model: nn.Module,
        state: ParallelState,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        """weight_decay: for matrices; vectors do not decay"""
        self._state = state
        self._is_invariant = mode.fix("ShardedAdamW") > 0
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
        self._adam = torch.optim.AdamW(self._shards, lr=0.0, betas=betas, eps=eps, weight_decay=0.0)

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

    def tensors(self) -> list[Tensor]:
        """Return this rank's tensors: its shard of the fp32 parameters, and Adam's states for it."""
        states = [tensor for state in self._adam.state.values() for tensor in state.values()]
        return [*self._shards, *states]

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
