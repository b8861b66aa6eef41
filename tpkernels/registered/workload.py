"""How a registered launch is clocked: how much of a kernel's work it is, and how less of it goes to one SM.

Launchers are recorded as if the GPU had a single SM: then a persistent kernel gets as many blocks as an SM
holds, another one a block for each tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.clock.launch import Built, SmLaunch, WrongLaunch, launch_of
from tpkernels.gate.clock.workload import Product
from tpkernels.kernels import launch
from tpkernels.kernels.scaled import SECTOR
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.recording import EntrySpec

RANKS = 2  # that `recording.scatter_linear` stores to


@dataclass(frozen=True, slots=True)
class FromCatalog:
    """As the catalog records it; the cost of products is one of the kernel, not of a shape."""

    entry: Entry
    sizes: tuple[int, int, int] | None = None  # see `of_entry`

    def text(self) -> str:
        spec = sized(entry_specs()[self.entry.name], self.sizes)
        alone = replace(spec, target=replace(spec.target, processors=1))
        return f"{spec.launch()!r} {alone.launch()!r}"

    def workload(self) -> EntryWorkload:
        return of_entry(self.entry, self.sizes)


@dataclass(frozen=True)
class EntryWorkload:
    """Of a catalog entry. Without closures: it goes to other processes, and says in full what it is."""

    entry: Entry
    sizes: tuple[int, int, int] | None = (
        None  # tokens, out_features, in_features; None: as the catalog has it
    )

    @property
    def name(self) -> str:
        return self.entry.name

    @cached_property
    def product(self) -> Product | None:
        tile = self._spec.of.tile
        if tile is None:
            return None
        return Product(
            tile.block_rows,
            tile.block_cols,
            tile.block_depth,
            self._spec.of.dtype.itemsize,
            weights=2 if self._kernel == "glu" else 1,
            pairs=2 if "/two" in self.name else 1,
            beside=self._scales(tile) if self.entry.constants.get("BY_BLOCK") else 0,
        )

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        tile, of = self._spec.of.tile, self._spec.of
        if tile is None:
            return 0, 0, 0
        if self._kernel == "wgrad":
            return of.out_features, of.in_features, -(-of.tokens // tile.splits)
        if self._transposed:
            return of.tokens, of.in_features, of.out_features
        return of.tokens, of.out_features, of.in_features

    @cached_property
    def tiles(self) -> int:
        tile, (rows, cols, _) = self._spec.of.tile, self.shape
        if tile is None:
            of, (block_rows, block_cols) = self._spec.of, self._shared or (0, 0)
            blocks = -(-of.tokens // block_rows) * -(-of.in_features // block_cols) if block_rows else 0
            return blocks or prod(self._launch.grid)
        chunks = self._row_tiles
        if self._kernel == "scatter_linear":
            chunks *= self._spec.of.chunks
        return chunks * -(-rows // chunks // tile.block_rows) * -(-cols // tile.block_cols) * tile.splits

    @cached_property
    def traffic(self) -> int:
        tensors = (getattr(value, "base", value) for value in self._launch.named.values())
        return sum({id(one): one.nbytes for one in tensors if isinstance(one, Tensor)}.values())

    @property
    def least(self) -> int:
        return 0 if self._kernel == "embedding_fwd" else self.traffic  # which reads the rows that ids choose

    @property
    def unit(self) -> int:
        tile = self._spec.of.tile
        return self._row_tiles * tile.splits if tile else 1

    @cached_property
    def persistent(self) -> bool:
        return prod(self._launch.grid) < self.tiles

    @property
    def group(self) -> int:
        tile = self._spec.of.tile
        return tile.group if tile else 1

    def on_one(self, built: Built, tiles: int, steps: int) -> SmLaunch:
        spec, blocks = _on_one(self._spec), None
        if self._shared:
            rows, cols = self._shared
            spec = _of_sizes(spec, tiles * rows, cols, spec.of.out_features)
        elif self.product is None:
            blocks = tiles
        elif tiles % self.unit:
            raise WrongLaunch(f"{self.name}: expected a multiple of {self.unit} tiles, got {tiles}")
        else:
            tile = spec.of.tile
            assert tile is not None
            # rows of a ragged result start at multiples of nothing
            cols = tiles // self.unit * tile.block_cols - spec.of.ragged
            depth = steps * tile.splits * tile.block_depth
            if self._kernel == "scatter_linear":
                spec = replace(spec, of=replace(spec.of, chunks=1))
            spec = _of_sizes(spec, *self._layer(self._row_tiles * tile.block_rows, cols, depth))
        one, constants = spec.launch(), self.entry.constants
        given = one.named | {"GROUP": constants.get("GROUP")}  # any order of tiles will do
        other = [name for name, value in constants.items() if given.get(name) != value]
        if other:
            raise WrongLaunch(
                f"{self.name}: {', '.join(sorted(other))} of this launch are not what was compiled in"
            )
        given = {name: given[name] for name in self.entry.arguments}
        steps_of = {name: self._step(name, value) for name, value in given.items()}
        contents = {at: step for at, step in enumerate(steps_of.values()) if step is not None}
        return launch_of(built, [*given.values()], one.grid, blocks, contents)

    @cached_property
    def _spec(self) -> EntrySpec:
        return sized(entry_specs()[self.name], self.sizes)

    @cached_property
    def _launch(self) -> launch.Launch:
        return self._spec.launch()

    @property
    def _kernel(self) -> str:
        return self.name.split("/")[0]

    def _step(self, name: str, value: Any) -> int | None:
        """Of the integers in memory that decide a kernel's way: by how much each is more than the last."""
        if name == "target_ptr":
            return 0  # every row of a loss counts
        if name == "starts_ptr":  # every row of a table has as many tokens
            return -(-self._spec.of.tokens // (len(value) - 1))
        return None

    def _scales(self, tile: MatmulTile) -> int:
        """Bytes of a sector for each row and each column, by each warp anew."""
        return SECTOR * (tile.block_rows + tile.block_cols) * tile.num_warps

    @property
    def _transposed(self) -> bool:
        """Whether the product is with the weight as it lies, as in dgrad."""
        return self._kernel in ("dgrad", "dglu") or "depth_first" in self.name

    @property
    def _shared(self) -> tuple[int, int] | None:
        """Rows and columns of what the blocks of a kernel without products share, if they do."""
        if self._kernel != "reduce_slots":
            return None
        rows, cols = (self.entry.constants[name] for name in ("BLOCK_ROWS", "BLOCK_COLS"))
        assert isinstance(rows, int)
        assert isinstance(cols, int)
        return rows, cols

    @property
    def _row_tiles(self) -> int:
        """The least that can be: rows come, or leave, in chunks, none of which shares a tile with another."""
        if self._kernel == "scatter_linear":
            return RANKS
        return self._spec.of.chunks if self.name.endswith("+wait") else 1

    def _layer(self, rows: int, cols: int, depth: int) -> tuple[int, int, int]:
        """Tokens, in_features and out_features of the layer for which the kernel computes such a product."""
        if self._kernel == "wgrad":
            return depth, cols, rows
        return (rows, cols, depth) if self._transposed else (rows, depth, cols)


def of_entry(entry: Entry, sizes: tuple[int, int, int] | None = None) -> EntryWorkload:
    """sizes: tokens, out_features and in_features of the layer; None: as the catalog has it"""
    return EntryWorkload(entry, sizes)


def sized(spec: EntrySpec, sizes: tuple[int, int, int] | None) -> EntrySpec:
    """sizes: as `of_entry` takes them"""
    if sizes is None:
        return spec
    tokens, out_features, in_features = sizes
    return _of_sizes(spec, tokens, in_features, out_features)


def _of_sizes(spec: EntrySpec, tokens: int, in_features: int, out_features: int) -> EntrySpec:
    sized = replace(spec.of, tokens=tokens, in_features=in_features, out_features=out_features)
    return replace(spec, of=sized)


def _on_one(spec: EntrySpec) -> EntrySpec:
    return replace(spec, target=replace(spec.target, processors=1))
