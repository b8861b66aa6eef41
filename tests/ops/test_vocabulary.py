"""Ops over a vocabulary: unsharded numbers, whatever the number of ranks, padding, dtype and backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.ops.parallel_cases import assert_within, compare, leaf, same, split
from tests.products import combined
from tests.ranks import RankPool
from tpkernels.comm import schedule
from tpkernels.dispatch import backends
from tpkernels.ops import LossMetrics, linear_cross_entropy, vocab_cross_entropy, vocab_embedding

FEATURES = 20
HELD = 2.0**-7  # by a main_grad: near the gradients, for what is added to 1 in fp32 loses their last bits


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
    bias: bool = False
    softcap: float | None = None
    weighted: bool = False  # by class
    z_loss: float = 0.0
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


def without_padding(ours: Tensor | None, whole: Tensor, dim: int) -> Tensor:
    """Our gradient without that of padding, which has to be zero."""
    assert ours is not None
    there, rank = ours.shape[dim], dist.get_rank()
    real = min(max(whole.shape[dim] - rank * there, 0), there)
    assert not ours.narrow(dim, real, there - real).any(), "padding learns"
    return ours.narrow(dim, 0, real)


def part_of(dim: int) -> Callable[[Tensor], Tensor]:
    """Of a whole gradient what `without_padding` is compared with."""
    return lambda whole: without_padding(our_part(whole, dim, 0), whole, dim)


def tokens_of(setting: Setting) -> Callable[[Tensor], Tensor]:
    return split(0) if setting.sequence_parallel else same


def prepare(seed: int) -> torch.Generator:
    schedule.LEAST_BYTES = 64
    return torch.Generator().manual_seed(seed)


def targets(setting: Setting, generator: torch.Generator) -> Tensor:
    target = torch.randint(setting.vocab, setting.leading, generator=generator)
    target.view(-1)[: setting.ignored] = -100
    return target


def random(setting: Setting, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(setting.dtype)


def class_weight_of(setting: Setting, generator: torch.Generator) -> Tensor | None:
    if not setting.weighted:
        return None
    weight = torch.rand(setting.vocab, generator=generator, dtype=torch.float64)
    weight[::3] = 0
    return weight.to(torch.promote_types(setting.dtype, torch.float32))


def unsharded_loss(
    setting: Setting, logits: Tensor, target: Tensor, class_weight: Tensor | None, reduction: str = "none"
) -> Tensor:
    """By torch: with "mean" a mean of the loss by class weights, and of the z-loss by tokens."""
    weight = None if class_weight is None else class_weight.to(logits.dtype)
    options: dict[str, Any] = {"weight": weight, "label_smoothing": setting.smoothing}
    y = F.cross_entropy(logits, target, reduction=reduction, **options)
    if setting.z_loss:
        z = setting.z_loss * logits.logsumexp(1).square().masked_fill(target == -100, 0)
        total = z if reduction == "none" else z.sum()
        y = y + (total / (target != -100).sum() if reduction == "mean" else total)
    return y


def loss(setting: Setting, seed: int) -> dict[str, float]:
    """vocab_cross_entropy and the gradient of its logits."""
    generator = prepare(seed)
    shape = (*setting.leading, setting.vocab)
    whole = (setting.scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(setting.dtype)
    target = targets(setting, generator)
    wide = replace(setting, dtype=torch.promote_types(setting.dtype, torch.float32))
    dloss, class_weight = random(wide, generator, *setting.leading), class_weight_of(setting, generator)

    def unsharded(logits: Tensor) -> Tensor:
        rows = logits.reshape(-1, setting.vocab)
        return unsharded_loss(setting, rows, target.flatten(), class_weight).view(setting.leading)

    # padding would win every maximum, if it were read
    logits = our_part(whole, -1, float("inf")).requires_grad_()
    before = logits.detach().clone()
    y = vocab_cross_entropy(
        logits,
        target,
        dist.group.WORLD,
        label_smoothing=setting.label_smoothing,
        class_weight=class_weight,
        z_loss=setting.z_loss,
        vocab_size=setting.vocab,
    )
    assert y.dtype == wide.dtype
    assert not y[target == -100].any()
    (dlogits,) = torch.autograd.grad(y, logits, dloss)
    assert torch.equal(logits, before), "the logits were changed"
    gradient = without_padding(dlogits, whole, -1), part_of(-1)
    return compare(wide, unsharded, {"logits": whole}, dloss, {"y": (y.detach(), same)}) | compare(
        setting, unsharded, {"logits": whole}, dloss, {"logits": gradient}
    )


def embedding(setting: Setting, seed: int) -> dict[str, float]:
    """vocab_embedding, to the bit, and the gradient of its table."""
    generator = prepare(seed)
    whole = random(setting, generator, setting.vocab, FEATURES)
    ids = torch.randint(setting.vocab, setting.leading, generator=generator)
    dy = random(setting, generator, *setting.leading, FEATURES)

    def unsharded(weight: Tensor) -> Tensor:
        return F.embedding(ids, weight, padding_idx=setting.padding_idx)

    weight, tokens = our_part(whole, 0, float("nan")).requires_grad_(), tokens_of(setting)
    y = vocab_embedding(
        ids,
        weight,
        dist.group.WORLD,
        sequence_parallel=setting.sequence_parallel,
        padding_idx=setting.padding_idx,
        vocab_size=setting.vocab,
    )
    y.backward(tokens(dy))
    assert torch.equal(y, tokens(unsharded(whole))), "a lookup is exact"
    gradient = without_padding(weight.grad, whole, 0), part_of(0)
    return compare(setting, unsharded, {"weight": whole}, dy, {"weight": gradient})


def head(setting: Setting, seed: int) -> dict[str, float]:
    """linear_cross_entropy and its gradients."""
    generator = prepare(seed)
    target = targets(setting, generator)
    shape = setting.leading if setting.reduction == "none" else ()
    dloss = 1 + torch.rand(shape, generator=generator, dtype=torch.float64)
    class_weight, metrics = class_weight_of(setting, generator), LossMetrics()

    def unsharded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = logits_of(setting, hidden, weight, bias).reshape(-1, setting.vocab)
        return unsharded_loss(setting, logits, target.flatten(), class_weight, setting.reduction).view(shape)

    ours = partial(
        linear_cross_entropy,
        label_smoothing=setting.label_smoothing,
        class_weight=class_weight,
        z_loss=setting.z_loss,
        reduction=setting.reduction,
        metrics=metrics if seed % 2 else None,
    )
    return with_a_head(setting, generator, ours, unsharded, target, dloss)


def logits_of(setting: Setting, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Unsharded, in fp32 or wider."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if setting.softcap is None else setting.softcap * (logits / setting.softcap).tanh()


def with_a_head(
    setting: Setting,
    generator: torch.Generator,
    ours: Callable[..., Tensor],
    unsharded: Callable[..., Tensor],
    target: Tensor,
    dy: Tensor,
    draw: Callable[..., Tensor] = random,
) -> dict[str, float]:
    """What `ours` makes of hidden, a shard of the weight and targets, and gradients, against `unsharded`."""
    hidden = draw(setting, generator, *setting.leading, FEATURES)
    whole = draw(setting, generator, setting.vocab, FEATURES)
    tokens = tokens_of(setting)
    ours_h, ours_w = leaf(tokens(hidden)), our_part(whole, 0, 100.0).requires_grad_()
    main_grad = torch.full_like(ours_w, HELD, dtype=torch.float32) if setting.main_grad else None
    named = {"hidden": hidden, "weight": whole}
    ours_b = None
    if setting.bias:
        named["bias"] = draw(setting, generator, setting.vocab)
        ours_b = our_part(named["bias"], 0, 100.0).requires_grad_()
    y = ours(
        ours_h,
        ours_w,
        target,
        dist.group.WORLD,
        bias_shard=ours_b,
        softcap=setting.softcap,
        vocab_size=setting.vocab,
        sequence_parallel=setting.sequence_parallel,
        chunk_tokens=setting.chunk_tokens,
        main_grad=main_grad,
    )
    y.backward(dy.to(y.dtype))
    assert main_grad is None or ours_w.grad is None
    dweight = ours_w.grad if main_grad is None else main_grad - HELD
    results = {
        "y": (y.detach(), same),
        "hidden": (ours_h.grad, tokens),
        "weight": (without_padding(dweight, whole, 0), part_of(0)),
    }
    if ours_b is not None:
        results["bias"] = without_padding(ours_b.grad, named["bias"], 0), part_of(0)
    return compare(setting, unsharded, named, dy, results)


Case = Callable[[Any, int], dict[str, float]]


def run_all(case: Case, settings: list[Setting]) -> list[dict[str, float]]:
    """Many settings in one call: a call of a pool costs more than a tiny loss does."""
    found = []
    for seed, setting in enumerate(settings):
        with patch.object(backends, "backend", setting.backend):  # ranks live longer than a case
            found.append(case(setting, seed))
    return found


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks compute on the CPU, where kernels run in the interpreter only"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_right(ranks: RankPool, case: Case, settings: list[Any]) -> None:
    """Four ranks take all settings; a rank alone and two take every other one, in turn."""
    if ranks.world_size < 4:
        settings = settings[ranks.world_size - 1 :: 2]
    assert_within(ranks.run(run_all, case, settings), settings)


@combined
def test_loss_and_its_gradient_are_the_unsharded_ones(ranks, combined):
    settings = [
        Setting(dtype, vocab, label_smoothing=smoothing)
        # 7 ids on 4 ranks: 2 each and one of padding; 5 ids: 2 each, the last rank has padding only
        for dtype, vocab, smoothing in combined(DTYPES, (7, 5), (0.0, 0.1))
    ]
    leading = [
        Setting(leading=shape, ignored=0, label_smoothing=0.1)
        for shape in ((), (1,), (0,), (2, 0), (2, 1, 3, 2))
    ]
    several = [Setting(vocab=1, leading=(4,)), Setting(vocab=2, label_smoothing=0.5), Setting(ignored=24)]
    large = [Setting(dtype, 50257, (4,), 0.1, ignored=1) for dtype in DTYPES[:2]]
    extreme = [Setting(scale=scale, label_smoothing=0.1) for scale in (1e-3, 1e4)]
    assert_right(ranks, loss, settings + leading + several + large + extreme)


@INTERPRETED
def test_loss_by_kernels(ranks):
    settings = [
        Setting(dtype, 77, (5,), smoothing, ignored=1, backend="triton")
        for dtype, smoothing in product(DTYPES[:3], (0.0, 0.1))
    ]
    assert_right(ranks, loss, [*settings, Setting(vocab=5, leading=(4,), backend="triton")])


@combined
def test_embedding_and_its_gradient_are_the_unsharded_ones(ranks, combined):
    settings = [
        Setting(dtype, vocab, sequence_parallel=parallel)
        for dtype, vocab, parallel in combined(DTYPES, (50, 7, 5), (False, True))
    ]
    leading = [Setting(leading=shape) for shape in ((), (1,), (0,), (5, 0), (2, 1, 3, 2))]
    parallel = [Setting(leading=shape, sequence_parallel=True) for shape in ((4,), (0,), (8, 0), (4, 2, 2))]
    padding = [Setting(padding_idx=index, vocab=7) for index in (0, 3, -1)]
    assert_right(ranks, embedding, settings + leading + parallel + padding)


@INTERPRETED
def test_embedding_by_kernels(ranks):
    settings = [
        Setting(dtype, 7, (8, 3), sequence_parallel=parallel, backend="triton")
        for dtype, parallel in product(DTYPES[:3], (False, True))
    ]
    assert_right(ranks, embedding, settings)


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
    assert_right(ranks, head, settings + several)


@INTERPRETED
def test_head_by_kernels(ranks):
    settings = [
        Setting(leading=(8,), sequence_parallel=parallel, backend="triton") for parallel in (False, True)
    ]
    none = Setting(torch.bfloat16, leading=(8,), reduction="none", backend="triton")
    assert_right(ranks, head, [*settings, none])


# what else a loss may have: each alone, and several that meet in one formula
TERMS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "softcap": {"softcap": 1.5},
    "class_weight": {"weighted": True},
    "z_loss": {"z_loss": 0.1},
    "smoothed_class_weight": {"weighted": True, "label_smoothing": 0.2},
    "smoothed_z_loss": {"z_loss": 0.1, "label_smoothing": 0.2},
    "all": {"bias": True, "softcap": 1.5, "weighted": True, "z_loss": 0.1, "label_smoothing": 0.2},
}


@pytest.mark.parametrize("terms", TERMS)
def test_terms_of_a_loss_are_the_unsharded_ones(ranks, terms):
    settings = [
        Setting(dtype, vocab, reduction=reduction, sequence_parallel=parallel, **TERMS[terms])
        for dtype, (vocab, reduction, parallel) in zip(
            DTYPES * 2,
            [(50, "mean", False), (7, "none", True), (5, "sum", False), (50, "mean", True)] * 2,
            strict=True,
        )
    ]
    several = [
        Setting(reduction="mean", chunk_tokens=None, main_grad=True, **TERMS[terms]),
        Setting(torch.bfloat16, reduction="none", leading=(), ignored=0, **TERMS[terms]),
        Setting(reduction="sum", ignored=24, **TERMS[terms]),
    ]
    assert_right(ranks, head, settings + several)


@pytest.mark.parametrize("terms", ["class_weight", "z_loss", "smoothed_class_weight", "smoothed_z_loss"])
def test_terms_of_a_loss_of_logits_are_the_unsharded_ones(ranks, terms):
    shapes = [(50, (8, 3)), (7, (8, 3)), (5, (4,)), (50257, (3,))]
    settings = [
        Setting(dtype, vocab, leading, ignored=1, **TERMS[terms])
        for dtype, (vocab, leading) in zip(DTYPES, shapes, strict=True)
    ]
    assert_right(ranks, loss, settings)


@INTERPRETED
@pytest.mark.parametrize("terms", TERMS)
def test_terms_of_a_loss_by_kernels(ranks2, terms):
    settings = [
        Setting(dtype, 77, (5,), ignored=1, reduction=reduction, backend="triton", **TERMS[terms])
        for dtype, reduction in ((torch.float32, "mean"), (torch.bfloat16, "none"))
    ]
    assert_within(ranks2.run(run_all, head, settings), settings)
