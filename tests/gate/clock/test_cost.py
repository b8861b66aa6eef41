"""Costs of compiled entries: what must hold of each, and what is refused.

That a step copies and multiplies what its shape asks for, the clock itself holds each entry of the gate to.
"""

import json

import pytest

from tests.gate.clock.examined import clocked, examined, in_fp8, of_rows
from tpkernels.gate.clock.cost import Cost
from tpkernels.gate.clock.model import predict
from tpkernels.registered.entries import entry_specs
from tpkernels.registered.workload import of_entry

TWO_BLOCKS = "linear/descriptor/bf16/64x128x64-w4-s4-p2-x2/gelu_tanh+bias+z"
FLAT = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/none"
BLOCKS = "scaled_linear/descriptor/fp8e4nv/64x128x128-w4-s3-p2-x2/none+blocks"
SHARED = "reduce_slots/pointer/bf16/16x128/bias"  # a grid of blocks that share all tiles
ALONE = "advance/pointer/bf16/one"  # a grid of one block


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
        assert one.boxes == one.compiled_boxes != (), name


@pytest.mark.parametrize("name", [TWO_BLOCKS, FLAT])
def test_what_does_not_fit_the_launch_is_refused(found, name):
    words = {what: error.split(":")[0] for what, error in found[name].faults.items()}
    assert words == {
        "a step half as deep as the launch says": "WrongAmount",
        "one weight of two": "WrongAmount",
        "an argument too many": "WrongLaunch",
        "no room for a block": "WrongLaunch",
    }


@pytest.mark.sweep
def test_products_of_fp8_take_half_the_cycles_and_their_scales_are_known_of(compiler):
    cost, faults = compiler.run(in_fp8, BLOCKS)
    assert (cost.ideal, cost.resident) == (2 * 64 * 128 * 128 / 8192, 2)
    operands = (64 + 128) * 128
    told = faults["scales that nobody knows of"]
    assert told.startswith(f"WrongAmount: {BLOCKS}: a step loads ")
    assert told.endswith(f" bytes, of which {operands:,}.0 by copies; its operands have {operands:,}")
    assert faults["a step half as deep as the launch says"].startswith("WrongAmount")


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
        ("gather_linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z", 32),
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
def test_loops_turn_as_often_as_the_launch_says_that_data_is(compiler, name, sizes, moved):
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
