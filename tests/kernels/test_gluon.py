"""Warp-specialised products against float64: their own kernels run on the CPU, in adversarial orders.

That no order of events at small sizes goes wrong is shown in tests/gate/test_machine_gluon.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.checks import LAYOUTS, assert_accurate, dense, normal
from tpkernels.gate.recording import HAS_GLUON
from tpkernels.kernels.activations import ACTIVATIONS, GATE_OF
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.dgrad_pairs import dgrad_pairs
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.reference import (
    dglu_ref,
    dgrad_act_ref,
    dgrad_pairs_ref,
    dgrad_ref,
    glu_ref,
    linear_ref,
)
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import KERNELS, MatmulTile, candidates

if not HAS_GLUON:
    pytest.skip("Gluon is of another form before Triton 3.7", allow_module_level=True)

from tpkernels.gate import machine

BF16 = torch.bfloat16
T, N, K = 72, 104, 88
TILES = {
    "one consumer": MatmulTile(32, 32, 16, num_warps=8, num_stages=3, parts=2, group=2, consumers=1),
    "two consumers": MatmulTile(32, 32, 16, num_warps=4, num_stages=2, parts=2, group=2, consumers=2),
}
tiles = pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
schedules = pytest.mark.parametrize("schedule", machine.SCHEDULES.values(), ids=machine.SCHEDULES.keys())


def matrix(rows, cols, scale=1.0):
    return normal(rows, cols, BF16, torch.device("cpu")) * scale


def assert_all(computed, reference, *operands):
    exact, torchs = reference(*(t.double() for t in operands)), reference(*map(dense, operands))
    for number, triple in enumerate(zip(computed, exact, torchs, strict=True)):
        assert_accurate(*triple, f"result {number}")


@tiles
@schedules
def test_every_schedule_computes_every_epilogue(schedule, tile):
    x, w, w2, bias = matrix(T, K), matrix(N, K, 0.1), matrix(N, K, 0.1), matrix(1, N)[0]
    dy, z, u = matrix(T, N), matrix(T, K), matrix(T, K)
    with machine.emulating(schedule):
        y, kept = linear_fwd(x, w, bias, activation="silu", keep_z=True, tile=tile)
        h, g, up = glu_fwd(x, w, w2, keep_gu=True, tile=tile)
        dx = dgrad(dy, w, tile=tile)
        both = dgrad_pairs(dy, w, dy, w2, tile=tile)
        dz, db = dgrad_act(dy, w, z, "gelu_tanh", bias_grad=True, tile=tile)
        dg, du, again = dglu(dy, w, z, u, emit_h=True, tile=tile)
    assert_all((y, kept), lambda *of: linear_ref(*of, activation="silu"), x, w, bias)
    assert_all((h, g, up), glu_ref, x, w, w2)
    assert_all((dx,), lambda *of: (dgrad_ref(*of),), dy, w)
    assert_all((both,), lambda *of: (dgrad_pairs_ref(*of),), dy, w, dy, w2)
    assert_all((dz, db), lambda *of: dgrad_act_ref(*of, "gelu_tanh"), dy, w, z)
    assert_all((dg, du, again), dglu_ref, dy, w, z, u)


@tiles
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, tile):
    x, w, dy, z = matrix(T, K), matrix(N, K, 0.1), matrix(T, N), matrix(T, K)
    with machine.emulating():
        y = linear_fwd(x, w, activation=activation, tile=tile).y
        dz = dgrad_act(dy, w, z, activation, tile=tile).dz
    assert_all((y,), lambda *of: linear_ref(*of, activation=activation)[:1], x, w)
    assert_all((dz,), lambda *of: dgrad_act_ref(*of, activation)[:1], dy, w, z)


@tiles
@pytest.mark.parametrize("kind", GATE_OF)
def test_every_gate(kind, tile):
    x, w, w2, dy, g, u = (
        matrix(T, K),
        matrix(N, K, 0.1),
        matrix(N, K, 0.1),
        matrix(T, N),
        matrix(T, K),
        matrix(T, K),
    )
    with machine.emulating():
        h = glu_fwd(x, w, w2, kind=kind, tile=tile).h
        dg, du, _ = dglu(dy, w, g, u, kind=kind, tile=tile)
    assert_all((h,), lambda *of: glu_ref(*of, kind)[:1], x, w, w2)
    assert_all((dg, du), lambda *of: dglu_ref(*of, kind)[:2], dy, w, g, u)


@tiles
@pytest.mark.parametrize("rows", [1, 31, 33, 200])
@pytest.mark.parametrize("depth", [8, 24, 136])
def test_any_rows_and_depth(rows, depth, tile):
    x, w = matrix(rows, depth), matrix(40, depth, 0.1)
    dy, w2, g, u = matrix(rows, depth), matrix(depth, 40, 0.1), matrix(rows, 40), matrix(rows, 40)
    with machine.emulating(processors=3):
        y = linear_fwd(x, w, tile=tile).y
        grads = dglu(dy, w2, g, u, emit_h=True, tile=tile)
    assert_all((y,), lambda *of: linear_ref(*of)[:1], x, w)
    assert_all(grads, dglu_ref, dy, w2, g, u)


@tiles
def test_operands_may_be_strided_and_results_rows_of_a_larger_matrix(tile):
    padded = LAYOUTS["padded_rows"]
    x, w, bias = padded(matrix(T, K)), padded(matrix(N, K, 0.1)), torch.tensor(0.5, dtype=BF16).expand(N)
    whole = torch.full((T + 16, N), 7.0, dtype=BF16)
    with machine.emulating():
        linear_fwd(x, w, bias, out=whole[8 : T + 8], tile=tile)
    assert_all((whole[8 : T + 8],), lambda *of: linear_ref(*of)[:1], x, w, bias)
    assert bool((whole[:8] == 7.0).all() and (whole[T + 8 :] == 7.0).all())


@tiles
def test_what_is_not_finite_stays(tile):
    x, w = matrix(T, K), matrix(N, K, 0.1)
    x[3, 5], x[40, 0] = float("nan"), float("inf")
    with machine.emulating():
        y = linear_fwd(x, w, tile=tile).y
    assert y[3].isnan().all()
    assert not y[40].isfinite().any()
    assert y.isfinite().all(1).sum() == T - 2


@tiles
def test_launch_says_what_it_cannot_serve(tile):
    x, w = matrix(T, K), matrix(N, K)
    with pytest.raises(
        ValueError, match=f"linear: tile {tile.name} expected a GPU of compute capability 9.0"
    ):
        linear_fwd(x, w, tile=tile)
    with machine.emulating():
        with pytest.raises(ValueError, match="expected matrices that the copy engine can move"):
            linear_fwd(x.float(), w.float(), tile=tile)
        one_stage = MatmulTile(32, 32, 16, num_warps=8, num_stages=1, consumers=1)
        with pytest.raises(ValueError, match="linear: expected at least 2 stages"):
            linear_fwd(x, w, tile=one_stage)
        huge = MatmulTile(256, 256, 128, num_warps=8, num_stages=3, consumers=1)
        with pytest.raises(
            ValueError, match="linear: expected a tile of at most 232,448 bytes, got 256x256x128"
        ):
            linear_fwd(x, w, tile=huge)


ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SHIPPED = [
    pytest.param(kernel, tile, id=f"{kernel} {tile.name}")
    for kernel in KERNELS
    for tile in candidates(kernel, "descriptor", BF16, H100)
    if tile.consumers
]


@pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("kernel", "tile"), SHIPPED)
def test_gpu_agrees_with_float64(kernel, tile, dtype, device):
    """Three tiles a program and more, edges inside of tiles, more steps than stages."""
    rows, cols, depth = 4200, 3976, 1000
    x, w, w2 = (
        normal(rows, depth, dtype, device),
        normal(cols, depth, dtype, device),
        normal(cols, depth, dtype, device),
    )
    z, u = normal(rows, cols, dtype, device), normal(rows, cols, dtype, device)
    for weight in (w, w2):
        weight *= depth**-0.5
    down = w.T.contiguous()
    if kernel == "linear":
        bias = normal(1, cols, dtype, device)[0]
        computed = linear_fwd(x, w, bias, activation="gelu_tanh", keep_z=True, tile=tile)
        assert_all(computed, lambda *of: linear_ref(*of, activation="gelu_tanh"), x, w, bias)
    elif kernel == "glu":
        assert_all(glu_fwd(x, w, w2, keep_gu=True, tile=tile), glu_ref, x, w, w2)
    elif kernel == "dgrad":
        assert_all((dgrad(x, down, tile=tile),), lambda *of: (dgrad_ref(*of),), x, down)
        both = dgrad_pairs(x, down, x, down, tile=tile)
        assert_all((both,), lambda *of: (dgrad_pairs_ref(*of),), x, down, x, down)
        computed = dgrad_act(x, down, z, "gelu_tanh", bias_grad=True, tile=tile)
        assert_all(computed, lambda *of: dgrad_act_ref(*of, "gelu_tanh"), x, down, z)
    else:
        assert_all(dglu(x, down, z, u, emit_h=True, tile=tile), dglu_ref, x, down, z, u)
