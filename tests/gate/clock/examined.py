"""What tests of costs ask of a compiled entry, in a process that compiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import triton

from tpkernels.gate.ahead_of_time import Entry, ast_source, gpu_target
from tpkernels.gate.catalog import recipes
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.launch import Built, Launch, box_bytes, launch_of
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.workload import EntryWorkload, Product, of_entry


@dataclass(frozen=True)
class Examined:
    cost: Cost
    grid: tuple[int, int, int]
    resident: int
    fetched: int  # bytes, of four tiles of six steps
    stored: int
    tensor: float  # cycles of their products
    exits: int  # warps that ended at EXIT
    boxes: tuple[int, ...]  # by our rule
    compiled_boxes: tuple[int, ...]  # as Triton says
    faults: dict[str, str]  # what was planted -> the error


class Deeper(EntryWorkload):
    """Says twice the depth of a step that is compiled."""

    @property
    def product(self) -> Product | None:  # type: ignore[override]
        found = super().product
        return found and replace(found, depth=2 * found.depth)


class Richer(EntryWorkload):
    """Says that a step has two weights."""

    @property
    def product(self) -> Product | None:  # type: ignore[override]
        found = super().product
        return found and replace(found, weights=2)


class WithoutScales(EntryWorkload):
    """Says that a step loads its operands alone."""

    @property
    def product(self) -> Product | None:  # type: ignore[override]
        found = super().product
        return found and replace(found, beside=0)


def in_fp8(name: str) -> tuple[Cost, dict[str, str]]:
    """The cost of an entry whose scales are loaded step by step; what was planted -> the error."""
    entry = recipes()[name].entry()
    built = Built.of(_compiled(entry))
    return cost_of(built, of_entry(entry)), {
        "scales that nobody knows of": _error(lambda: cost_of(built, WithoutScales(entry))),
        "a step half as deep as the launch says": _error(lambda: cost_of(built, Deeper(entry))),
    }


def _compiled(entry: Entry) -> Any:
    with TemporaryDirectory(prefix="tpkernels-") as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        return triton.compile(ast_source(entry), target=gpu_target("sm_90"), options=entry.options)


def examined(name: str) -> Examined:
    entry = recipes()[name].entry()
    compiled = _compiled(entry)
    built, work = Built.of(compiled), of_entry(entry)
    launch = work.on_one(built, 4, 6)
    ran = run(translate(built.code), launch)
    recorded = recipes()[name].launch()
    described = [value for value in recorded.arguments if hasattr(value, "block_shape")]
    metas = compiled.metadata.tensordesc_meta or ()
    return Examined(
        cost_of(built, work),
        launch.grid,
        launch.resident,
        ran.fetched,
        ran.stored,
        ran.tensor,
        sum(mark.opcode == "EXIT" for mark in ran.marks),
        tuple(box_bytes(one) for one in described),
        tuple(_bytes_of(meta) for meta in metas),
        {
            "a step half as deep as the launch says": _error(lambda: cost_of(built, Deeper(entry))),
            "one weight of two": _error(lambda: cost_of(built, Richer(entry))),
            "an argument too many": _error(lambda: _one_more(built, launch)),
            "no room for a block": _error(lambda: replace(built, shared=2**20).fitting()),
        },
    )


def _one_more(built: Built, launch: Launch) -> None:
    launch_of(built, [1] * (len(built.code.parameters) + 1), launch.grid)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # the test says which
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _bytes_of(meta: dict[str, Any]) -> int:
    size: int = meta["elem_size"]
    for side in meta["block_size"]:
        size *= side
    return size
