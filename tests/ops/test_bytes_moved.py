"""What ops read and write between their products, counted by hand and by watching each aten call.

A pass reads or writes all tokens of one matrix between the two products of an MLP: h, z, g, u or a gradient.
"""

import pytest
import torch

from tests.ops import bytes_moved
from tests.ops.bytes_moved import BytesMoved
from tests.ops.parallel_cases import Setting
from tpkernels import ops
from tpkernels.ops.tensor_parallel.product_sum import product_sum

WAYS = {
    "chunks arrive": {},
    "all rows at once": {"overlap": False},
    "without sequence parallelism": {"sequence_parallel": False},
}
FORWARD = {
    "gelu_tanh": {
        "addmm": 1,  # z
        "gelu": 2,  # z -> h
        "mm": 1,  # y of h
    },
    "swiglu": {
        "mm": 3,  # g, u; y of h
        "silu": 2,  # g -> h
        "mul_": 3,  # h, u -> h
    },
}
BACKWARD = {
    "gelu_tanh": {
        "mm": 4,  # dh; dw_down of h; dx and dw_up of dz
        "gelu_backward": 3,  # dh, z -> dz, where dh was
        "sum": 1,  # db_up of dz
        "gelu": 2,  # z -> h
    },
    "swiglu": {
        "mm": 5,  # dh; dw_down of h; dx of du; dw_up of du and dw_gate of dg
        "addmm_": 1,  # dx of dg as well
        "silu": 2,  # g -> f(g)
        "mul": 3,  # dh, u -> dh u
        "silu_backward": 3,  # dh u, g -> dg, where dh u was
        "mul_": 6,  # dh, f(g) -> du, where dh was; f(g), u -> h, where f(g) was
    },
}


@pytest.mark.parametrize("activation", FORWARD)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_parallel_mlp_copies_nothing_between_its_products(ranks2, way, activation):
    setting = Setting(activation=activation, **way)
    assert ranks2.run(bytes_moved.mlp, setting) == [(FORWARD[activation], BACKWARD[activation])] * 2


def test_a_copy_would_be_counted(ranks2):
    """One that reads and one that writes each result."""
    for activation, results, gradients in (("gelu_tanh", 2, 1), ("swiglu", 3, 3)):
        for forward, backward in ranks2.run(bytes_moved.mlp_that_copies, Setting(activation=activation)):
            assert forward["copy_"] == 2 * results
            assert backward["copy_"] == 2 * gradients


@pytest.mark.parametrize("overlap", [True, False])
def test_column_linear_copies_nothing(ranks2, overlap):
    for activation, expected in ((None, {"mm": 1}), ("gelu", {"mm": 1, "gelu": 2})):
        setting = Setting(activation=activation, overlap=overlap)
        assert ranks2.run(bytes_moved.column, setting) == [expected] * 2


def test_dx_of_a_gated_unit_is_written_and_added_to_once():
    """(tokens, in_features): dx by one product, to which the other is added, and x for two weights."""
    x, gate, up = (torch.randn(rows, 100, requires_grad=True) for rows in (64, 24, 24))
    y = ops.swiglu(x, gate, up)
    with BytesMoved(lambda tensor: tensor.shape == x.shape) as counted:
        torch.autograd.grad(y, [x, gate, up], torch.randn_like(y))
    passes = {name: moved / (x.numel() * 4) for name, moved in counted.by_call.items() if moved}
    assert passes == {"mm": 1 + 2, "addmm_": 2}


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (1, {"mm": 1}),
        (2, {"mm": 1, "addmm_": 2}),
        (3, {"mm": 2, "addmm_": 2, "add_": 3}),
        (4, {"mm": 2, "addmm_": 4, "add_": 3}),
    ],
)
def test_dx_of_weights_that_share_x_is_summed_two_products_at_a_time(weights, expected):
    pairs = [(torch.randn(64, rows), torch.randn(rows, 100)) for rows in (24, 8, 8, 16)[:weights]]
    with BytesMoved(lambda tensor: tensor.shape == (64, 100)) as counted:
        total = product_sum(pairs, transposed=False)
    passes = {name: moved / (total.numel() * 4) for name, moved in counted.by_call.items() if moved}
    assert passes == expected
    exact = sum(dz.double() @ weight.double() for dz, weight in pairs)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)


def test_counter_counts_what_is_read_and_written():
    a, b = torch.ones(4, 8), torch.ones(4, 8)
    size = a.numel() * 4
    with BytesMoved(lambda tensor: True) as counted:
        a.t()[2:].view_as(a.t()[2:])
        torch.empty_like(a).copy_(b)
        a.add_(b)
        torch.mul(a, b, out=b)
        a + b
        a.zero_()
    assert {name: moved for name, moved in counted.by_call.items() if moved} == {
        "copy_": 2 * size,
        "add_": 3 * size,
        "mul": 3 * size,
        "add": 3 * size,
        "zero_": size,
    }
