"""A training job, and the layouts of ranks over which it can be split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from tpkernels.kernels.activation_names import ACTIVATIONS, GATE_OF
from tpkernels.models.config import GPTConfig
from tpkernels.topology.sizes import head_size_of, require_heads, shard_size, split_vocabulary

if TYPE_CHECKING:
    from tpkernels.layers.block import Recompute


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
