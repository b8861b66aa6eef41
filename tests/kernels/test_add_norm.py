"""`add_norm`: slots, residual and norm in one pass, with the bits of three; backward, with those of two."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from bench.counts import Operators
from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, normal, raise_if_late
from tests.kernels.waiting import EPOCH, PATIENCE, arrivals, at_each_look, interpreted
from tests.products import pairwise
from tpkernels.dispatch.primitives import RECORDS
from tpkernels.kernels import launch
from tpkernels.kernels.interpret import accesses
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.reduce import AddNorm, add_norm, reduce_slots
from tpkernels.kernels.reference import (
    layer_norm_bwd_ref,
    layer_norm_ref,
    reduce_slots_ref,
    rms_norm_bwd_ref,
    rms_norm_ref,
)
from tpkernels.kernels.target import H100
from tpkernels.kernels.tiles import MAX_PLUS_FEATURES

SHAPES = {"one_block": (2, 16, 32), "ragged": (4, 45, 37), "one_row": (3, 1, 300), "one_slot": (1, 30, 20)}
KINDS = {"rms": False, "layer": True}


def operands(shape, dtype, device, centre=True):
    _, tokens, features = shape
    slots = torch.randn(shape, device=device).to(dtype)
    residual, dy, dh = (normal(tokens, features, dtype, device) for _ in range(3))
    bias, weight, norm_bias = normal(3, features, dtype, device).unbind()
    return slots, residual + 0.5, dy, dh, bias, 1 + weight / 8, norm_bias if centre else None


def in_three_passes(slots, residual, weight, norm_bias=None, *, bias=None, centre=False) -> AddNorm:
    h = reduce_slots(slots, bias) + residual
    normed = layer_norm_fwd(h, weight, norm_bias) if centre else rms_norm_fwd(h, weight)
    return AddNorm(h, *normed)


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


@pairwise(shape=SHAPES, dtype=DTYPES, centre=KINDS, with_bias=[False, True])
def test_add_norm_matches_float64_and_the_bits_of_three_passes(shape, dtype, centre, with_bias, device):
    slots, residual, _, _, bias, weight, norm_bias = operands(shape, dtype, device, centre)
    bias = bias if with_bias else None
    ours = add_norm(slots, residual, weight, norm_bias, bias=bias, centre=centre)
    assert_same(ours, in_three_passes(slots, residual, weight, norm_bias, bias=bias, centre=centre))
    h = reduce_slots_ref(slots.double(), None if bias is None else bias.double()) + residual.double()
    # of an h that is rounded twice: the bound is that of one rounding
    assert (ours.h.double() - h).norm() <= 2 * torch.finfo(dtype).eps * h.norm()
    if centre:
        exact = layer_norm_ref(ours.h.double(), weight.double(), norm_bias.double())
        assert_accurate(ours.mean, exact[1])
    else:
        exact = rms_norm_ref(ours.h.double(), weight.double())
    assert_accurate(ours.y, exact[0])
    assert_accurate(ours.rstd, exact[-1])


@pairwise(shape=SHAPES, dtype=DTYPES, centre=KINDS)
def test_a_gradient_is_added_in_the_backwards_pass(shape, dtype, centre, device):
    _, x, dy, dh, _, weight, _ = operands(shape, dtype, device)
    if centre:
        _, *statistics = layer_norm_fwd(x, weight)
        run, exactly = layer_norm_bwd, layer_norm_bwd_ref
    else:
        statistics = [rms_norm_fwd(x, weight).rstd]
        run, exactly = rms_norm_bwd, rms_norm_bwd_ref
    apart, ours = run(dy, x, weight, *statistics), run(dy, x, weight, *statistics, dh)
    assert_same(ours, (apart.dx + dh, *apart[1:]))
    exact = exactly(*(t.double() for t in (dy, x, weight, *statistics)))[0] + dh.double()
    assert (ours.dx.double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("wide", ["slots", "residual"])
def test_add_norm_takes_wider_slots_or_a_wider_residual(wide, device):
    slots, residual, _, _, bias, weight, _ = operands((4, 45, 37), torch.float32, device)
    if wide == "slots":
        residual, weight = residual.bfloat16(), weight.bfloat16()
    else:
        slots, bias = slots.bfloat16(), bias.bfloat16()
    ours = add_norm(slots, residual, weight, bias=bias)
    h = reduce_slots(slots, bias).bfloat16() + residual
    assert ours.y.dtype == residual.dtype
    assert_same(ours, AddNorm(h, rms_norm_fwd(h, weight).y, None, rms_norm_fwd(h, weight).rstd))


def test_a_sum_that_is_there_keeps_signs_of_zeros(device):
    zeros = torch.full((4, 8), -0.0, device=device)
    assert add_norm(zeros, zeros, torch.ones(8, device=device)).h.signbit().all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_add_norm_and_its_gradient_take_any_layout(layout, device):
    slots, residual, dy, dh, _, weight, _ = operands((1, 20, 48), torch.float16, device)
    laid = [layout(t) for t in (slots[0], residual, dy, dh)]
    expected = in_three_passes(slots, residual, weight)
    ours = add_norm(laid[0], laid[1], weight)
    if layout is not LAYOUTS["expanded"]:
        assert_same(ours, expected)
    apart = rms_norm_bwd(laid[2], ours.h, weight, ours.rstd)
    assert torch.equal(rms_norm_bwd(laid[2], ours.h, weight, ours.rstd, laid[3]).dx, apart.dx + laid[3])


def test_add_norm_takes_no_tokens(device):
    empty = torch.empty(2, 0, 8, device=device)
    assert add_norm(empty, empty[0], torch.ones(8, device=device)).y.shape == (0, 8)


@interpreted
def test_add_norm_waits_for_each_slot(device):
    slots, residual, _, _, bias, weight, _ = operands((4, 48, 40), torch.bfloat16, device)
    landing, here = torch.full_like(slots, float("nan")), arrivals(device, *[EPOCH - 1] * 4)
    steps = [
        step
        for slot in (2, 0, 3, 1)
        for step in (lambda s=slot: landing[s].copy_(slots[s]), lambda s=slot: here.flags[s].fill_(EPOCH))
    ]
    with at_each_look(iter(steps)) as left:
        ours = add_norm(landing, residual, weight, bias=bias, arrivals=here)
    raise_if_late(here, rank=0)
    assert not left
    assert_same(ours, in_three_passes(slots, residual, weight, bias=bias))


def test_add_norm_names_a_slot_that_never_comes(device):
    slots, residual, _, _, _, weight, _ = operands((3, 48, 8), torch.bfloat16, device)
    here = arrivals(device, EPOCH, EPOCH - 1, EPOCH, spin_limit=PATIENCE)
    add_norm(slots, residual, weight, arrivals=here)
    with pytest.raises(RuntimeError, match="chunk 1 had not arrived"):
        raise_if_late(here, rank=1)


@pytest.mark.parametrize(("margin", "programs"), [(0, 132), (17, 132 - 17)])
def test_programs_of_add_norm_leave_processors_free(margin, programs):
    slots = torch.empty(2, 8192, 4096, dtype=torch.bfloat16, device="meta")
    with launch.recording(H100) as (launches):
        add_norm(slots, slots[0], slots[0, 0], margin=margin)
    (launched,) = launches
    tile = launched.constants
    assert tile["BLOCK_COLS"] == 4096
    resident = 32 // launched.constants["num_warps"] if not margin else 1
    assert launched.grid == (programs * resident,)


class Passes:
    """How often all of some matrix (tokens, features) is read or written, by kernels and by torch."""

    def __init__(self, *matrices: torch.Tensor) -> None:
        self._matrices, self._kernels = [*matrices], list[np.ndarray]()

    def counted(self, run: Callable[[], Sequence[torch.Tensor]]) -> float:
        accesses.append(
            lambda _, addresses, inside: self._kernels.append(
                addresses[np.broadcast_to(inside, addresses.shape)]
            )
        )
        try:
            with Operators(lambda tensor: tensor.ndim == 2) as by_torch:
                self._matrices += run()
        finally:
            accesses.pop()
        one, reached = self._matrices[0], np.concatenate(self._kernels)
        bounds = {(matrix.data_ptr(), matrix.nbytes) for matrix in self._matrices if matrix.ndim > 1}
        touched = sum(((first <= reached) & (reached < first + size)).sum() for first, size in bounds)
        torchs = by_torch.moved["aten::add"] / one.element_size()
        return float(touched + torchs) / one.numel()


@interpreted
def test_six_passes_behind_the_slots_become_three(device):
    """Unfused sum, h and norm are written, sum, residual and h read; fused residual, h and norm are moved."""
    slots, residual, _, _, bias, weight, _ = operands((3, 48, 32), torch.float32, device)

    def in_turn():
        y = reduce_slots(slots, bias)
        h = y + residual
        return y, h, rms_norm_fwd(h, weight).y

    assert Passes(residual, slots).counted(in_turn) == 3 + 6
    assert Passes(residual, slots).counted(lambda: add_norm(slots, residual, weight, bias=bias)[:2]) == 3 + 3


@interpreted
def test_six_passes_of_backward_become_four(device):
    _, x, dy, dh, _, weight, _ = operands((1, 48, 32), torch.float32, device)
    rstd = rms_norm_fwd(x, weight).rstd

    def in_turn():
        dx = rms_norm_bwd(dy, x, weight, rstd).dx
        return dx, dx + dh

    assert Passes(x, dy, dh).counted(in_turn) == 6
    assert Passes(x, dy, dh).counted(lambda: [rms_norm_bwd(dy, x, weight, rstd, dh).dx]) == 4


def test_add_norm_refuses_what_cannot_work(device):
    slots, residual, weight = (torch.zeros(*shape, device=device) for shape in ((2, 6, 8), (6, 8), (8,)))

    def refused(match, error=ValueError, slots=slots, residual=residual, weight=weight, **options):
        with pytest.raises(error, match=match):
            add_norm(slots, residual, weight, **options)

    refused(r"slots of \(ranks, tokens, features\), got \(8,\)", slots=weight)
    refused(r"residual of shape \(6, 8\), that of a slot; got \(5, 8\)", residual=residual[:5])
    refused(r"expected weight of \(8,\)", weight=weight[:7])
    refused("expected norm_bias in bfloat16, float16 or float32", TypeError, norm_bias=weight.double())
    refused(r"bias of \(8,\) for 8 features, got \(7,\)", bias=weight[:7])
    refused("1 to 16384 features, got 16385", slots=torch.zeros(1, 1, 16385), residual=torch.zeros(1, 16385),
            weight=torch.zeros(16385))  # fmt: skip
    with pytest.raises(ValueError, match=r"expected plus of shape \(6, 8\), that of x; got \(5, 8\)"):
        rms_norm_bwd(residual, residual, weight, residual[:, 0].contiguous(), residual[:5])


@pytest.mark.parametrize("centre", KINDS.values(), ids=KINDS)
def test_gradients_of_wide_rows_are_added_in_a_pass_of_their_own(centre, device):
    x, dy, dh = (normal(2, MAX_PLUS_FEATURES + 1, torch.bfloat16, device) for _ in range(3))
    weight, statistics = torch.ones_like(x[0]), [torch.ones(2, device=device)] * (1 + centre)
    bwd, name = (layer_norm_bwd, "layer_norm_grad") if centre else (rms_norm_bwd, "rms_norm_grad")
    with pytest.raises(ValueError, match="expected at most 8192 features with plus, got 8193: add it to dx"):
        bwd(dy, x, weight, *statistics, dh)
    ours = RECORDS[name].by_kernel(dy, x, weight, *statistics, dh)
    assert torch.equal(ours[0], bwd(dy, x, weight, *statistics).dx + dh)
