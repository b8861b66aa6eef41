"""How large buckets are, and how many are gathered at once. Loads no torch.

>>> list(runs_within([3, 4, 9, 1], most=7))
[range(0, 2), range(2, 3), range(3, 4)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

DEFAULT_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early
ALIGNMENT = 64  # elements: whole cache lines and 16-byte vectors in every dtype
GATHERED_BYTES = 2**28  # of parameters in flight: whole models would be there twice


def runs_within(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Neighbours that are at most so large together, or one that is larger by itself."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            yield range(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield range(start, len(sizes))
