"""A training job, and the layouts of ranks over which it can be split.

Speeds of a machine's GPUs and links, as fractions of data-sheet rates, by a group's position.

A group has every `stride`-th rank, a node has neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from tpkernels.groups.sizes import head_size_of, require_heads, shard_size, split_vocabulary
from tpkernels.kernels.activation_names import ACTIVATIONS, GATE_OF
from tpkernels.models.config import GPTConfig
from tpkernels.planning.gpus import RatedGpu

if TYPE_CHECKING:
    from tpkernels.layers.block import Recompute


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU, the number in a node, and the expected fractions of data-sheet rates."""

    gpu: RatedGpu
    gpus_per_node: int = 8
    efficiency: float = 0.5  # of products, with the kernels between them
    link_efficiency: float = 0.8  # of bytes a second
    reserve: float = 0.1  # of memory, for CUDA, libraries, temporaries, fragmentation

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node: expected at least 1, got {self.gpus_per_node}")
        for name in ("efficiency", "link_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected more than 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve: expected 0 or more and less than 1, got {self.reserve}")

    @property
    def usable_memory(self) -> int:
        return int(self.gpu.memory * (1 - self.reserve))

    def computing(self, flops: float) -> float:
        return flops / (self.gpu.flops * self.efficiency)

    def exchanging(self, sent: float, size: int, stride: int) -> float:
        """Seconds for a rank to send `sent` bytes evenly to all members, point to point, as our transports.

        size, stride: of the group, whose members are every `stride`-th rank
        """
        if size == 1:
            return 0.0
        across = sent * (size - self._members_in_node(size, stride)) / (size - 1)
        return max((sent - across) / self.gpu.nvlink, across / self.gpu.network) / self.link_efficiency

    def circling(self, sent: float, size: int, stride: int) -> float:
        """Seconds of a ring, as of a backend; a node's members of the group share their network adapters."""
        if size == 1:
            return 0.0
        inside = self._members_in_node(size, stride)
        rate = self.gpu.nvlink if inside == size else min(self.gpu.nvlink, inside * self.gpu.network)
        return sent / rate / self.link_efficiency

    def handing_on(self, sent: float, size: int, stride: int) -> float:
        """Seconds from a member to the next, for the farthest pair."""
        inside = self._members_in_node(size, stride) == size
        return sent / (self.gpu.nvlink if inside else self.gpu.network) / self.link_efficiency

    def _members_in_node(self, size: int, stride: int) -> int:
        return min(size, max(1, self.gpus_per_node // stride))


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Ranks by axis: tensor-parallel ranks are neighbours, then data-parallel ranks, then pipeline stages."""

    tensor: int
    pipeline: int
    data: int

    def __str__(self) -> str:
        return f"tp={self.tensor} pp={self.pipeline} dp={self.data}"


def layouts(gpus: int, most_tensor: int) -> Iterator[RankLayout]:
    """Yield all layouts of a number of GPUs, whether or not a model can be split over them."""
    for tensor in _divisors(gpus):
        if tensor <= most_tensor:
            for pipeline in _divisors(gpus // tensor):
                yield RankLayout(tensor, pipeline, gpus // tensor // pipeline)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model, its batches, and the options of its computation."""

    model: GPTConfig
    tokens: int  # in a sequence
    batch: int  # sequences a step, over all ranks
    micro_batch: int = 1  # sequences that a rank computes at once
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    element: int = 2  # bytes of a weight and of an activation

    def __post_init__(self) -> None:
        model = self.model
        for name in ("tokens", "batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if model.max_positions is not None and self.tokens > model.max_positions:
            raise ValueError(
                f"tokens: expected at most {model.max_positions}, as many as the model has positions, got "
                f"{self.tokens}"
            )
        expected = {"activation": (*ACTIVATIONS, *GATE_OF), "norm": ("layer_norm", "rms_norm")}
        for name, known in expected.items():
            if getattr(model, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(model, name)!r}")
        self.require_split(RankLayout(1, 1, 1), batch=False)

    @property
    def head_size(self) -> int:
        model = self.model
        return head_size_of(model.hidden_size, model.num_heads, rotary=model.max_positions is None)

    @property
    def kv_heads(self) -> int:
        return self.model.num_kv_heads or self.model.num_heads

    @property
    def ffn(self) -> int:
        return self.model.ffn_hidden_size or 4 * self.model.hidden_size

    @property
    def ups(self) -> int:
        """The number of up-projections of the MLP: a gated unit has two."""
        return 2 if self.model.activation in GATE_OF else 1

    def kv_heads_of_rank(self, tensor: int) -> int:
        """Return a rank's heads of keys and values in attention: full ones, if it computes a shard, too."""
        return max(1, self.kv_heads // tensor)

    def vocabulary_rows(self, tensor: int) -> int:
        """Return a rank's rows of the embedding and of the head, padding included."""
        return split_vocabulary(self.model.vocab_size, ranks=tensor).shard_size

    def tokens_at_once(self) -> int:
        return self.tokens * self.micro_batch

    def micro_batches(self, layout: RankLayout) -> int:
        """Return the number of microbatches that a rank computes in a step."""
        return self.batch // layout.data // self.micro_batch

    def is_split(self, tensor: int) -> bool:
        """Whether a rank has its own tokens between the products."""
        return self.sequence_parallel and tensor > 1

    def require_split(self, layout: RankLayout, *, batch: bool = True) -> None:
        """Raise if the model, or the batch, cannot be split over a layout, with the layers' own messages."""
        model, ranks = self.model, layout.tensor
        require_heads(model.num_heads, self.kv_heads, self.head_size, ranks)
        shard_size(self.ffn, ranks, "ffn_hidden_size")
        if self.is_split(ranks) and self.tokens % ranks:
            raise ValueError(
                f"tokens: expected a multiple of the {ranks} tensor-parallel ranks with sequence "
                f"parallelism, got {self.tokens}"
            )
        if model.num_layers % layout.pipeline:
            raise ValueError(
                f"num_layers: expected a multiple of the {layout.pipeline} stages, got {model.num_layers}"
            )
        if batch and self.batch % (layout.data * self.micro_batch):
            raise ValueError(
                f"batch: expected a multiple of {layout.data} data-parallel ranks x {self.micro_batch} "
                f"sequences at once, got {self.batch}"
            )
