"""Ops over a vocabulary: unsharded numbers, whatever the number of ranks, padding, dtype and backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.ops.parallel_cases import BOUND, assert_within
from tests.ranks import RankPool
from tpkernels.comm import schedule
from tpkernels.dispatch import backends
from tpkernels.ops import linear_cross_entropy, vocab_cross_entropy, vocab_embedding

FEATURES = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    dtype: torch.dtype = torch.float32
    vocab: int = 50
    leading: tuple[int, ...] = (8, 3)
    label_smoothing: float = 0.0
    ignored: int = 3  # how many targets
    scale: float = 3.0  # of logits
    sequence_parallel: bool = False
    reduction: str = "mean"
    chunk_tokens: int | None = 7
    main_grad: bool = False
    padding_idx: int | None = None
    backend: str = "torch"

    @property
    def smoothing(self) -> float:
        """What torch calls label smoothing: it is given to all ids, also to the right one."""
        return self.label_smoothing * self.vocab / (self.vocab - 1) if self.label_smoothing else 0.0


def width_of(vocab: int) -> int:
    return -(-vocab // dist.get_world_size())


def our_part(whole: Tensor, dim: int, filler: float) -> Tensor:
    """This rank's part of the vocabulary along `dim`, padded with `filler`."""
    world = dist.get_world_size()
    missing = width_of(whole.shape[dim]) * world - whole.shape[dim]
    padding = list(whole.shape)
    padding[dim] = missing
    padded = torch.cat([whole, whole.new_full(padding, filler)], dim)
    return padded.chunk(world, dim)[dist.get_rank()].clone()


def same_part(ours: Tensor, whole: Tensor, dim: int) -> Tensor:
    """Our gradient without that of padding, which has to be zero."""
    there = our_part(whole, dim, 0).shape[dim]
    rank = dist.get_rank()
    real = min(max(whole.shape[dim] - rank * there, 0), there)
    padding = ours.narrow(dim, real, there - real)
    assert not padding.any(), "padding learns"
    return ours.narrow(dim, 0, real)


def tokens(x: Tensor, setting: Setting) -> Tensor:
    return x.chunk(dist.get_world_size(), 0)[dist.get_rank()] if setting.sequence_parallel else x


def excess(ours: Tensor | None, truth: Tensor, own: Tensor, dtype: torch.dtype) -> float:
    """Our error as a part of what is allowed: the bound of the dtype, or twice torch's own error."""
    assert ours is not None
    assert ours.shape == truth.shape, f"{tuple(ours.shape)}, not {tuple(truth.shape)}"
    assert bool(torch.isfinite(ours).all())
    scale = float(truth.norm()) or 1.0
    error, theirs = (float((t.double() - truth).norm()) / scale for t in (ours, own))
    return error / max(BOUND[dtype], 2 * theirs)


def computing_by(backend: str, function: Callable[..., T], *args: Any) -> T:
    """Ranks live longer than a case."""
    with patch.object(backends, "backend", backend):
        return function(*args)


def prepare(seed: int) -> torch.Generator:
    schedule.LEAST_BYTES = 64
    return torch.Generator().manual_seed(seed)


def targets(setting: Setting, generator: torch.Generator) -> Tensor:
    target = torch.randint(setting.vocab, setting.leading, generator=generator)
    target.view(-1)[: setting.ignored] = -100
    return target


Results = dict[str, float]


def loss(setting: Setting, seed: int) -> Results:
    """vocab_cross_entropy and the gradient of its logits."""
    generator = prepare(seed)
    whole = torch.randn(*setting.leading, setting.vocab, generator=generator, dtype=torch.float64)
    whole = (setting.scale * whole).to(setting.dtype)
    target = targets(setting, generator)
    dloss = torch.randn(setting.leading, generator=generator, dtype=torch.float64)

    def unsharded(dtype: torch.dtype) -> list[Tensor]:
        x = whole.to(dtype).requires_grad_()
        rows = x.reshape(-1, setting.vocab)
        y = F.cross_entropy(rows, target.flatten(), reduction="none", label_smoothing=setting.smoothing)
        y = y.view(setting.leading)
        return [y.detach(), *torch.autograd.grad(y, x, dloss.to(y.dtype))]

    # padding would win every maximum, if it were read
    logits = our_part(whole, -1, float("inf")).requires_grad_()
    before = logits.detach().clone()
    y = vocab_cross_entropy(
        logits, target, dist.group.WORLD, label_smoothing=setting.label_smoothing, vocab_size=setting.vocab
    )
    wide = torch.promote_types(setting.dtype, torch.float32)
    assert y.dtype == wide
    assert not y[target == -100].any()
    (dlogits,) = torch.autograd.grad(y, logits, dloss.to(wide))
    assert torch.equal(logits, before), "the logits were changed"
    truth, own, own_wide = unsharded(torch.float64), unsharded(setting.dtype), unsharded(wide)
    part = [same_part(our_part(t, -1, 0), whole, -1) for t in (truth[1], own[1])]
    return {
        "loss": excess(y.detach(), truth[0], own_wide[0], wide),
        "dlogits": excess(same_part(dlogits, whole, -1), *part, setting.dtype),
    }


def embedding(setting: Setting, seed: int) -> Results:
    """vocab_embedding, to the bit, and the gradient of its table."""
    generator = prepare(seed)
    whole = torch.randn(setting.vocab, FEATURES, generator=generator, dtype=torch.float64).to(setting.dtype)
    ids = torch.randint(setting.vocab, setting.leading, generator=generator)
    dy = torch.randn(*setting.leading, FEATURES, generator=generator, dtype=torch.float64).to(setting.dtype)

    def unsharded(dtype: torch.dtype) -> list[Tensor]:
        w = whole.to(dtype).requires_grad_()
        y = F.embedding(ids, w, padding_idx=setting.padding_idx)
        return [y.detach(), *torch.autograd.grad(y, w, dy.to(dtype))]

    weight = our_part(whole, 0, float("nan")).requires_grad_()
    y = vocab_embedding(
        ids,
        weight,
        dist.group.WORLD,
        sequence_parallel=setting.sequence_parallel,
        padding_idx=setting.padding_idx,
        vocab_size=setting.vocab,
    )
    y.backward(tokens(dy, setting))
    truth, own = unsharded(torch.float64), unsharded(setting.dtype)
    assert torch.equal(y.detach(), tokens(own[0], setting)), "a lookup is exact"
    assert weight.grad is not None
    part = [same_part(our_part(t, 0, 0), whole, 0) for t in (truth[1], own[1])]
    return {"dweight": excess(same_part(weight.grad, whole, 0), *part, setting.dtype)}


def head(setting: Setting, seed: int) -> Results:
    """linear_cross_entropy and its gradients."""
    generator = prepare(seed)
    hidden = torch.randn(*setting.leading, FEATURES, generator=generator, dtype=torch.float64)
    hidden = hidden.to(setting.dtype)
    whole = torch.randn(setting.vocab, FEATURES, generator=generator, dtype=torch.float64).to(setting.dtype)
    target = targets(setting, generator)
    shape = setting.leading if setting.reduction == "none" else ()
    dloss = 1 + torch.rand(shape, generator=generator, dtype=torch.float64)

    def unsharded(dtype: torch.dtype) -> list[Tensor]:
        h, w = hidden.to(dtype).requires_grad_(), whole.to(dtype).requires_grad_()
        logits = F.linear(h, w).reshape(-1, setting.vocab)
        y = F.cross_entropy(
            logits.to(torch.promote_types(dtype, torch.float32)),
            target.flatten(),
            reduction=setting.reduction,
            label_smoothing=setting.smoothing,
        ).view(shape)
        return [y.detach(), *torch.autograd.grad(y, (h, w), dloss.to(y.dtype))]

    ours_h = tokens(hidden, setting).clone().requires_grad_()
    ours_w = our_part(whole, 0, 100.0).requires_grad_()
    main_grad = torch.ones_like(ours_w, dtype=torch.float32) if setting.main_grad else None
    y = linear_cross_entropy(
        ours_h,
        ours_w,
        target,
        dist.group.WORLD,
        label_smoothing=setting.label_smoothing,
        reduction=setting.reduction,
        vocab_size=setting.vocab,
        sequence_parallel=setting.sequence_parallel,
        chunk_tokens=setting.chunk_tokens,
        main_grad=main_grad,
    )
    y.backward(dloss.to(y.dtype))
    dh, dw = ours_h.grad, ours_w.grad
    if main_grad is not None:
        assert dw is None
        dw = main_grad - 1
    assert dw is not None
    truth, own = unsharded(torch.float64), unsharded(setting.dtype)
    part = [same_part(our_part(t, 0, 0), whole, 0) for t in (truth[2], own[2])]
    return {
        "loss": excess(y.detach(), truth[0], own[0], setting.dtype),
        "dhidden": excess(dh, tokens(truth[1], setting), tokens(own[1], setting), setting.dtype),
        "dweight": excess(same_part(dw, whole, 0), *part, setting.dtype),
    }


CASES: dict[str, Callable[[Setting, int], Results]] = {"loss": loss, "embedding": embedding, "head": head}


def run_all(name: str, settings: list[Setting]) -> list[Results]:
    """Many settings in one call: a call of a pool costs more than a tiny loss does."""
    return [computing_by(s.backend, CASES[name], s, seed) for seed, s in enumerate(settings)]


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks compute on the CPU, where kernels run in the interpreter only"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_right(ranks: RankPool, name: str, settings: list[Setting]) -> None:
    assert_within(ranks.run(run_all, name, settings), settings)


def test_loss_and_its_gradient_are_the_unsharded_ones(ranks):
    settings = [
        Setting(dtype, vocab, label_smoothing=smoothing)
        # 7 ids on 4 ranks: 2 each and one of padding; 5 ids: 2 each, the last rank has padding only
        for dtype, vocab, smoothing in product(DTYPES, (7, 5), (0.0, 0.1))
    ]
    leading = [
        Setting(leading=shape, ignored=0, label_smoothing=0.1)
        for shape in ((), (1,), (0,), (2, 0), (2, 1, 3, 2))
    ]
    several = [Setting(vocab=1, leading=(4,)), Setting(vocab=2, label_smoothing=0.5), Setting(ignored=24)]
    large = [Setting(dtype, 50257, (4,), 0.1, ignored=1) for dtype in DTYPES[:2]]
    extreme = [Setting(scale=scale, label_smoothing=0.1) for scale in (1e-3, 1e4)]
    assert_right(ranks, "loss", settings + leading + several + large + extreme)


@INTERPRETED
def test_loss_by_kernels(ranks):
    settings = [
        Setting(dtype, 77, (5,), smoothing, ignored=1, backend="triton")
        for dtype, smoothing in product(DTYPES[:3], (0.0, 0.1))
    ]
    assert_right(ranks, "loss", [*settings, Setting(vocab=5, leading=(4,), backend="triton")])


def test_embedding_and_its_gradient_are_the_unsharded_ones(ranks):
    settings = [
        Setting(dtype, vocab, sequence_parallel=parallel)
        for dtype, vocab, parallel in product(DTYPES, (50, 7, 5), (False, True))
    ]
    leading = [Setting(leading=shape) for shape in ((), (1,), (0,), (5, 0), (2, 1, 3, 2))]
    parallel = [Setting(leading=shape, sequence_parallel=True) for shape in ((4,), (0,), (8, 0), (4, 2, 2))]
    padding = [Setting(padding_idx=index, vocab=7) for index in (0, 3, -1)]
    assert_right(ranks, "embedding", settings + leading + parallel + padding)


@INTERPRETED
def test_embedding_by_kernels(ranks):
    settings = [
        Setting(dtype, 7, (8, 3), sequence_parallel=parallel, backend="triton")
        for dtype, parallel in product(DTYPES[:3], (False, True))
    ]
    assert_right(ranks, "embedding", settings)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_head_and_loss_in_chunks_are_the_unsharded_ones(ranks, reduction):
    settings = [
        Setting(dtype, label_smoothing=0.1 * parallel, sequence_parallel=parallel, reduction=reduction)
        for dtype, parallel in product(DTYPES, (False, True))
    ]
    several = [
        Setting(vocab=5, reduction=reduction),
        Setting(main_grad=True, sequence_parallel=True, reduction=reduction),
        Setting(torch.bfloat16, main_grad=True, reduction=reduction),
        Setting(chunk_tokens=None, reduction=reduction),
        Setting(chunk_tokens=1, reduction=reduction),
        Setting(leading=(), ignored=0, reduction=reduction),
        Setting(leading=(4, 2, 1), sequence_parallel=True, reduction=reduction),
    ]
    assert_right(ranks, "head", settings + several)


@INTERPRETED
def test_head_by_kernels(ranks):
    settings = [
        Setting(leading=(8,), sequence_parallel=parallel, backend="triton") for parallel in (False, True)
    ]
    assert_right(
        ranks, "head", [*settings, Setting(torch.bfloat16, leading=(8,), reduction="none", backend="triton")]
    )
