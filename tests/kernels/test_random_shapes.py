"""Launchers at shapes, layouts and epilogues that nobody thought of, against float64."""

import pytest
import torch

pytest.importorskip("hypothesis", reason="random shapes need hypothesis")  # a bare GPU machine has none

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import DTYPES, LAYOUTS
from tests.kernels.test_dgrad import assert_dgrad_act
from tests.kernels.test_dgrad import operands as dgrad_operands
from tests.kernels.test_linear import assert_linear
from tests.kernels.test_linear import operands as linear_operands
from tpkernels.kernels.activations import ACTIVATIONS

# derandomize: a red run is red for everyone; a kernel in the interpreter is slow, so no deadline
SETTINGS = settings(derandomize=True, deadline=None, max_examples=15, database=None)
RANDOM_SHAPES = st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 80)).filter(
    lambda shape: shape[0] * min(shape[1:]) >= 300
)
# an expanded operand gives rows that are all alike, too few different elements for a bound on averages
RANDOM_LAYOUTS = st.sampled_from([layout for name, layout in LAYOUTS.items() if name != "expanded"])


@SETTINGS
@given(
    shape=RANDOM_SHAPES,
    dtype=st.sampled_from(list(DTYPES.values())),
    activation=st.sampled_from(ACTIVATIONS),
    layout=RANDOM_LAYOUTS,
    bias=st.booleans(),
)
def test_linear_fwd_matches_float64_at_random(shape, dtype, activation, layout, bias):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, w, b = linear_operands(shape, dtype, device)
    assert_linear(layout(x), layout(w), b if bias else None, activation)


@SETTINGS
@given(
    shape=RANDOM_SHAPES,
    dtype=st.sampled_from(list(DTYPES.values())),
    activation=st.sampled_from(ACTIVATIONS),
    layout=RANDOM_LAYOUTS,
)
def test_dgrad_act_matches_float64_at_random(shape, dtype, activation, layout):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dy, w, z = dgrad_operands(shape, dtype, device)
    assert_dgrad_act(layout(dy), layout(w), layout(z), activation)
