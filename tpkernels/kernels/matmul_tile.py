"""How a matmul kernel is cut and launched, as a value with a name that can be read back.

A tile speaks of the product it computes, whatever the layer calls those sizes: `block_rows` by `block_cols`
of the result, `block_depth` of the reduction at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """How one matmul kernel is cut and launched."""

    block_rows: int
    block_cols: int
    block_depth: int
    num_warps: int
    num_stages: int
    parts: int = 1  # the epilogue works on this many column parts, one after the other
    per_processor: int = 1  # resident programs of a persistent launch
    flatten: bool = False  # one loop over tiles and depth: the next tile's loads start during the epilogue
    group: int = 8  # tiles of a column that are computed in a row, see `blocks.tile_at`
    splits: int = 1  # the depth is cut so, and fp32 sums of the parts are added afterwards, in order

    def __post_init__(self) -> None:
        for name in ("block_rows", "block_cols", "block_depth", "num_warps", "parts"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"MatmulTile expected {name} to be a power of two, got {value}")
        for name in ("num_stages", "per_processor", "group", "splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"MatmulTile expected {name} of at least 1, got {getattr(self, name)}")
        if self.block_depth < 16 or self.block_cols // self.parts < 16 or self.block_rows < 16:
            raise ValueError(
                f"MatmulTile expected at least 16 rows, 16 depth and 16 columns a part, got {self}"
            )

    @property
    def name(self) -> str:
        """What tells it from any other tile; `named` reads it."""
        marks = (("x", self.per_processor, 1), ("k", self.splits, 1), ("g", self.group, 8))
        return (
            f"{self.block_rows}x{self.block_cols}x{self.block_depth}-w{self.num_warps}-s{self.num_stages}"
            f"-p{self.parts}{'-flat' * self.flatten}"
            + "".join(f"-{mark}{count}" for mark, count, usual in marks if count != usual)
        )

    @staticmethod
    def named(name: str) -> MatmulTile:
        """The tile of that name; ValueError if there is none.

        >>> MatmulTile.named("128x256x64-w8-s3-p4-flat-g4").group
        4
        """
        found = _NAME.fullmatch(name)
        if found:
            sizes = {field: int(text) for field, text in found.groupdict().items() if text and text.isdigit()}
            tile = MatmulTile(**sizes, flatten=bool(found["flatten"]))
            if tile.name == name:  # else it says what is usual, or 08 for 8
                return tile
        raise ValueError(f"expected the name of a tile, such as 128x256x64-w8-s4-p2-flat, got {name!r}")

    def tiles(self, rows: int, cols: int) -> int:
        """How many tiles cover a (rows, cols) result."""
        return -(-rows // self.block_rows) * -(-cols // self.block_cols)


_NAME = re.compile(
    r"(?P<block_rows>\d+)x(?P<block_cols>\d+)x(?P<block_depth>\d+)-w(?P<num_warps>\d+)-s(?P<num_stages>\d+)"
    r"-p(?P<parts>\d+)(?P<flatten>-flat)?"
    r"(?:-x(?P<per_processor>\d+))?(?:-k(?P<splits>\d+))?(?:-g(?P<group>\d+))?",
    re.ASCII,
)
