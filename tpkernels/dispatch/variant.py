"""A kernel of ours as it is compiled: the value that a child process tries, and that a verdict is about.

Epilogues of one tile are compiled apart, and what shared memory holds differs between them. So one that works
says nothing about another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

import torch

from tpkernels.dispatch.candidates import Candidate, of_tile
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import OPTIONS, Layer
from tpkernels.kernels.activation_names import ACTIVATIONS, GATE_OF
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import Target
from tpkernels.kernels.tiles import MatmulTile

COL_TILES = 5  # of the larger results that a variant is tried on


@dataclass(frozen=True, slots=True)
class Variant:
    """A step with its dtype and options, computed with a tile."""

    step: str
    dtype: str
    options: tuple[str, ...]
    form: Form
    tile: str

    @staticmethod
    def of(problem: Problem, candidate: Candidate) -> Variant:
        assert candidate.tile is not None, "a kernel of ours"
        assert candidate.form is not None, "a kernel of ours"
        dtype = str(problem.dtype).removeprefix("torch.")
        return Variant(problem.step, dtype, problem.options, candidate.form, candidate.tile.name)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Variant:
        return Variant(**{**value, "options": tuple(value["options"])})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        words = self.step, self.dtype, "+".join(self.options), self.candidate.name
        return " ".join(word for word in words if word)

    @property
    def candidate(self) -> Candidate:
        return of_tile(self.form, MatmulTile.named(self.tile))

    def samples(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Arguments on the meta device, by what their sizes are good for."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        tile = MatmulTile.named(self.tile)
        sizes = sizes_for(tile, target, unit=16 // dtype.itemsize)
        return {
            name: self._arguments(*of_product, tile.block_depth, dtype) for name, of_product in sizes.items()
        }

    def _arguments(self, rows: int, cols: int, depth: int, step: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """step: by which the depths of two pairs differ, so that a tile does not take as many for each"""
        record = PRODUCTS[self.step]
        tokens, out_features, in_features = {
            "linear": (rows, cols, depth),
            "glu": (rows, cols, depth),
            "dgrad": (rows, depth, cols),
            "dglu": (rows, depth, cols),
            "wgrad": (depth, rows, cols),
        }[str(record.kernel)]
        layer = Layer(
            tokens,
            out_features,
            in_features,
            dtype,
            activation=next((word for word in ACTIVATIONS if word in self.options), "none"),
            glu=next((word for word in GATE_OF if word in self.options), "swiglu"),
        )
        call = signature(record.by_torch).bind(*record.sample(layer))
        for name, word in OPTIONS.items():
            if isinstance(call.arguments.get(name), bool):
                call.arguments[name] = word in self.options
            elif name in call.arguments and word not in self.options:
                call.arguments[name] = None
        if record.name == "wgrad_accumulate_":  # whose options are the dtype of what is added to
            main_grad, dy, x = call.args
            return main_grad.to(getattr(torch, self.options[0])), dy, x
        if record.pairs == 2 and depth > step:
            dy, weight, _, weight2 = call.args
            return dy, weight, layer.tensor(rows, depth - step), weight2[: depth - step]
        return call.args


def sizes_for(tile: MatmulTile, target: Target, unit: int) -> dict[str, tuple[int, int, int]]:
    """(rows, cols, depth) of products that take a persistent kernel through all that it can meet.

    A single tile of a single step leaves most buffers, and all but one group of warps, without work. Of the
    larger ones each resident program gets three tiles or more, each of its groups two, one program one more.
    A tile takes one step more than fills each buffer twice, so that the next tile begins with another buffer.
    Ragged ones end within a tile and within a step, and their sizes are not divisible by 16.

    unit: the elements that TMA moves at least; rows of matrices are made of whole ones
    """
    turns = 1 + 2 * max(1, tile.consumers)
    row_tiles = -(-(turns * target.processors * tile.per_processor + 1) // COL_TILES)
    rows, cols = row_tiles * tile.block_rows, COL_TILES * tile.block_cols
    depth = (2 * tile.num_stages + 1) * tile.block_depth
    return {
        "a single tile": (tile.block_rows, tile.block_cols, tile.block_depth),
        "full tiles": (rows, cols, depth),
        "ragged tiles": (rows - unit, cols - unit, depth - unit),
    }
