"""What ranks run in tests of TP-invariance: ops on shards of one problem, and hashes of the whole results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels.tp_invariance
from tests.ops.transport_cases import using
from tests.segments import tp_invariance
from tpkernels import ops
from tpkernels.ops.tensor_parallel.segment_heads import segment_heads

Whole = tuple[
    Tensor | None, int | None
]  # this rank's result, and the dimension along which ranks have others
BATCH, VOCABULARY = 3, 72


@dataclass(frozen=True)
class Setting:
    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    overlap: bool = True
    tokens: int = 16
    option: str = ""
    k: int = 48  # features in
    n: int = 80  # features out, or between
    bias: bool = True
    autocast: bool = False  # to bf16, forward and backward

    @property
    def options(self) -> dict[str, Any]:
        return {"sequence_parallel": self.sequence_parallel, "overlap": self.overlap}


def drawn(seed: int, *shape: int) -> Tensor:
    """Numbers of many magnitudes: another order of adding shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(shape, generator=generator).mul(2).exp()
    return torch.randn(shape, generator=generator) * spread


def leaf(whole: Tensor, dim: int | None, dtype: torch.dtype) -> Tensor:
    """This rank's shard."""
    if dim is not None:
        whole = whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole.to(dtype).clone().requires_grad_()


def bias_of(s: Setting, seed: int, size: int, dim: int | None = None) -> Tensor | None:
    return leaf(drawn(seed, size), dim, s.dtype) if s.bias else None


def grad_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.grad


def whole_of(result: Whole) -> Tensor | None:
    tensor, dim = result
    if tensor is None or dim is None:
        return tensor
    parts = [torch.empty_like(tensor.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def _column(s: Setting) -> dict[str, Whole]:
    group, activation = dist.group.WORLD, "gelu" if s.option == "gelu" else None
    tokens = 0 if s.sequence_parallel else None
    x = leaf(drawn(1, s.tokens, BATCH, s.k), tokens, s.dtype)
    wholes = [drawn(2 + i, width, s.k) for i, width in enumerate((s.n, 16, 32))]
    weights = [leaf(whole, 0, s.dtype) for whole in wholes]
    biases = [bias_of(s, 5, s.n, 0), None, bias_of(s, 6, 32, 0)]
    fused = s.option == "main_grad"
    main_grads = [leaf(whole, 0, torch.float32).detach() if fused else None for whole in wholes]
    options = s.options | {"main_grad": main_grads, "save_gathered": s.option == "save_gathered"}
    ys = ops.column_linear(x, weights, biases, group, activation=activation, **options)
    dys = [drawn(9 + i, s.tokens, BATCH, w) for i, w in enumerate((s.n, 16, 32))]
    torch.autograd.backward(ys, [leaf(dy, 2, s.dtype).detach() for dy in dys])
    found: dict[str, Whole] = {"dx": (x.grad, tokens)}
    for i, y in enumerate(ys):
        found[f"y{i}"] = y.detach(), 2
        found[f"dw{i}"] = (main_grads[i] if fused else weights[i].grad), 0
        found[f"db{i}"] = grad_of(biases[i]), 0
    return found


def _row(s: Setting) -> dict[str, Whole]:
    tokens = 0 if s.sequence_parallel else None
    x = leaf(drawn(1, s.tokens, BATCH, s.k), 2, s.dtype)
    weight, bias = leaf(drawn(2, s.n, s.k), 1, s.dtype), bias_of(s, 3, s.n)
    main_grad = leaf(drawn(4, s.n, s.k), 1, torch.float32).detach() if s.option == "main_grad" else None
    y = ops.row_linear(x, weight, bias, dist.group.WORLD, main_grad=main_grad, **s.options)
    y.backward(leaf(drawn(5, s.tokens, BATCH, s.n), tokens, s.dtype).detach())
    dw = weight.grad if main_grad is None else main_grad
    return {"y": (y.detach(), tokens), "dx": (x.grad, 2), "dw": (dw, 1), "db": (grad_of(bias), None)}


def _mlp(s: Setting) -> dict[str, Whole]:
    tokens, gated = 0 if s.sequence_parallel else None, s.option == "swiglu"
    x = leaf(drawn(1, s.tokens, BATCH, s.k), tokens, s.dtype)
    up, down = leaf(drawn(2, s.n, s.k) / 9, 0, s.dtype), leaf(drawn(3, s.k, s.n), 1, s.dtype)
    gate = leaf(drawn(4, s.n, s.k) / 9, 0, s.dtype) if gated else None
    b_up, b_down = None if gated else bias_of(s, 5, s.n, 0), bias_of(s, 6, s.k)
    options = s.options | {"activation": s.option or None, "w_gate_shard": gate}
    y = ops.parallel_mlp(x, up, b_up, down, b_down, dist.group.WORLD, **options)
    y.backward(leaf(drawn(7, s.tokens, BATCH, s.k), tokens, s.dtype).detach())
    return {
        "y": (y.detach(), tokens),
        "dx": (x.grad, tokens),
        "dup": (up.grad, 0),
        "dgate": (grad_of(gate), 0),
        "ddown": (down.grad, 1),
        "db_up": (grad_of(b_up), 0),
        "db_down": (grad_of(b_down), None),
    }


def _ids(s: Setting) -> Tensor:
    return torch.randint(0, 67, (s.tokens, BATCH), generator=torch.Generator().manual_seed(8))


def _embedding(s: Setting) -> dict[str, Whole]:
    tokens, whole = 0 if s.sequence_parallel else None, drawn(1, VOCABULARY, s.k)
    whole[:9] = -0.0  # which zeros of other ranks make +0
    table = leaf(whole, 0, s.dtype)
    y = ops.vocab_embedding(
        _ids(s), table, dist.group.WORLD, sequence_parallel=s.sequence_parallel, vocab_size=67, padding_idx=5
    )
    y.backward(leaf(drawn(2, s.tokens, BATCH, s.k), tokens, s.dtype).detach())
    return {"y": (y.detach(), tokens), "dtable": (table.grad, 0)}


def _cross_entropy(s: Setting) -> dict[str, Whole]:
    logits = leaf(drawn(1, s.tokens, BATCH, VOCABULARY), 2, s.dtype)
    target = _ids(s)
    target[1:2] = -100
    loss = ops.vocab_cross_entropy(
        logits * 1,
        target,
        dist.group.WORLD,
        label_smoothing=0.1 if s.option in ("smoothed", "weighted") else 0.0,
        class_weight=drawn(3, 67).abs() if s.option == "weighted" else None,
        z_loss=0.1 if s.option == "weighted" else 0.0,
        vocab_size=67,
        overwrite_logits=s.option == "overwritten",
    )
    loss.backward(drawn(2, s.tokens, BATCH))
    return {"loss": (loss.detach(), None), "dlogits": (logits.grad, 2)}


def _head(s: Setting) -> dict[str, Whole]:
    tokens = 0 if s.sequence_parallel else None
    hidden = leaf(drawn(1, s.tokens, BATCH, s.k), tokens, s.dtype)
    weight = leaf(drawn(2, VOCABULARY, s.k) / 9, 0, s.dtype)
    main_grad = (
        leaf(drawn(4, VOCABULARY, s.k), 0, torch.float32).detach() if s.option == "main_grad" else None
    )
    bias, more, metrics = None, {}, ops.LossMetrics()
    if s.option == "all_terms":
        bias = leaf(drawn(5, VOCABULARY), 0, s.dtype)
        more = {"softcap": 2.0, "class_weight": drawn(6, 67).abs(), "z_loss": 0.1, "label_smoothing": 0.1}
    loss = ops.linear_cross_entropy(
        hidden,
        weight,
        _ids(s),
        dist.group.WORLD,
        bias_shard=bias,
        metrics=metrics if more else None,
        **more,
        sequence_parallel=s.sequence_parallel,
        reduction="none" if s.option == "none" else "mean",
        vocab_size=67,
        chunk_tokens=None if s.option == "whole" else 20,
        main_grad=main_grad,
    )
    loss.backward(drawn(3, *loss.shape).float())
    dweight = weight.grad if main_grad is None else main_grad
    found: dict[str, Whole] = {
        "loss": (loss.detach(), None),
        "dhidden": (hidden.grad, tokens),
        "dweight": (dweight, 0),
    }
    if bias is not None:
        found |= {"dbias": (bias.grad, 0), "z": (metrics.z_loss, None), "accuracy": (metrics.accuracy, None)}
    return found


def _logprobs(s: Setting) -> dict[str, Whole]:
    tokens = 0 if s.sequence_parallel else None
    hidden = leaf(drawn(1, s.tokens, BATCH, s.k), tokens, s.dtype)
    weight = leaf(drawn(2, VOCABULARY, s.k) / 9, 0, s.dtype)
    target = torch.stack([_ids(s), _ids(s).flip(0)], -1) if s.option == "two" else _ids(s)
    target[1:2] = -100
    logprobs, entropy = ops.linear_logprobs(
        hidden,
        weight,
        target,
        dist.group.WORLD,
        temperature=3.0,
        top_k=30 if s.option == "top_k" else None,
        return_entropy=True,
        sequence_parallel=s.sequence_parallel,
        vocab_size=67,
        chunk_tokens=20,
    )
    assert entropy is not None
    logprobs = logprobs.masked_fill(logprobs == -torch.inf, 0)
    (logprobs * drawn(3, *logprobs.shape)).sum().add((entropy * drawn(4, *entropy.shape)).sum()).backward()
    return {
        "logprobs": (logprobs.detach(), None),
        "entropy": (entropy.detach(), None),
        "dhidden": (hidden.grad, tokens),
        "dweight": (weight.grad, 0),
    }


def norm(s: Setting) -> dict[str, Whole]:
    tokens = 0 if s.sequence_parallel else None
    group = dist.group.WORLD if s.sequence_parallel else None
    x = leaf(drawn(1, s.tokens, BATCH, s.k), tokens, s.dtype)
    weight, bias = leaf(drawn(2, s.k), None, s.dtype), bias_of(s, 3, s.k)
    if s.option == "rms_norm":
        y = ops.rms_norm(x, weight, group=group)
    else:
        y = ops.layer_norm(x, weight, bias, group=group)
    y.backward(leaf(drawn(4, s.tokens, BATCH, s.k), tokens, s.dtype).detach())
    return {
        "y": (y.detach(), tokens),
        "dx": (x.grad, tokens),
        "dweight": (weight.grad, None),
        "dbias": (grad_of(bias), None),
    }


def _heads(s: Setting) -> dict[str, Whole]:
    heads = int(s.option)
    x = leaf(drawn(1, s.tokens, BATCH, heads * 8), 2, s.dtype)
    y = segment_heads(x, dist.group.WORLD, heads)
    dy = drawn(2, s.tokens, BATCH, tpkernels.tp_invariance.default.segments, 8)
    dy[:1] = -0.0
    y.backward(leaf(dy, 2, s.dtype).detach())
    return {"y": (y.detach(), 2), "dx": (x.grad, 2)}


PROGRAMS: dict[str, Callable[[Setting], dict[str, Whole]]] = {
    "column": _column,
    "row": _row,
    "mlp": _mlp,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "head": _head,
    "logprobs": _logprobs,
    "norm": norm,
    "heads": _heads,
}


def hashes_by_kernels(count: int, asked: list[tuple[str, Setting]], transport: str) -> list[dict[str, str]]:
    """The same by our kernels, in Triton's interpreter."""
    with using(transport, "triton"):
        return hashes(count, asked)


def hashes(count: int, asked: list[tuple[str, Setting]]) -> list[dict[str, str]]:
    """Of each program's results as one rank would have them; of any bit."""
    with tp_invariance(count):
        return [_hashes_of(PROGRAMS[program], setting) for program, setting in asked]


def _hashes_of(program: Callable[[Setting], dict[str, Whole]], setting: Setting) -> dict[str, str]:
    with torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
        results = program(setting)
    return {name: hash_of(whole_of(result)) for name, result in results.items()}


def hash_of(whole: Tensor | None) -> str:
    if whole is None:
        return ""
    assert whole.isfinite().all()
    return hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
