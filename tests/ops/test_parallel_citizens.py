"""Ops over a group as citizens of PyTorch: opcheck, compile, autocast, 16-bit main_grad, uneven shards."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

from tests.ops import parallel_citizens as citizens
from tests.ops import parallel_compile


@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("ranks1", ["columns", "plain column", "plain row", "gated mlp", "gated mlp backward"]),
        ("ranks2", ["column", "column backward", "row", "row backward", "mlp", "mlp backward"]),
        ("ranks2", ["columns", "wide column backward", "wide row backward", "gated mlp backward"]),
    ],
)
def test_operators_pass_opcheck(request, world, names):
    ranks = request.getfixturevalue(world)
    for problems in ranks.run(citizens.operators_pass_opcheck, names, timeout=180):
        assert problems == []


COMPILED = {
    "columns": (citizens.columns, {}),
    "columns gelu": (citizens.columns, {"activation": "gelu"}),
    "columns that save the gathered x": (citizens.columns, {"activation": "silu", "save_gathered": True}),
    "row": (citizens.row, {}),
    "mlp": (citizens.mlp, {"gated": False}),
    "gated mlp": (citizens.mlp, {"gated": True}),
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence_parallel"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_ops_save_and_compute_what_eager_ones_do(ranks2, name, sequence_parallel):
    function, options = COMPILED[name]
    options = options | {"sequence_parallel": sequence_parallel}
    assert ranks2.run(partial(citizens.unlike_compiled, function, **options), timeout=120) == [[], []]


@pytest.mark.parametrize("world", ["ranks1", "ranks2"])
def test_main_grads_take_under_compile_what_they_take_eagerly(request, world):
    models = [parallel_compile.two_operators, parallel_compile.one_operator]
    for wrong in request.getfixturevalue(world).run(
        parallel_compile.main_grads_under_compile, "aot_eager", models, [False, True], timeout=300
    ):
        assert wrong == []


def test_a_graph_tells_groups_of_another_size_apart(ranks2):
    for told in ranks2.run(parallel_compile.groups_in_graphs):
        assert len(told) == 6
        assert {name.partition(" ")[2] for name in told.values()} == {"of 2 ranks"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_main_grads_take_from_inductor_what_they_take_eagerly(ranks1):
    models = [parallel_compile.one_operator]
    (wrong,) = ranks1.run(parallel_compile.main_grads_under_compile, "inductor", models, [False], timeout=300)
    assert wrong == []


def test_main_grads_may_have_16_bits(ranks2):
    assert max(ranks2.run(citizens.sixteen_bit_main_grads)) < 1e-2


def test_autocast_casts_what_goes_in_and_gradients_come_back_in_their_dtypes(ranks2):
    full = (torch.float32,) * 3
    for found in ranks2.run(citizens.autocast_dtypes):
        assert found == [(torch.bfloat16, *full)] * 2


def test_shards_may_differ_in_size(ranks2):
    assert max(ranks2.run(citizens.uneven_shards_differ_by)) < 2e-6
