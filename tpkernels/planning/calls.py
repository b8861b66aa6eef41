"""Names, sizes and ways of operator calls over a group, for predictions of their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPERATORS = ("column_linear", "row_linear", "mlp", "gated_mlp")
DIRECTIONS = ("forward", "backward")
WAYS = ("naive", "c10d", "symmetric", "decomposed")
MOST_RANKS = 72  # the largest NVLink domain today
# Published times on 2 to 8 H100s over the model's: the least and the most (docs/overlap-predicted.md).
# Those of symmetric and decomposed are of other people's kernels, with the same schedule.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "naive": (0.78, 1.39),
    "symmetric": (0.92, 2.23),
    "decomposed": (0.82, 3.46),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one call on R ranks."""

    tokens: int
    features_in: int
    features_out: int  # of column_linear the full output features; of an MLP its inner width
    ranks: int
    sequence_parallel: bool = True
    narrowest: int = 0  # a rank's features of each of two more weights that share one gather

    def __post_init__(self) -> None:
        for name in ("tokens", "features_in", "features_out", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.sequence_parallel and self.tokens % self.ranks:
            raise ValueError(
                f"tokens: expected a multiple of the {self.ranks} ranks with sequence parallelism, got "
                f"{self.tokens}"
            )

    def shard(self, name: str) -> int:
        """Return a rank's shard of features_in or features_out."""
        features: int = getattr(self, name)
        if features % self.ranks:
            raise ValueError(f"{name}: expected a multiple of the {self.ranks} ranks, got {features}")
        return features // self.ranks
