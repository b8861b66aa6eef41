"""Warp-specialised products against float64: their own kernels run on the CPU, in adversarial orders.

That no order of events at small sizes goes wrong is shown in tests/gate/test_machine_gluon.py.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from tests.kernels.checks import LAYOUTS, assert_accurate, normal
from tests.kernels.launchers import CHOICES, OF_ROWS, arguments, assert_results, computed
from tests.kernels.test_scaled_linear import assert_scaled_linear, operands
from tests.products import once
from tpkernels.gate.recording import HAS_GLUON
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.target import B200, H100
from tpkernels.kernels.tiles import KERNELS, MatmulTile, candidates
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

if not HAS_GLUON:
    pytest.skip("Gluon is of another form before Triton 3.7", allow_module_level=True)

from tpkernels.gate import machine

BF16, CPU = torch.bfloat16, torch.device("cpu")
T, N, K = 72, 104, 88
TILES = {
    "one consumer": MatmulTile(32, 32, 16, num_warps=8, num_stages=3, parts=2, group=2, consumers=1),
    "two consumers": MatmulTile(32, 32, 16, num_warps=4, num_stages=2, parts=2, group=2, consumers=2),
}
tiles = pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())


def matrix(rows, cols, scale=1.0):
    return normal(rows, cols, BF16, CPU) * scale


def assert_emulated(name, shape, tile, value=None, schedule=machine.EAGER, processors=2):
    call = arguments(name, shape, BF16, CPU, value)
    with machine.emulating(schedule, processors=processors) as launches:
        ours = computed(name, call, tile=tile)
    assert [one.grid <= (processors,) for one in launches] == [True]
    assert_results(name, ours, call)


CASES = {  # every product, activation and gate, each under a schedule
    name: (*case, schedule)
    for (name, case), schedule in zip(
        (CHOICES | {name: (name, None) for name in OF_ROWS}).items(), cycle(machine.SCHEDULES.values())
    )
}


@once(case=CASES, tile=TILES)
def test_every_product_activation_and_gate(case, tile):
    name, value, schedule = case
    assert_emulated(name, (T, K, N), tile, value, schedule)


@once(
    tile=[*TILES],
    schedule=[*machine.SCHEDULES],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    tokens=[1, 16, 72, 136],
)
def test_weight_gradients_are_written_or_added(tile, schedule, dtype, tokens):
    """In a dtype of their own."""
    dy, x, main_grad = matrix(tokens, 104), matrix(tokens, 88), matrix(104, 88).to(dtype)
    exact = dy.double().T @ x.double()
    total = main_grad.double() + exact
    with machine.emulating(machine.SCHEDULES[schedule], processors=2) as launches:
        dw = wgrad(dy, x, dtype=dtype, tile=TILES[tile])
        wgrad_accumulate_(main_grad, dy, x, tile=TILES[tile])
    assert len(launches) == 2
    assert_accurate(dw, exact)
    assert_accurate(main_grad, total)


@tiles
@pytest.mark.parametrize(("rows", "depth"), [(1, 136), (31, 24), (33, 8), (200, 136)])
def test_any_rows_and_depth(rows, depth, tile):
    assert_emulated("linear", (rows, depth, 40), tile, processors=3)
    assert_emulated("dglu", (rows, 40, depth), tile, processors=3)


@tiles
def test_operands_may_be_strided_and_results_rows_of_a_larger_matrix(tile):
    padded = LAYOUTS["padded_rows"]
    x, w, bias = padded(matrix(T, K)), padded(matrix(N, K, 0.1)), torch.tensor(0.5, dtype=BF16).expand(N)
    full = torch.full((T + 16, N), 7.0, dtype=BF16)
    with machine.emulating():
        y, z = linear_fwd(x, w, bias, keep_z=True, out=full[8 : T + 8], tile=tile)
    call = {"x": x, "weight": w, "bias": bias, "activation": "none", "keep_z": True}
    assert_results("linear", (y, z), call)
    assert y.data_ptr() == full[8].data_ptr()
    assert bool((full[:8] == 7.0).all() and (full[T + 8 :] == 7.0).all())


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


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def needs(target):
    capability = divmod(target.capability, 10)
    reason = "needs a GPU of compute capability {}.{}".format(*capability)
    return pytest.mark.skipif(capability != CAPABILITY, reason=reason)


SHIPPED = [
    pytest.param(kernel, tile, id=f"sm_{target.capability} {kernel} {tile.name}", marks=needs(target))
    for target in (H100, B200)
    for kernel in KERNELS
    for tile in candidates(kernel, "descriptor", BF16, target)
    if tile.consumers
]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("kernel", "tile"), SHIPPED)
def test_gpu_agrees_with_float64(kernel, tile, dtype, device):
    """Three tiles a program and more, edges inside of tiles, more steps than stages."""
    rows, cols, depth = 4200, 3976, 1000
    for name in (kernel, "dgrad_pairs", "dgrad_act") if kernel == "dgrad" else (kernel,):
        shape = (rows, depth, cols) if name in ("linear", "glu") else (rows, cols, depth)
        call = arguments(name, shape, dtype, device)
        assert_results(name, computed(name, call, tile=tile), call)
    if kernel == "wgrad":
        for into in (dtype, torch.float32):
            main_grad = normal(call["dy"].shape[1], call["x"].shape[1], into, device)
            total = main_grad.double() + call["dy"].double().T @ call["x"].double()
            wgrad_accumulate_(main_grad, call["dy"], call["x"], tile=tile)
            assert_accurate(main_grad, total)


SHIPPED_FP8 = [
    pytest.param(tile, id=tile.name)
    for tile in candidates("linear", "descriptor", torch.float8_e4m3fn, H100)
    if tile.consumers
]


@needs(H100)
@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("tile", SHIPPED_FP8)
def test_gpu_agrees_with_float64_in_fp8(tile, fast, device):
    x, w, bias = operands((4200, 1040, 3976), device)
    assert_scaled_linear(x, w, bias, "gelu_tanh", tile=tile, fast_accumulate=fast)
