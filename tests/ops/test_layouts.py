"""Every op takes operands and gradients as they lie in memory, and gives what contiguous ones give."""

from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.ops.cases import CASES, NORMS, RECIPES, SOME
from tests.ops.test_second_derivatives import OPS, W, X
from tests.products import pairwise
from tpkernels.dispatch import backends
from tpkernels.ops import (
    column_linear,
    layer_norm,
    linear_cross_entropy,
    linear_logprobs,
    rms_norm,
    row_linear,
    vocab_argmax,
    vocab_cross_entropy,
    vocab_gather,
)
from tpkernels.ops.matmul import PLAIN
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.parallel import ALONE
from tpkernels.ops.vocab.head_chunks import PartialGradients

VOCAB, K = 8, 4
IDS = torch.tensor([[3, 9, 0, 5], [1, 1, 4, 2]])


def _wide(t):
    """Room around a tensor, poisoned."""
    return t.new_full([size + 3 for size in t.shape], torch.nan)


def _sliced(t):
    inner = _wide(t)[tuple(slice(1, 1 + size) for size in t.shape)]
    return inner.copy_(t)


def _strided(t):
    every_second = t.new_full([2 * size for size in t.shape], torch.nan)[(slice(None, None, 2),) * t.ndim]
    return every_second.copy_(t)


LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else _strided(t),
    "sliced": _sliced,
    "strided": _strided,
    "expanded": lambda t: t[:1].expand_as(t),
    "offset": lambda t: t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t),
}
LOCAL = {name: CASES[name] for name in SOME} | NORMS
LOCAL |= {f"{name}, {recipe}": CASES[name].in_fp8(recipe) for name in ("linear_gelu",) for recipe in RECIPES}
H, HEAD, LOGITS = X, (VOCAB, K), (4, VOCAB)
OVER_GROUPS = OPS | {
    "column_fp8": (lambda g, x, w: column_linear(x, w, None, g, quantize=RECIPES[2]), (X, W)),
    "row_fp8": (lambda g, x, w: row_linear(x, w, None, g, quantize=RECIPES[0]), (X, W)),
    "row_without_bias": (lambda g, x, w: row_linear(x, w, None, g), (X, W)),
    "several_columns": (
        lambda g, x, a, b: torch.cat(column_linear(x, [a, b], None, g), 1), (X, W, W)
    ),
    "cross_entropy_smoothed": (
        lambda g, z: vocab_cross_entropy(z, IDS[1], g, label_smoothing=0.1), (LOGITS,)
    ),
    "head_sequence": (
        lambda g, h, w: linear_cross_entropy(h, w, IDS.view(-1), g, sequence_parallel=True), (H, HEAD)
    ),
    "head_by_chunks": (lambda g, h, w: linear_cross_entropy(h, w, IDS[1], g, chunk_tokens=3), (H, HEAD)),
    "head_fp8": (lambda g, h, w: linear_cross_entropy(h, w, IDS[1], g, quantize=RECIPES[0]), (H, HEAD)),
    "head_invariant": (lambda g, h, w: linear_cross_entropy(h, w, IDS[1], g, tp_invariant=2), (H, HEAD)),
    "head_with_all_terms": (
        lambda g, h, w, b: linear_cross_entropy(
            h, w, IDS[1], g, bias_shard=b, softcap=2.0, z_loss=0.1, label_smoothing=0.1
        ),
        (H, HEAD, (VOCAB,)),
    ),
    "logprobs_of_several": (lambda g, h, w: linear_logprobs(h, w, IDS.mT, g, top_k=3)[0], (H, HEAD)),
    "entropy": (
        lambda g, h, w: torch.stack(linear_logprobs(h, w, IDS[1], g, return_entropy=True)), (H, HEAD)
    ),
    "rms_norm_over_a_group": (lambda g, x, w: rms_norm(x, w, group=g), (X, (K,))),
    "layer_norm_over_a_group": (lambda g, x, w, b: layer_norm(x, w, b, group=g), (X, (K,), (K,))),
    "gathered_vocabulary": (lambda g, z: vocab_gather(z, g), (LOGITS,)),
    "argmax": (lambda g, z: vocab_argmax(z, g), (LOGITS,)),
    **{
        name: (lambda g, x, name=name: getattr(mappings, name)(x, g), (X,))
        for name in (
            "copy_to_region", "reduce_from_region", "scatter_to_region", "gather_from_region",
            "scatter_to_sequence_region", "gather_from_sequence_region", "reduce_scatter_to_sequence_region",
        )
    },
}  # fmt: skip


def computed(op, operands, layout):
    """What an op gives for operands, and a gradient, that lie in memory so; and their gradients."""
    leaves = [layout(t.clone()).detach().requires_grad_() for t in operands]
    y = op(*leaves)
    if not y.requires_grad:
        return [y]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    found = torch.autograd.grad(y, leaves, layout(dy) if dy.ndim else dy, allow_unused=True)
    return [y.detach(), *found]


def compare(op, operands, layout):
    if layout == "expanded":
        operands = [t[:1].expand_as(t).contiguous() for t in operands]
    contiguous = (lambda t: t[:1].expand_as(t).contiguous()) if layout == "expanded" else torch.Tensor.clone
    expected = computed(op, operands, contiguous)
    for got, right in zip(computed(op, operands, LAYOUTS[layout]), expected, strict=True):
        torch.testing.assert_close(got, right)


@pairwise(name=list(LOCAL), layout=list(LAYOUTS), by=["torch", "triton"])
def test_local_ops_take_every_layout(name, layout, backend):
    compare(LOCAL[name].op, LOCAL[name].operands((5,)), layout)


@pairwise(name=list(OVER_GROUPS), layout=list(LAYOUTS), by=["torch", "triton"])
@on_ranks(2)
def test_ops_over_a_group_take_every_layout(name, layout, by):
    op, shapes = OVER_GROUPS[name]
    generator = torch.Generator().manual_seed(dist.get_rank())
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    with patch.object(backends, "backend", by):
        compare(lambda *given: op(dist.group.WORLD, *given), operands, layout)


def test_gradients_of_hidden_are_contiguous_as_the_operator_says():
    """Kernels write rows of them, and compiled code believes the operator."""
    gradients = PartialGradients(torch.ones(3, 5).mT, torch.ones(4, 3), True, False, False, ALONE, PLAIN)
    assert gradients.dhidden.is_contiguous()
