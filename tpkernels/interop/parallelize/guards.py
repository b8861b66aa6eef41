"""Hooks that refuse, on all ranks, calls of a split model that one rank's shard cannot answer.

Such calls need all heads, or all tokens. In training, random streams that differ between ranks are refused,
too: ranks must be seeded alike, and draw alike. For a replicated tensor torch's own dropout draws the same
mask on each rank; for split features each rank takes its shard of the full mask. So `torch.utils.checkpoint`
draws them again as it does without tensor parallelism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpkernels import tp_invariance
from tpkernels.groups.random import is_capturing
from tpkernels.interop.parallelize.changes import Changes
from tpkernels.layers import replicas
from tpkernels.layers.world import TensorWorld
from tpkernels.ops.replicas import from_all_ranks


def refuse_tp_invariance(subject: str) -> None:
    """Raise under TP-invariance, which layers of other libraries do not have."""
    if tp_invariance.default.segments:
        raise ValueError(
            f"{subject}: expected TP-invariance to be off, because it does not cover computation between "
            "layers; use tpkernels.GPT or the parallel layers, or turn it off"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if a wrapper in the model would go on reducing the parameters that parallelize replaces."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "parallelize: expected a model that DistributedDataParallel has not wrapped; call parallelize "
            "first, then wrap the model over the data-parallel group"
        )


def refuse_shards_of_heads(model: nn.Module, changes: Changes) -> None:
    """Make a model refuse calls that ask for attention weights, if attentions are split by heads."""
    names = [change.name.lower() for change in changes.modules if change.narrows_output]
    if any("attn" in name or "attention" in name for name in names):
        for module in model.modules():
            if hasattr(module, "main_input_name"):  # a model, in which `transformers` collects
                module.register_forward_pre_hook(_refuse_shards, with_kwargs=True)


def refuse_hidden_states(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    """A pre-hook that refuses calls for hidden states between layers, where tokens are sharded."""
    if _is_asked(module, kwargs, "output_hidden_states"):
        raise ValueError(
            "sequence_parallel: expected output_hidden_states=False: between layers each rank has its "
            "shard of the tokens; parallelize the model without sequence_parallel"
        )


def _refuse_shards(module: nn.Module, _: Any, kwargs: Mapping[str, Any]) -> None:
    if _is_asked(module, kwargs, "output_attentions"):
        raise ValueError(
            "output_attentions: expected False: each tensor-parallel rank has those of its own heads only. "
            "Ask the model for them before parallelize"
        )
    if any(keys.requires_grad for keys in _keys(kwargs.get("past_key_values"))):
        raise ValueError(
            "past_key_values: expected keys without gradients, got learnt ones, as of peft's prefix tuning: "
            "they have all heads, but each tensor-parallel rank has its own. Use prompt tuning, or LoRA"
        )


def _is_asked(module: nn.Module, kwargs: Mapping[str, Any], option: str) -> bool:
    asked = kwargs.get(option)
    return bool(getattr(getattr(module, "config", None), option, False) if asked is None else asked)


def _keys(cache: Any) -> Iterator[Tensor]:
    """Yield the keys of each layer of a cache, or of a decoder's self-attention cache."""
    for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
        if isinstance(keys := getattr(layer, "keys", None), Tensor):
            yield keys


def require_equal_draws(model: nn.Module, world: TensorWorld) -> None:
    """Make a model raise in training, on all ranks, if it draws and random streams differ."""
    if world.size > 1 and dist.get_backend(world.group) != "fake":
        draws = _Draws(world)
        model.register_forward_pre_hook(draws.before)
        model.register_forward_hook(draws.after)


class _Draws:
    """Compares random streams in the first call in train mode and in every N-th, as `layers.replicas`."""

    def __init__(self, world: TensorWorld) -> None:
        self.world = world
        self.calls = 0
        self.states: list[Tensor] | None = None

    def before(self, model: nn.Module, _: Any) -> None:
        """Remember the random streams, in every N-th call."""
        if torch.compiler.is_compiling() or not model.training or not replicas.steps_between_checks:
            return
        if is_capturing():
            return
        self.states = _states(model) if self.calls % replicas.steps_between_checks == 0 else None
        self.calls += 1

    def after(self, model: nn.Module, *_: Any) -> None:
        """Raise on all ranks if the forward drew and the streams before it differed."""
        if torch.compiler.is_compiling() or self.states is None:
            return
        states, self.states = self.states, None
        pairs = zip(states, _states(model), strict=True)
        own = [0 if torch.equal(first, last) else _number(first) for first, last in pairs]
        rows = from_all_ranks(torch.tensor(own, device=_device(model)), self.world.group).tolist()
        others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
        if others:
            raise RuntimeError(
                "parallelize: dropout differs between tensor-parallel ranks, because their random streams "
                "do. Seed torch alike on all ranks of a tensor group, and draw as often on each: in this "
                f"forward tensor rank {', '.join(others)} drew other numbers than rank 0"
            )


def _states(model: nn.Module) -> list[Tensor]:
    device = _device(model)
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _number(state: Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "big")
