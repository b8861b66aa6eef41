"""Launchers refuse what they cannot compute, before launching, and say expected, got, and what to do."""

from contextlib import contextmanager

import pytest
import torch

from tests.kernels.checks import TILE
from tpkernels.kernels import launch
from tpkernels.kernels.bias_grad import bias_grad
from tpkernels.kernels.cross_entropy import cross_entropy_grad, softmax_statistics
from tpkernels.kernels.dglu import dglu
from tpkernels.kernels.dgrad import dgrad, dgrad_act
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.glu import glu_fwd
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.norm import layer_norm_bwd, layer_norm_fwd, rms_norm_bwd, rms_norm_fwd
from tpkernels.kernels.tiles import MAX_FEATURES, BlockTile, MatmulTile
from tpkernels.kernels.triton_versions import LAUNCH_OPTIONS
from tpkernels.kernels.wgrad import wgrad, wgrad_accumulate_

T, K, N = 6, 8, 16
WIDE = MAX_FEATURES + 1
LONG, WIDER = torch.int64, torch.float64


class Ones:
    """Operands that fit each other, and others of any shape."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.x, self.w, self.dy, self.t = self(T, K), self(N, K), self(T, N), self(T)
        self.ids = self(T, dtype=LONG)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)

    def entropy_over(self, logits: torch.Tensor) -> torch.Tensor:
        return cross_entropy_grad(logits, self.ids, self.t, self.t, self.t, in_place=True)


BAD_SHAPES = {
    "linear weight": (lambda o: linear_fwd(o.x, o(N, K + 1)), r"weight of shape \(16, 8\).*got \(16, 9\)"),
    "linear bias": (lambda o: linear_fwd(o.x, o.w, o(N + 1)), r"bias of shape \(16,\).*got \(17,\)"),
    "linear 3-D": (lambda o: linear_fwd(o.x[None], o.w), r"x of 2 dim.*, got shape \(1, 6, 8\).*flatten"),
    "linear 1-D": (lambda o: linear_fwd(o(K), o.w), r"x of 2 dimensions, got shape \(8,\)"),
    "glu w_up": (lambda o: glu_fwd(o.x, o.w, o(N + 1, K)), r"w_up of shape \(16, 8\).*got \(17, 8\)"),
    "dgrad weight": (lambda o: dgrad(o.dy, o(N + 1, K)), r"weight of shape \(16, 8\).*got \(17, 8\)"),
    "dgrad z": (lambda o: dgrad_act(o.dy, o.w, o.dy, "gelu"), r"z of shape \(6, 8\).*got \(6, 16\)"),
    "dglu u": (lambda o: dglu(o.dy, o.w, o.x, o.dy), r"u of shape \(6, 8\).*got \(6, 16\)"),
    "wgrad tokens": (lambda o: wgrad(o.dy, o(T + 1, K)), r"equal tokens, got \(6, 16\) and \(7, 8\)"),
    "main_grad": (lambda o: wgrad_accumulate_(o(K, N), o.dy, o.x), r"main_grad of shape \(16, 8\)"),
    "bias_grad 1-D": (lambda o: bias_grad(o(N)), r"dy of 2 dimensions"),
    "rms_norm weight": (lambda o: rms_norm_fwd(o.x, o(N)), r"weight of \(8,\).*got \(16,\)"),
    "norm rstd": (lambda o: rms_norm_bwd(o.x, o.x, o(K), o(K)), r"rstd of \(6,\).*got \(8,\)"),
    "norm mean": (lambda o: layer_norm_bwd(o.x, o.x, o(K), o(1), o.t), r"mean of \(6,\).*got \(1,\)"),
    "norm no features": (lambda o: layer_norm_fwd(o(T, 0), o(0)), r"expected 1 to \d+ features, got 0"),
    "norm too wide": (lambda o: rms_norm_fwd(o(1, WIDE), o(WIDE)), "features, got 16385: use torch's own"),
    "ids 2-D": (lambda o: embedding_fwd(o.ids[None], o.w), r"ids \(tokens,\) of int64 or int32.*\(1, 6\)"),
    "ids of others": (lambda o: embedding_bwd(o.x, o.ids[1:], rows=N), r"ids \(6,\).*got \(5,\)"),
    "strided ids": (lambda o: embedding_fwd(o.ids[::2], o.w), r"contiguous; got strides \(2,\)"),
    "logits 3-D": (lambda o: softmax_statistics(o.dy[None], o.ids), r"logits of 2 dimensions"),
    "targets": (lambda o: softmax_statistics(o.dy, o(N, dtype=LONG)), r"target \(6,\).*got \(16,\)"),
    "columns": (
        lambda o: softmax_statistics(o.dy, o.ids, columns=N + 1),
        r"expected 0 to 16 columns of logits \(6, 16\), got 17",
    ),
    "dloss": (lambda o: cross_entropy_grad(o.dy, o.ids, o.t, o.t, o(N)), r"dloss of \(6,\).*got \(16,\)"),
    "in place, shared": (
        lambda o: o.entropy_over(o(1, N).expand(T, N)),
        "memory of its own for each element",
    ),
}
BAD_TYPES = {
    "linear mixed": (lambda o: linear_fwd(o.x, o.w.bfloat16()), r"x in torch.float32 and weight in .*cast"),
    "linear bias mixed": (lambda o: linear_fwd(o.x, o.w, o(N).bfloat16()), "bias in torch.bfloat16"),
    "glu mixed": (lambda o: glu_fwd(o.x, o.w, o.w.bfloat16()), "w_up in torch.bfloat16"),
    "dgrad mixed": (lambda o: dgrad(o.dy.bfloat16(), o.w), "weight in torch.float32"),
    "wgrad mixed": (lambda o: wgrad(o.dy.bfloat16(), o.x), "x in torch.float32"),
    "float64": (lambda o: linear_fwd(o.x.double(), o.w), "bfloat16, float16 or float32"),
    "integers": (lambda o: bias_grad(o.dy.int()), "got torch.int32"),
    "wgrad dtype": (lambda o: wgrad(o.dy, o.x, dtype=WIDER), "got torch.float64"),
    "norm parameter": (lambda o: rms_norm_fwd(o.x, o(K).bfloat16()), "weight of .*got torch.bfloat16"),
    "ids": (lambda o: embedding_fwd(o.t, o.w), "ids .*int64 or int32.*got torch.float32"),
    "no ids": (lambda o: embedding_fwd([1], o.w), "got list"),
    "table": (lambda o: embedding_bwd(o.x, o.ids, rows=N, dtype=WIDER), "got torch.float64"),
    "statistic": (
        lambda o: cross_entropy_grad(o.dy, o.ids, o.t.bfloat16(), o.t, o.t),
        "maximum of .*got torch.bfloat16",
    ),
    "sparse": (lambda o: linear_fwd(o.x.to_sparse(), o.w), "call .to_dense"),
    "not a tensor": (lambda o: linear_fwd([[1.0]], o.w), "expected a Tensor as x, got list"),
}
NEGATED = "whose memory holds its numbers, got one with torch's lazy negation"
BAD_PLACES = {
    "weight": (lambda o: linear_fwd(o.x, o.w.to("meta")), "one device, got x on .* and weight on meta"),
    "main_grad": (lambda o: wgrad_accumulate_(o.w.to("meta"), o.dy, o.x), r"main_grad on .* got meta"),
    "all": (
        lambda o: linear_fwd(o.x.to("meta"), o.w.to("meta")),
        r"expected tensors on .*, got meta.*TRITON_INTERPRET",
    ),
    "elements of main_grad": (
        lambda o: wgrad_accumulate_(o(1, K).expand(N, K), o.dy, o.x),
        "memory of its own for each element, got strides",
    ),
    "negated main_grad": (
        lambda o: wgrad_accumulate_(torch._neg_view(o.w), o.dy, o.x),
        f"main_grad {NEGATED}",
    ),
    "negated out": (lambda o: bias_grad(o.dy, out=torch._neg_view(o(N))), f"out {NEGATED}"),
    "negated logits": (lambda o: o.entropy_over(torch._neg_view(o.dy)), f"logits {NEGATED}"),
    "descriptor of misaligned rows": (
        lambda o: linear_fwd(o(T, K + 1).bfloat16()[:, 1:], o.w.bfloat16(), form="descriptor", tile=TILE),
        "does not fit: x starts 2 bytes past a 16-byte boundary; use form='pointer'",
    ),
    "descriptor of fp32": (
        lambda o: linear_fwd(o.x, o.w, form="descriptor", tile=TILE),
        r"multiply bfloat16, float16 and fp8, not torch.float32",
    ),
}
BAD_NAMES = {
    "activation": (lambda o: linear_fwd(o.x, o.w, activation="tanh"), "activation of none, gelu.*got 'tanh'"),
    "kind": (lambda o: glu_fwd(o.x, o.w, o.w, kind="silu"), "gated unit of swiglu.*got 'silu'"),
    "form": (lambda o: linear_fwd(o.x, o.w, form="tma"), "form 'descriptor' or 'pointer', got 'tma'"),
    "48 rows": (lambda o: MatmulTile(48, 64, 32, 4, 1), "block_rows to be a power of two, got 48"),
    "8 columns a part": (lambda o: MatmulTile(64, 32, 32, 4, 1, parts=4), "at least 16"),
    "chunk": (lambda o: BlockTile(64, 64, num_warps=4, chunk=32), "block_rows to divide chunk"),
}
OF_DESCRIPTORS = pytest.mark.needs("descriptors")  # else they are refused as such
REFUSED = [
    pytest.param(
        *(TypeError if kind is BAD_TYPES else ValueError, call, message),
        id=name,
        marks=[OF_DESCRIPTORS] * name.startswith("descriptor"),
    )
    for kind in (BAD_SHAPES, BAD_TYPES, BAD_PLACES, BAD_NAMES)
    for name, (call, message) in kind.items()
]


@pytest.mark.parametrize(("error", "call", "message"), REFUSED)
def test_launchers_refuse_what_they_cannot_compute(error, call, message, device):
    with pytest.raises(error, match=message):
        call(Ones(device))


def test_launches_are_on_the_device_of_the_tensors(monkeypatch):
    """Triton takes the current device, which is left as it was."""
    seen, current = [], [0]

    @contextmanager
    def device(index):
        before, current[0] = current[0], index.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = {(4,): lambda *arguments, **constants: seen.append((current[0], arguments, constants))}
    for index in (0, 1):
        launch.on(torch.device("cuda", index), kernel, (4,))(1, 2, BLOCK=3)
    constants = {"BLOCK": 3, **LAUNCH_OPTIONS}
    assert seen == [(0, (1, 2), constants), (1, (1, 2), constants)]
    assert current == [0]
