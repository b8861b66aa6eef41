"""Costs of compiled entries: what must hold of each, and what is refused.

That a step copies and multiplies what its shape asks for, the clock itself holds each entry of the gate to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from tests.compiled import assembly_of
from tpkernels.gate.ahead_of_time import Entry
from tpkernels.gate.clock.cost import Cost, cost_of
from tpkernels.gate.clock.cubin import read
from tpkernels.gate.clock.launch import Built, box_bytes, launch_of
from tpkernels.gate.clock.model import predict
from tpkernels.gate.clock.processor import run
from tpkernels.gate.clock.semantics import translate
from tpkernels.gate.clock.workload import Product
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.workload import EntryWorkload, of_entry

TWO_BLOCKS = "linear/descriptor/bf16/64x128x64-w4-s4-p2-x2/gelu_tanh+bias+z"
FLAT = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/none"
BLOCKS = "scaled_linear/descriptor/fp8e4nv/64x128x128-w4-s3-p2-x2/none+blocks"
SHARED = "reduce_slots/pointer/bf16/16x128/bias"  # a grid of blocks that share all tiles
ALONE = "advance/pointer/bf16/one"  # a grid of one block


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


def built(entry: Entry) -> Built:
    made = assembly_of(entry)
    return Built(read(made.cubin), made.warps, made.shared)


def error_of(call: Callable[..., object], *given: object) -> str:
    try:
        call(*given)
    except Exception as error:  # the test says which
        return f"{type(error).__name__}: {error}"
    return "nothing"


def deeper(found: Product) -> Product:
    return replace(found, depth=2 * found.depth)


# For `Compiler.run`, as `clocked` is: the costs of an entry, what it moves, and the errors of planted faults


def in_fp8(name: str) -> tuple[Cost, dict[str, str]]:
    """Of an entry whose scales are loaded step by step."""
    entry = entry_specs()[name].entry()
    made = built(entry)
    lies = {"scales that nobody knows of": lambda found: replace(found, beside=0), "half as deep": deeper}
    return cost_of(made, of_entry(entry)), {
        what: error_of(cost_of, made, Mistaken(entry, lie=lie)) for what, lie in lies.items()
    }


def of_rows(name: str, sizes: tuple[int, int, int]) -> tuple[Cost, str]:
    """Of a block at these sizes; the error is of a launch that does not tell what data is."""
    entry = entry_specs()[name].entry()
    made = built(entry)
    return cost_of(made, of_entry(entry, sizes)), error_of(cost_of, made, Silent(entry, sizes))


def examined(name: str) -> SimpleNamespace:
    """Of four tiles of six steps."""
    spec = entry_specs()[name]
    entry = spec.entry()
    made, work = built(entry), of_entry(entry)
    launch = work.on_one(made, 4, 6)
    ran = run(translate(made.code), launch)
    one_more = [1] * (len(made.code.parameters) + 1)
    return SimpleNamespace(
        cost=cost_of(made, work),
        grid=launch.grid,
        resident=launch.resident,
        fetched=ran.fetched,
        stored=ran.stored,
        tensor=ran.tensor,
        boxes=[box_bytes(value) for value in spec.launch().arguments if hasattr(value, "block_shape")],
        compiled_boxes=[prod((box["elem_size"], *box["block_size"])) for box in assembly_of(entry).boxes],
        faults={
            "half as deep": error_of(cost_of, made, Mistaken(entry, lie=deeper)),
            "one weight of two": error_of(
                cost_of, made, Mistaken(entry, lie=lambda found: replace(found, weights=2))
            ),
            "an argument too many": error_of(launch_of, made, one_more, launch.grid),
            "no room for a block": error_of(lambda: replace(made, shared=2**20).fitting()),
        },
    )


def clocked(name: str, changes: Mapping[str, Any] | None = None) -> Cost:
    """Of an entry with other options or constants."""
    original, changes = entry_specs()[name].entry(), changes or {}
    constants = {key: changes.get(key, value) for key, value in original.constants.items()}
    options = {key: value for key, value in changes.items() if key not in constants}
    return cost_of(built(replace(original, constants=constants, **options)), of_entry(original))


@pytest.fixture(scope="module")
def found(compiler):
    return {name: compiler.run(examined, name) for name in (TWO_BLOCKS, FLAT)}


def test_entries_move_and_multiply_what_their_shapes_say_and_end(found):
    two = found[TWO_BLOCKS]
    assert (two.grid, two.resident, two.cost.resident) == ((2, 1, 1), 2, 2)
    assert two.cost.ideal == 2 * 64 * 128 * 64 / 4096  # of one tile: the tensor cores are shared
    assert two.cost.step.cycles >= two.cost.ideal
    assert two.tensor == 4 * 6 * two.cost.ideal
    operands, bias = 4 * 6 * (64 + 128) * 64 * 2, 4 * 128 * 2
    assert operands < two.fetched <= operands + 32 * bias  # each warp reads the bias anew, by sectors
    assert two.stored == 4 * 2 * 64 * 128 * 2  # y and z
    flat = found[FLAT]
    assert flat.tensor == 4 * 6 * flat.cost.ideal
    assert (flat.fetched, flat.stored) == (4 * 6 * (128 + 256) * 64 * 2, 4 * 128 * 256 * 2)
    for name, one in found.items():
        assert one.boxes == one.compiled_boxes != [], name


@pytest.mark.parametrize("name", [TWO_BLOCKS, FLAT])
def test_what_does_not_fit_the_launch_is_refused(found, name):
    words = {what: error.split(":")[0] for what, error in found[name].faults.items()}
    assert words == {
        "half as deep": "WrongAmount",
        "one weight of two": "WrongAmount",
        "an argument too many": "WrongLaunch",
        "no room for a block": "WrongLaunch",
    }


@pytest.mark.sweep
def test_products_of_fp8_take_half_the_cycles_with_known_scales(compiler):
    cost, faults = compiler.run(in_fp8, BLOCKS)
    assert (cost.ideal, cost.resident) == (2 * 64 * 128 * 128 / 8192, 2)
    operands = (64 + 128) * 128
    told = faults["scales that nobody knows of"]
    assert told.startswith(f"WrongAmount: {BLOCKS}: a step loads ")
    assert told.endswith(f" bytes, of which {operands:,}.0 by copies; its operands have {operands:,}")
    assert faults["half as deep"].startswith("WrongAmount")


def test_costs_survive_json(found):
    for name, one in found.items():
        assert Cost.from_json(json.loads(json.dumps(one.cost.as_json()))) == one.cost, name
    with pytest.raises(TypeError, match="fields of Cost"):
        Cost.from_json({"edge": 1})


@pytest.mark.parametrize(
    ("name", "guessed"),
    [
        pytest.param("glu/descriptor/bf16/128x128x64-w8-s4-p2/swiglu+gu", 0, marks=pytest.mark.sweep),
        pytest.param("dglu/descriptor/bf16/128x128x64-w8-s4-p4/swiglu+h", 0, marks=pytest.mark.sweep),
        ("wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32", 0),
        # 8 warps look at flags, in 4 tiles
        ("linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z+wait", 32),
        pytest.param("linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z", 0, marks=pytest.mark.sweep),
    ],
)
def test_each_kind_of_kernel_runs_to_its_end(compiler, name, guessed):
    cost = compiler.run(clocked, name)
    assert cost.step.cycles >= cost.ideal > 0
    assert cost.guessed == guessed


TABLE = 128  # rows of a table, 1 in 4 of whose ids a rank has; each has three blocks of eight tokens


@pytest.mark.parametrize(
    ("name", "sizes", "moved"),
    [
        ("softmax_statistics/pointer/bf16/2048", (64, 3 * 2048, 1024), 3 * 2048 * 2),
        ("embedding_bwd/pointer/bf16/8x1024", (24 * TABLE, 4 * TABLE, 1024), (24 + 1) * 1024 * 2),
    ],
)
def test_loops_turn_as_often_as_the_launch_says(compiler, name, sizes, moved):
    """All columns of a row that counts, all tokens of a row of a table."""
    cost, silent = compiler.run(of_rows, name, sizes)
    assert moved <= cost.bytes < 1.5 * moved
    assert cost.guessed == 0
    assert silent.startswith("UnknownTrips: ")
    assert silent.endswith(": how often a loop turns depends on data that the launch does not tell")


def test_rows_are_costed_by_the_block_whoever_computes_it(compiler):
    shared, alone = compiler.run(clocked, SHARED), compiler.run(clocked, ALONE)
    three_slots_and_the_sum, bias = 4 * 16 * 128 * 2, 128 * 2
    assert (shared.step, shared.resident, shared.bytes) == (None, 8, three_slots_and_the_sum + bias)
    assert next(iter(shared.edge.waits)) == "scoreboard: LDG"
    assert alone.edge.cycles > 500  # a load
    assert alone.start == 0


LINEAR = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
POINTER = "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z"
WGRAD = "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32"
LAYER = (8192, 4096, 3584)  # tokens, out_features, in_features
OPTIONS = {
    "two_stages": (LINEAR, {"num_stages": 2}, 30, 60),
    "one_stage": (LINEAR, {"num_stages": 1}, 70, 130),
    "four_warps_spill": (LINEAR, {"num_warps": 4}, 50, 200),
    "not_flattened": (LINEAR, {"FLATTEN": False}, 2, 8),
    "adds_through_registers": (WGRAD, {"REDUCE": False, "num_stages": 3}, 1, 15),
    "pointers_one_stage": (POINTER, {"num_stages": 1}, 80, 300),
    "pointers_alignment_forgotten": (POINTER, {"aligned": frozenset()}, 100, 2000),
}


@pytest.mark.parametrize(
    ("name", "changes", "least", "most"),
    [
        pytest.param(*case, id=what, marks=[] if what == "pointers_one_stage" else pytest.mark.sweep)
        for what, case in OPTIONS.items()
    ],
)
def test_a_worse_option_costs_what_it_should(compiler, name, changes, least, most):
    """All figures are of the model, none is measured; docs/clock.md has the table. In percent of the time."""
    work = of_entry(entry_specs()[name].entry(), LAYER)
    costs = [compiler.run(clocked, name, made) for made in ({}, changes)]
    before, after = (predict(cost, work).seconds for cost in costs)
    assert least <= 100 * (after / before - 1) <= most
