"""Which ids of a vocabulary a rank holds, where the ranks need not divide it: the table is padded, then cut.

Every rank holds as many rows of the padded table. Those past the last id are padding, and the
last ranks may hold nothing else.

>>> split = split_vocabulary(7, ranks=4)
>>> split.padded_size, split.shard_size
(8, 2)
>>> [list(split.ids_of(rank)) for rank in range(4)]
[[0, 1], [2, 3], [4, 5], [6]]
>>> split_vocabulary(50257, ranks=2, divisible_by=128).padded_size
50432
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.topology.sizes import InvalidSizes, positive


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """`size` ids over `ranks` ranks, each with `shard_size` rows."""

    size: int
    ranks: int
    shard_size: int

    @property
    def padded_size(self) -> int:
        """Rows of the full table."""
        return self.shard_size * self.ranks

    def rows_of(self, rank: int) -> range:
        """The rows of the full table that `rank` holds, padding among them."""
        if not 0 <= rank < self.ranks:
            raise InvalidSizes(
                f"rank {rank} is not in the tensor-parallel group: expected 0 to {self.ranks - 1}"
            )
        return range(rank * self.shard_size, (rank + 1) * self.shard_size)

    def ids_of(self, rank: int) -> range:
        """The ids that `rank` holds; none where it holds nothing but padding."""
        rows = self.rows_of(rank)
        return range(min(rows.start, self.size), min(rows.stop, self.size))


def split_vocabulary(size: int, *, ranks: int, divisible_by: int = 1) -> VocabularySplit:
    """Pad a vocabulary to a multiple of `divisible_by` x `ranks`, and cut it into equal shards.

    divisible_by: of each rank's rows, Megatron's `make_vocab_size_divisible_by`, which is 128 there
    """
    size, ranks = positive(size, "vocabulary size"), positive(ranks, "ranks")
    unit = positive(divisible_by, "divisible_by")
    return VocabularySplit(size, ranks, shard_size=-(-size // (ranks * unit)) * unit)
