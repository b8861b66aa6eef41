"""What the clock says of edits that budgets of registers and instructions do not price.

All figures are of the model, none is measured; docs/clock.md has the table.
"""

from functools import cache

import pytest

from tests.gate.clock.examined import Edit, clocked
from tpkernels.dispatch.registered import entry_specs
from tpkernels.dispatch.workload import of_entry
from tpkernels.gate.clock.model import predict

LINEAR = "linear/descriptor/bf16/128x256x64-w8-s4-p2-flat/gelu_tanh+bias+z"
POINTER = "linear/pointer/bf16/128x128x32-w8-s3-p1/gelu_tanh+bias+z"
WGRAD = "wgrad/descriptor/bf16/128x256x64-w8-s4-p4-flat/+=fp32"
LAYER = (8192, 4096, 3584)  # tokens, out_features, in_features

ACT: Edit = (
    "epilogues",
    "return z * sigmoid(_gelu_tanh_argument(z), FAST)",
    "return z / (1.0 + tl.exp(-z)) + z / (1.0 + tl.exp(-2.0 * z))",
)
SCALED: Edit = (
    "linear",
    "acc = tl.dot(x_block, w_block.T, acc, input_precision=PRECISION)",
    "acc = tl.dot(x_block, w_block.T, acc * 0.999, input_precision=PRECISION)",
)
ORDER: Edit = (
    "linear",
    "        t = row_tile * BLOCK_ROWS\n        n = col_tile * BLOCK_COLS\n",
    "        n = BLOCK_COLS * col_tile\n        t = BLOCK_ROWS * row_tile\n",
)
COMMUTED: Edit = ("epilogues", "return 0.5 + half_tanh", "return half_tanh + 0.5")


@pytest.fixture(scope="module")
def sound(compiler):
    """The cost of an entry as it is."""
    return cache(lambda name: compiler.run(clocked, name))


@pytest.mark.parametrize(
    ("name", "edits", "changes", "least", "most"),
    [
        pytest.param(LINEAR, [], {"num_stages": 2}, 30, 60, id="two_stages", marks=pytest.mark.sweep),
        pytest.param(LINEAR, [], {"num_stages": 1}, 70, 130, id="one_stage", marks=pytest.mark.sweep),
        pytest.param(LINEAR, [], {"num_warps": 4}, 50, 200, id="four_warps_spill", marks=pytest.mark.sweep),
        pytest.param(LINEAR, [], {"FLATTEN": False}, 2, 8, id="not_flattened", marks=pytest.mark.sweep),
        pytest.param(
            LINEAR, [SCALED], {}, 10, 40, id="accumulator_scaled_in_the_loop", marks=pytest.mark.sweep
        ),
        pytest.param(LINEAR, [ACT], {}, 3, 12, id="two_exact_exponentials"),
        pytest.param(
            WGRAD,
            [],
            {"REDUCE": False, "num_stages": 3},
            1,
            15,
            id="wgrad_adds_through_registers",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            POINTER, [], {"num_stages": 1}, 80, 300, id="pointers_one_stage", marks=pytest.mark.sweep
        ),
        pytest.param(
            POINTER,
            [],
            {"aligned": frozenset()},
            100,
            2000,
            id="pointers_alignment_forgotten",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            LINEAR, [ORDER], {}, -0.05, 0.05, id="neutral_order_of_coordinates", marks=pytest.mark.sweep
        ),
        pytest.param(LINEAR, [COMMUTED], {}, -0.05, 0.05, id="neutral_sum_commuted"),
    ],
)
def test_an_edit_costs_what_it_should(compiler, sound, name, edits, changes, least, most):
    before, after = sound(name), compiler.run(clocked, name, edits, changes)
    work = of_entry(entry_specs()[name].entry(), LAYER)
    percent = 100 * (predict(after, work).seconds / predict(before, work).seconds - 1)
    steps, edges = (
        [f"{part.cycles:,.0f}" for part in parts]
        for parts in ((before.step, after.step), (before.edge, after.edge))
    )
    print(f"{percent:+.1f} % of the time; a step {' -> '.join(steps)} cycles, an edge {' -> '.join(edges)}")
    assert least <= percent <= most
