"""Sizes of one call of an operator."""

from __future__ import annotations

from dataclasses import dataclass


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
