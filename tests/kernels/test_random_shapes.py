"""Products at shapes, layouts and epilogues that nobody thought of, against float64."""

import pytest
import torch

pytest.importorskip("hypothesis", reason="random shapes need hypothesis")  # a bare GPU machine has none

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.checks import DTYPES, LAYOUTS
from tests.kernels.launchers import CHOICES, PRODUCTS, assert_product

SIZES = st.integers(1, 50)


# derandomize: a red run is red for everyone; a kernel in the interpreter is slow, so no deadline
@settings(derandomize=True, deadline=None, max_examples=24, database=None)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES).filter(lambda shape: shape[0] * min(shape[1:]) >= 300),
    dtype=st.sampled_from(list(DTYPES.values())),
    choice=st.sampled_from(list(CHOICES.values())),
    # an expanded operand gives rows that are all alike, too few different elements for a bound on averages
    layout=st.sampled_from([layout for name, layout in LAYOUTS.items() if name != "expanded"]),
)
def test_product_matches_float64_at_random(shape, dtype, choice, layout):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, value = choice
    operands = PRODUCTS[name].random(shape, dtype, device)
    assert_product(name, [layout(one) if one.ndim == 2 else one for one in operands], value)
