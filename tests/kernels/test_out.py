"""Launchers write into given tensors: the same bits there as in new ones, and nothing beside them."""

import pytest
import torch

from tests.kernels.checks import TILE, assert_written, normal, rows_for
from tests.kernels.launchers import arguments, computed
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd

T, N, K = 40, 48, 64


def operands(device):
    sizes = {"x": (T, K), "dy": (T, N), "w": (N, K), "w2": (N, K), "z": (T, K), "u": (T, K)}
    made = {name: normal(*size, torch.bfloat16, device) for name, size in sizes.items()}
    return made | {"b": made["w"][:, 0].contiguous()}


@pytest.mark.needs("descriptors")
def test_a_row_that_descriptors_cannot_reach_is_written_by_pointer(device):
    of = operands(device)
    flat = torch.full((T * N + 1,), 7.0, dtype=torch.bfloat16, device=device)
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
    call = arguments(name, (T, K, N), torch.bfloat16, device, "none")
    rounded = computed(name, call, form=form)[0]
    out = torch.empty(rounded.shape, device=device)
    wide = computed(name, call, form=form, out=out)[0]
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(rounded.dtype), rounded)
    assert not torch.equal(wide, rounded.float())


def test_a_sum_over_rows_is_written_where_it_belongs(device):
    dy = normal(100, N, torch.bfloat16, device)
    fresh = [bias_grad(dy)]
    out, around = rows_for(fresh)
    bias_grad(dy, out=out[0])
    assert_written(out, around, fresh)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


def glu(o, **options):
    return glu_fwd(o["x"], o["w"], o["w2"], **options)


def relu_grad(o, **options):
    return dgrad_act(o["dy"], o["w"], o["z"], "relu", **options)


REFUSED = {
    "count": (lambda o: glu(o, out=(empty(T, N),) * 3), r"expected 1 tensors as out, h \(40, 48\); got 3"),
    "too few": (
        lambda o: glu(o, keep_gu=True, out=empty(T, N)),
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
    "an input": (lambda o: relu_grad(o, out=o["z"]), "dz of out with memory of its own, got some of z"),
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
        lambda o: relu_grad(o, bias_grad=True, out=(empty(T, K), empty(K))),
        "expected db of out in torch.float32 on .*, got torch.bfloat16",
    ),
    "device": (lambda o: dgrad(o["dy"], o["w"], out=empty(T, K).to("meta")), "got torch.bfloat16 on meta"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_results_that_do_not_fit_are_refused(call, message, device):
    with pytest.raises((ValueError, TypeError), match=message):
        call(operands(device))
