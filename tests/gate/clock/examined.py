"""What tests ask of a compiled entry, for `Compiler.run`; and of one with other options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.compiled import assembly_of
from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.cubin import read
from tpkernels.gate.clock.launch import Built, SmLaunch, box_bytes, launch_of
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.workload import Product
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.workload import EntryWorkload, of_entry


@dataclass(frozen=True)
class Examined:
    cost: Cost
    grid: tuple[int, int, int]
    resident: int
    fetched: int  # bytes, of four tiles of six steps
    stored: int
    tensor: float  # cycles of their products
    boxes: tuple[int, ...]  # by our rule
    compiled_boxes: tuple[int, ...]  # as Triton says
    faults: dict[str, str]  # what was planted -> the error


@dataclass(frozen=True)
class Mistaken(EntryWorkload):
    """Says something else of its steps than what is compiled."""

    lie: Callable[[Product], Product] = lambda product: product

    @property
    def product(self) -> Product | None:  # type: ignore[override]
        found = super().product
        return found and self.lie(found)


class Silent(EntryWorkload):
    """Tells of no integers in memory."""

    def _step(self, name: str, value: Any) -> int | None:
        return None


def deeper(found: Product) -> Product:
    return replace(found, depth=2 * found.depth)


def in_fp8(name: str) -> tuple[Cost, dict[str, str]]:
    """The cost of an entry whose scales are loaded step by step; what was planted -> the error."""
    entry = entry_specs()[name].entry()
    built = _built(entry)
    return cost_of(built, of_entry(entry)), {
        "scales that nobody knows of": _mistaken(built, entry, lambda found: replace(found, beside=0)),
        "a step half as deep as the launch says": _mistaken(built, entry, deeper),
    }


def of_rows(name: str, sizes: tuple[int, int, int]) -> tuple[Cost, str]:
    """The cost of a block at these sizes; what is said where the launch does not tell what data is."""
    entry = entry_specs()[name].entry()
    built = _built(entry)
    return cost_of(built, of_entry(entry, sizes)), _error(lambda: cost_of(built, Silent(entry, sizes)))


def examined(name: str) -> Examined:
    spec = entry_specs()[name]
    entry = spec.entry()
    built, work = _built(entry), of_entry(entry)
    launch = work.on_one(built, 4, 6)
    ran = run(translate(built.code), launch)
    described = [value for value in spec.launch().arguments if hasattr(value, "block_shape")]
    return Examined(
        cost_of(built, work),
        launch.grid,
        launch.resident,
        ran.fetched,
        ran.stored,
        ran.tensor,
        tuple(box_bytes(one) for one in described),
        tuple(bytes_of(box) for box in assembly_of(entry).boxes),
        {
            "a step half as deep as the launch says": _mistaken(built, entry, deeper),
            "one weight of two": _mistaken(built, entry, lambda found: replace(found, weights=2)),
            "an argument too many": _error(lambda: _one_more(built, launch)),
            "no room for a block": _error(lambda: replace(built, shared=2**20).fitting()),
        },
    )


def clocked(name: str, changes: Mapping[str, Any] | None = None) -> Cost:
    """The cost of an entry with other options or constants."""
    original, changes = entry_specs()[name].entry(), changes or {}
    constants = {key: changes.get(key, value) for key, value in original.constants.items()}
    options = {key: value for key, value in changes.items() if key not in constants}
    return cost_of(_built(replace(original, constants=constants, **options)), of_entry(original))


def _built(entry: Entry) -> Built:
    made = assembly_of(entry)
    return Built(read(made.cubin), made.warps, made.shared)


def _mistaken(built: Built, entry: Entry, lie: Callable[[Product], Product]) -> str:
    return _error(lambda: cost_of(built, Mistaken(entry, lie=lie)))


def _one_more(built: Built, launch: SmLaunch) -> None:
    launch_of(built, [1] * (len(built.code.parameters) + 1), launch.grid)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # the test says which
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bytes_of(meta: Mapping[str, Any]) -> int:
    size: int = meta["elem_size"]
    for side in meta["block_size"]:
        size *= side
    return size
