"""What ops read and write between their products, counted by hand and by watching each aten call.

A pass reads or writes all tokens of one matrix between the two products of an MLP: h, z, g, u or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.counts import Operators
from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import Setting, leaf, prepare
from tpkernels import ops
from tpkernels.dispatch import primitives
from tpkernels.dispatch.record import copied_into
from tpkernels.ops.matmul import gradient_sum
from tpkernels.ops.tensor_parallel.column_linear import column_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp


def between(features: int, *sides: int) -> Callable[[Tensor], bool]:
    """Matrices of so many features, or transposes, but no weights: their other side is one of `sides`."""

    def counts(tensor: Tensor) -> bool:
        if tensor.ndim != 2 or features not in tensor.shape:
            return False
        other = tensor.shape[0] if tensor.shape[1] == features else tensor.shape[1]
        return other not in sides

    return counts


TOKENS, IN, BETWEEN, OUT = 64, 100, 24, 104  # no chunk has as many rows as weights have
Passes = dict[str, float]  # by call: how often all rows are read or written


def _passes(counted: Operators, features: int) -> Passes:
    """Of matrices (TOKENS, features) in fp32."""
    return passes_over(counted, TOKENS * features)


def passes_over(counted: Operators, elements: int) -> Passes:
    """How often so many elements of fp32 are read or written, by call."""
    moved = counted.moved.items()
    return {name.removeprefix("aten::"): size / (4 * elements) for name, size in moved if size}


def mlp(setting: Setting) -> tuple[Passes, Passes]:
    """Forward and backward of parallel_mlp: passes over h, z, g, u and their gradients."""
    prepare(setting)
    ranks = dist.get_world_size()
    gated, features = setting.activation == "swiglu", BETWEEN // ranks
    x = leaf(torch.randn(TOKENS // ranks if setting.sequence_parallel else TOKENS, IN))
    up, gate, down = (leaf(torch.randn(*shape)) for shape in ((features, IN),) * 2 + ((OUT, features),))
    bias = None if gated else leaf(torch.randn(features))
    forward, backward = (Operators(between(features, IN, OUT)) for _ in range(2))
    with forward:
        y = parallel_mlp(
            *(x, up, bias, down, None, dist.group.WORLD),
            activation=setting.activation,
            w_gate_shard=gate if gated else None,
            **setting.options,
        )
    leaves = [x, up, down, gate if gated else bias]
    with backward:
        torch.autograd.grad(y, leaves, torch.randn_like(y))
    return _passes(forward, features), _passes(backward, features)


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_column_linear_copies_nothing(overlap):
    """In forward: passes over y and z."""
    features = BETWEEN // dist.get_world_size()
    for activation, expected in ((None, {"mm": 1}), ("gelu", {"mm": 1, "gelu": 2})):
        prepare(Setting())
        x, weight = leaf(torch.randn(TOKENS // 2, IN)), leaf(torch.randn(features, IN))
        options = {"activation": activation, "sequence_parallel": True, "overlap": overlap}
        with Operators(between(features, IN)) as counted:
            column_linear(x, weight, None, dist.group.WORLD, **options)
        assert _passes(counted, features) == expected


@on_ranks(2)
def test_a_copy_would_be_counted():
    """Results are computed beside, and copied to where they belong: one reads and one writes each."""
    with patch.object(primitives, "into", copied_into):
        for activation, results, gradients in (("gelu_tanh", 2, 1), ("swiglu", 3, 3)):
            forward, backward = mlp(Setting(activation=activation))
            assert forward["copy_"] == 2 * results
            assert backward["copy_"] == 2 * gradients


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


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_parallel_mlp_copies_nothing_between_its_products(way):
    for activation in FORWARD:
        found = mlp(Setting(activation=activation, **way))
        assert found == (FORWARD[activation], BACKWARD[activation])


def test_dx_of_a_gated_unit_is_written_and_added_to_once():
    """(tokens, in_features): dx by one product, to which the other is added, and x for two weights."""
    x, gate, up = (torch.randn(rows, 100, requires_grad=True) for rows in (64, 24, 24))
    y = ops.swiglu(x, gate, up)
    with Operators(lambda tensor: tensor.shape == x.shape) as counted:
        torch.autograd.grad(y, [x, gate, up], torch.randn_like(y))
    assert passes_over(counted, x.numel()) == {"mm": 1 + 2, "addmm_": 2}


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
    with Operators(lambda tensor: tensor.shape == (64, 100)) as counted:
        total = gradient_sum(pairs)
    assert passes_over(counted, total.numel()) == expected
    exact = sum(dz.double() @ weight.double() for dz, weight in pairs)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)
