"""Which kernels are tried for the products of a model, and why: the tables of docs/which-kernels.md.

python -m bench.which_kernels

Needs no GPU: candidates are those of the chooser, cycles those that are kept with the gate's budgets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from tpkernels.cli.tuning import SplitModel, model_calls
from tpkernels.dispatch.candidates import TARGET_GPUS, Candidate, candidates, entry_of
from tpkernels.dispatch.problem import Problem
from tpkernels.dispatch.record import Primitive
from tpkernels.dispatch.registered import entry_specs
from tpkernels.dispatch.workload import EntryWorkload
from tpkernels.gate.clock.cost import Cost
from tpkernels.gate.clock.model import KernelPrediction, predict
from tpkernels.gate.expectations import minor_version, read
from tpkernels.kernels.footprints import TABLE
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import RTX_5090, Target, fp8_obstacle
from tpkernels.kernels.tiles import KERNELS, Kernel, MatmulTile, default_tiles
from tpkernels.kernels.tiles import candidates as shipped_tiles
from tpkernels.planning.gpus import RATED_GPUS

MODEL, TOKENS = "llama3-8b", 8192
RANKS = (8, 1)  # tensor-parallel
CLOCKED = "h100"  # the GPU of the clock's model
# TFLOP/s of cuBLAS on an H100 by depth, of fp16 and 8192 x 8192 results: Triton's Gluon tutorial 07
CUBLAS = {512: 588, 1024: 588, 4096: 646, 16384: 665}
FP8_PRODUCT: tuple[Kernel, torch.dtype] = "linear", torch.float8_e4m3fn
TARGETS = {key.upper(): gpu.target for key, gpu in TARGET_GPUS.items()} | {"RTX 5090": RTX_5090}


def main() -> None:
    for line in (*kernel_table(), "", *problem_table()):
        print(line, flush=True)


def kernel_table() -> Iterator[str]:
    """The tiles of each kernel, in Markdown; GPUs with the same share rows."""
    yield "| GPU | form | kernel | default tiles | tried beside them |"
    yield "|---|---|---|---|---|"
    gpus: dict[tuple[str, ...], list[str]] = {}
    for name, target in TARGETS.items():
        gpus.setdefault(tuple(_kernel_rows(target)), []).append(name)
    for rows, names in gpus.items():
        yield from (f"| {', '.join(names)} | {row}" for row in rows)


def _kernel_rows(target: Target) -> Iterator[str]:
    form: Form = "descriptor" if target.has_tma else "pointer"
    in_fp8 = () if fp8_obstacle(target) else (FP8_PRODUCT,)
    for kernel, dtype in (*((kernel, torch.bfloat16) for kernel in KERNELS), *in_fp8):
        default = default_tiles(kernel, form, dtype, target)
        shipped = shipped_tiles(kernel, form, dtype, target)
        beside = tuple(tile for tile in shipped if tile not in default)
        name = kernel if dtype == torch.bfloat16 else f"{kernel}, fp8"
        yield f"{form} | {name} | {_named(default)} | {_named(beside)} |"


def _named(tiles: Sequence[MatmulTile]) -> str:
    return ", ".join(f"`{tile.name}`" for tile in tiles) or "none"


@dataclass(frozen=True)
class Predicted:
    """A candidate, and what the clock's model says of it."""

    candidate: Candidate
    found: KernelPrediction
    same_epilogue: bool  # else of the quickest that is compiled with this tile


def problem_table() -> Iterator[str]:
    """The products of the model on the GPU of the clock, in Markdown."""
    columns = (
        "ranks",
        "product",
        "epilogue",
        "tried",
        "ours",
        "model, µs",
        "TFLOP/s",
        "limit",
        "cuBLAS",
        "least, µs",
    )
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for ranks in RANKS:
        seen = set[str]()
        for record, arguments in model_calls(SplitModel(MODEL, ranks, TOKENS), torch.bfloat16, True):
            problem = record.problem(*arguments)
            if problem.step != "wgrad" and problem.key not in seen:  # weight gradients are added to main_grad
                seen.add(problem.key)
                yield problem_row(ranks, record, problem)


def problem_row(ranks: int, record: Primitive[..., Any], problem: Problem) -> str:
    found = candidates(record, problem, TARGET_GPUS[CLOCKED])
    predicted = [one for one in (_predicted(problem, candidate) for candidate in found) if one]
    rows, cols = problem.product
    cells = [
        str(ranks),
        f"{problem.step} {rows}x{cols}x{problem.depth}",
        entry_of(problem)[1],
        str(len(found)),
    ]
    if predicted:
        best = min(predicted, key=lambda one: one.found.seconds)
        mark = "" if best.same_epilogue else " *"
        cells.append(f"`{best.candidate.name.removeprefix('triton/')}`{mark}")
        cells += [f"{best.found.seconds * 1e6:,.0f}", f"{best.found.tflops:.0f}", best.found.bound]
    else:
        cells += [""] * 4
    near = min(CUBLAS, key=lambda depth: abs(depth - problem.depth))
    return f"| {' | '.join(cells)} | {CUBLAS[near]} | {_least(problem)} |"


def _least(problem: Problem) -> str:
    """Microseconds by the data sheet: of products, or of bytes of operands and result, each once."""
    rows, cols = problem.product
    weights = 2 if problem.kernel == "glu" else 1
    flops = 2 * rows * cols * problem.depth * weights
    numbers = (rows + cols * weights) * problem.depth + rows * cols
    return f"{RATED_GPUS[CLOCKED].floor(flops, problem.dtype.itemsize * numbers) * 1e6:,.0f}"


def _predicted(problem: Problem, candidate: Candidate) -> Predicted | None:
    """By the costs that are kept for this Triton; None for torch, and for a tile without costs."""
    if candidate.tile is None:
        return None
    costs = _costs()
    kernel, epilogue = entry_of(problem)
    start = f"{kernel}/{candidate.form}/bf16/{candidate.tile.name}/"
    same = start + epilogue in costs
    names = [start + epilogue] if same else [name for name in costs if name.startswith(start)]
    found = []
    for name in names:
        work = EntryWorkload(entry_specs()[name].entry(), _layer(problem))
        try:
            found.append(predict(costs[name], work))
        except ValueError:  # of other sizes than it is compiled for
            continue
    if not found:
        return None
    return Predicted(candidate, min(found, key=lambda one: one.seconds), same)


@cache
def _costs() -> dict[str, Cost]:
    """Return the costs that budgets keep for this Triton, by entry."""
    rows = read(TABLE)[minor_version(triton.__version__)].rows["sm_90"]
    return {name: budget.cost for name, budget in rows.items() if budget.cost}


def _layer(problem: Problem) -> tuple[int, int, int]:
    """Tokens, out_features and in_features of the layer whose product it is; of one, where two are summed."""
    pairs = 2 if problem.step == "dgrad_pairs" else 1
    return problem.tokens, problem.out_features // pairs, problem.in_features


if __name__ == "__main__":
    main()
