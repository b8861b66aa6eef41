"""How much of a kernel's work a launch is, and how less of it is launched on one SM to take its cycles.

Launchers are recorded as if the GPU had a single SM: then a persistent kernel gets as many blocks as an SM
holds, another one a block for each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.catalog import recipes
from tpkernels.gate.clock.launch import Built, Launch, WrongLaunch, launch_of
from tpkernels.gate.recording import Recipe
from tpkernels.kernels import launch
from tpkernels.kernels.matmul_tile import MatmulTile

FLOPS_A_CYCLE = 4096  # of an H100's SM, 16-bit operands: 989.4 TFLOP/s over 132 SMs at 1.83 GHz


@dataclass(frozen=True, slots=True)
class Product:
    """How a product is cut: tiles of a result, each of them computed in steps of depth."""

    rows: int  # of a tile
    cols: int
    depth: int  # of a step
    itemsize: int = 2  # bytes of an element of the operands
    weights: int = 1  # 2 for a gated unit, which multiplies a block of rows by two
    pairs: int = 1  # of matrices whose products are summed

    @property
    def flops(self) -> int:
        """Of a step."""
        return 2 * self.rows * self.cols * self.depth * self.weights * self.pairs

    @property
    def bytes(self) -> int:
        """Of the operands of a step."""
        return (self.rows + self.cols * self.weights) * self.depth * self.itemsize * self.pairs


@dataclass(frozen=True, slots=True)
class Workload:
    """A launch on a whole GPU."""

    name: str
    built: Built
    product: Product | None  # None: no products in steps, and a tile is a block
    shape: tuple[int, int, int]  # rows, columns and depth of the product; without one (0, 0, 0)
    tiles: int
    traffic: int  # bytes of all tensors, each once
    on_one: Callable[[int, int], Launch]  # so many tiles of so many steps on one SM
    unit: int = 1  # tiles that `on_one` takes multiples of

    @property
    def steps(self) -> int:
        """Of a tile."""
        return -(-self.shape[2] // self.product.depth) if self.product else 0


def of_entry(entry: Entry, built: Built, shape: tuple[int, int, int] | None = None) -> Workload:
    """shape: tokens, out_features and in_features of the layer; None: what the catalog records"""
    recipe = recipes()[entry.name]
    if shape is not None:
        tokens, out_features, in_features = shape
        recipe = _of_sizes(recipe, tokens, in_features, out_features)
    if recipe.of.tile is None:
        return _of_rows(entry, built, recipe)
    return _of_product(entry, built, recipe, recipe.of.tile)


def _of_product(entry: Entry, built: Built, recipe: Recipe, tile: MatmulTile) -> Workload:
    rows, cols, depth = _as_product(recipe.name, recipe.of.tokens, recipe.of.in_features, recipe.of.out_features)
    kernel = _kernel(recipe.name)
    pairs = 2 if kernel == "dgrad_pairs" or "/two" in recipe.name else 1
    product = Product(
        tile.block_rows,
        tile.block_cols,
        tile.block_depth,
        recipe.of.dtype.itemsize,
        weights=2 if kernel == "glu" else 1,
        pairs=pairs,
    )
    # rows come, or leave, in chunks, none of which shares a tile with another
    chunks = {"gather_linear": 1, "scatter_linear": 2}.get(kernel, 0) * recipe.of.chunks or 1

    def on_one(tiles: int, steps: int) -> Launch:
        if tiles % (chunks * tile.splits):
            raise WrongLaunch(f"{recipe.name}: expected a multiple of {chunks * tile.splits} tiles, got {tiles}")
        columns = tiles // (chunks * tile.splits) * tile.block_cols
        deep = steps * tile.splits * tile.block_depth
        sizes = _as_layer(recipe.name, chunks * tile.block_rows, columns, deep)
        return _recorded(entry, built, _of_sizes(recipe, *sizes, processors=1))

    count = chunks * -(-rows // chunks // tile.block_rows) * -(-cols // tile.block_cols) * tile.splits
    split = (rows, cols, -(-depth // tile.splits))
    return Workload(
        recipe.name, built, product, split, count, _traffic(recipe.launch()), on_one, chunks * tile.splits
    )


def _of_rows(entry: Entry, built: Built, recipe: Recipe) -> Workload:
    whole = recipe.launch()

    def on_one(blocks: int, steps: int) -> Launch:
        return _recorded(entry, built, _of_sizes(recipe, processors=1), blocks)

    return Workload(recipe.name, built, None, (0, 0, 0), prod(whole.grid), _traffic(whole), on_one)


def _recorded(entry: Entry, built: Built, recipe: Recipe, blocks: int | None = None) -> Launch:
    one = recipe.launch()
    named = dict(zip(one.kernel.arg_names, one.arguments, strict=False))
    other = [name for name in entry.constants.keys() & named.keys() if named[name] != entry.constants[name]]
    if other:
        raise WrongLaunch(f"{entry.name}: {', '.join(sorted(other))} of this launch are not what was compiled in")
    values = [value for name, value in named.items() if name not in entry.constants]
    return launch_of(built, values, one.grid, blocks)


def _of_sizes(
    recipe: Recipe,
    tokens: int | None = None,
    in_features: int | None = None,
    out_features: int | None = None,
    processors: int | None = None,
) -> Recipe:
    of, target = recipe.of, recipe.target
    sizes = replace(
        of,
        tokens=tokens or of.tokens,
        in_features=in_features or of.in_features,
        out_features=out_features or of.out_features,
    )
    return replace(recipe, of=sizes, target=replace(target, processors=processors or target.processors))


def _kernel(name: str) -> str:
    parts = name.split("/")
    return parts[1] if parts[0].startswith(("sm_", "gfx")) else parts[0]


def _as_product(name: str, tokens: int, in_features: int, out_features: int) -> tuple[int, int, int]:
    """Rows, columns and depth of what a kernel computes for a layer."""
    if _kernel(name) == "wgrad":
        return out_features, in_features, tokens
    if _transposed(name):
        return tokens, in_features, out_features
    return tokens, out_features, in_features


def _as_layer(name: str, rows: int, cols: int, depth: int) -> tuple[int, int, int]:
    """Tokens, in_features and out_features of the layer for which a kernel computes such a product."""
    if _kernel(name) == "wgrad":
        return depth, cols, rows
    return (rows, cols, depth) if _transposed(name) else (rows, depth, cols)


def _transposed(name: str) -> bool:
    """Whether the product is with the weight as it lies, as in dgrad."""
    return _kernel(name) in ("dgrad", "dgrad_pairs", "dglu") or "depth_first" in name


def _traffic(one: launch.Launch) -> int:
    tensors = (value.base if hasattr(value, "base") else value for value in one.arguments)
    return sum({id(t): t.nbytes for t in tensors if isinstance(t, Tensor)}.values())
