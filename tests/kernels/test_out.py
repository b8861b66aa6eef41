"""Launchers write into given tensors: the same bits there as in new ones, and nothing beside them."""

import pytest
import torch

from tests.kernels.checks import TILE, normal
from tests.kernels.launchers import OF_ROWS
from tests.products import pairwise
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.tiles import MatmulTile

T, N, K = 40, 48, 64
ROWS = slice(24, 24 + T)  # of 80
CANARY = 7.0


def operands(device, dtype=torch.bfloat16):
    x, dy, w, w2, z, u = (
        normal(rows, cols, dtype, device) for rows, cols in ((T, K), (T, N), (N, K), (N, K), (T, K), (T, K))
    )
    return {"x": x, "dy": dy, "w": w, "w2": w2, "z": z, "u": u, "b": w[:, 0].contiguous()}


# "linear+keep_z": with all its results; "linear": with as few as may be
CALLS = {
    "+".join([name, *asked]): (name, dict.fromkeys(product.optional, bool(asked)))
    for name, product in OF_ROWS.items()
    for asked in ({()} | {tuple(product.optional)})
}


def larger(like):
    """A matrix with twice the rows, or a matrix around a vector."""
    return torch.full((2 * T, like.shape[-1]), CANARY, dtype=like.dtype, device=like.device)


def assert_written(results, call, around):
    """Into rows of larger matrices, the same bits, and no others."""
    out = [m[ROWS] if like.ndim == 2 else m[24] for m, like in zip(around, results, strict=True)]
    written = [one for one in call(out[0] if len(out) == 1 else tuple(out)) if one is not None]
    for target, given, matrix, like in zip(out, written, around, results, strict=True):
        assert given.data_ptr() == target.data_ptr()
        assert torch.equal(target, like)
        rows = ROWS if like.ndim == 2 else slice(24, 25)
        others = torch.cat([matrix[: rows.start], matrix[rows.stop :]])
        assert (others == CANARY).all()


@pairwise(call=CALLS, form=["descriptor", "pointer"])
def test_rows_of_larger_matrices_hold_the_same_bits_and_no_others_are_written(call, form, device):
    name, asked = call
    given = OF_ROWS[name].random((T, K, N), torch.bfloat16, device)

    def compute(out=None):
        return OF_ROWS[name].compute(given, tile=TILE, form=form, out=out, **asked)

    fresh = [one for one in compute() if one is not None]
    assert_written(fresh, compute, [larger(result) for result in fresh])


def test_a_result_that_is_its_own_pre_activation_is_written_once(device):
    x, w, b = OF_ROWS["linear"].random((T, K, N), torch.bfloat16, device)
    fresh = linear_fwd(x, w, b, keep_z=True, tile=TILE).y
    around = larger(fresh)
    assert_written([fresh], lambda out: linear_fwd(x, w, b, keep_z=True, tile=TILE, out=out)[:1], [around])


def test_a_row_that_descriptors_cannot_reach_is_written_by_pointer(device):
    of = operands(device)
    flat = torch.full((T * N + 1,), CANARY, dtype=torch.bfloat16, device=device)
    out = flat[1:].view(T, N)
    linear_fwd(of["x"], of["w"], out=out, tile=TILE)
    assert torch.equal(out, linear_fwd(of["x"], of["w"], tile=TILE).y)
    with pytest.raises(ValueError, match=r"form='descriptor' does not fit: y starts 2 bytes past"):
        linear_fwd(of["x"], of["w"], out=out, tile=TILE, form="descriptor")
    y, z = torch.empty(T, N, dtype=torch.bfloat16, device=device), out  # any of several decides
    with pytest.raises(ValueError, match=r"form='descriptor' does not fit: z starts 2 bytes past"):
        linear_fwd(of["x"], of["w"], activation="relu", keep_z=True, out=(y, z), form="descriptor")


@pytest.mark.parametrize("form", ["descriptor", "pointer"])
@pytest.mark.parametrize("name", ["linear", "dgrad", "dgrad_pairs"])
def test_a_product_may_be_written_in_fp32(name, form, device):
    """What is added to other products is rounded after that."""
    product, plain = OF_ROWS[name], {"linear": {"value": "none", "keep_z": False}}.get(name, {})
    given = product.random((T, K, N), torch.bfloat16, device)
    rounded = product.compute(given, tile=TILE, form=form, **plain)[0]
    out = torch.empty(rounded.shape, device=device)
    wide = product.compute(given, tile=TILE, form=form, out=out, **plain)[0]
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(rounded.dtype), rounded)
    assert not torch.equal(wide, rounded.float())
    with_roles = MatmulTile(128, 128, 64, num_warps=4, num_stages=4, parts=4, consumers=2)
    with pytest.raises(ValueError, match="expected a tile without consumers for a result in fp32"):
        product.compute(given, tile=with_roles, out=out, **plain)


def test_a_sum_over_rows_is_written_where_it_belongs(device):
    dy, around = normal(100, N, torch.bfloat16, device), torch.full((3, N), CANARY, device=device)
    bias_grad(dy, out=around[1])
    assert torch.equal(around[1], bias_grad(dy))
    assert (around[::2] == CANARY).all()


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


REFUSED = {
    "count": (
        lambda o: glu_fwd(o["x"], o["w"], o["w2"], out=(empty(T, N),) * 3),
        r"expected 1 tensors as out, h \(40, 48\); got 3",
    ),
    "too few": (
        lambda o: glu_fwd(o["x"], o["w"], o["w2"], keep_gu=True, out=empty(T, N)),
        r"expected 3 tensors as out, h \(40, 48\), g \(40, 48\), u \(40, 48\); got 1",
    ),
    "shape": (
        lambda o: dgrad(o["dy"], o["w"], out=empty(T + 1, K)),
        r"expected dx of out contiguous and of shape \(40, 64\), got \(41, 64\)",
    ),
    "columns of a wider matrix": (
        lambda o: dgrad(o["dy"], o["w"], out=empty(T, 2 * K)[:, :K]),
        r"contiguous .* got \(40, 64\) with strides \(128, 1\): give rows of a contiguous matrix",
    ),
    "an input": (
        lambda o: dgrad_act(o["dy"], o["w"], o["z"], "relu", out=o["z"]),
        "dz of out with memory of its own, got some of z",
    ),
    "part of an input": (
        lambda o: dgrad((both := empty(2 * T, N))[:T], o["w"][:, :N], out=both[T - 1 : 2 * T - 1]),
        "dx of out with memory of its own, got some of dy",
    ),
    "the bias": (
        lambda o: linear_fwd(o["x"][:1], o["w"], o["b"], out=o["b"][None]),
        "y of out with memory of its own, got some of bias",
    ),
    "twice": (
        lambda o: linear_fwd(o["x"], o["w"], activation="relu", keep_z=True, out=(e := empty(T, N), e)),
        "z of out with memory of its own, got some of y",
    ),
    "dtype": (
        lambda o: dglu(o["dy"], o["w"], o["z"], o["u"], out=(empty(T, K, dtype=torch.float32), empty(T, K))),
        "expected dg of out in torch.bfloat16 on .*, got torch.float32",
    ),
    "dtype of a sum": (
        lambda o: dgrad_act(o["dy"], o["w"], o["z"], "relu", bias_grad=True, out=(empty(T, K), empty(K))),
        "expected db of out in torch.float32 on .*, got torch.bfloat16",
    ),
    "device": (
        lambda o: dgrad(o["dy"], o["w"], out=torch.empty(T, K, dtype=torch.bfloat16, device="meta")),
        "got torch.bfloat16 on meta",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_results_that_do_not_fit_are_refused(call, message, device):
    with pytest.raises((ValueError, TypeError), match=message):
        call(operands(device))
