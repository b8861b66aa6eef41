"""Ops over a vocabulary: unsharded numbers, whatever the number of ranks, padding, dtype and backend."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.ops.vocab_cases import Setting, run_all
from tests.ranks import RankPool

INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks compute on the CPU, where kernels run in the interpreter only"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=["ranks1", "ranks2", "ranks4"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def check(ranks: RankPool, name: str, settings: list[Setting]) -> None:
    by_rank = ranks.run(run_all, name, settings)
    for number, setting in enumerate(settings):
        for rank, results in enumerate(by_rank):
            too_far = {key: value for key, value in results[number].items() if not value < 1}
            assert not too_far, f"rank {rank}, {setting}: error as a part of what is allowed: {too_far}"


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
    check(ranks, "loss", settings + leading + several + large + extreme)


@INTERPRETED
def test_loss_by_kernels(ranks):
    settings = [
        Setting(dtype, 77, (5,), smoothing, ignored=1, backend="triton")
        for dtype, smoothing in product(DTYPES[:3], (0.0, 0.1))
    ]
    check(ranks, "loss", [*settings, Setting(vocab=5, leading=(4,), backend="triton")])


def test_embedding_and_its_gradient_are_the_unsharded_ones(ranks):
    settings = [
        Setting(dtype, vocab, sequence_parallel=parallel)
        for dtype, vocab, parallel in product(DTYPES, (50, 7, 5), (False, True))
    ]
    leading = [Setting(leading=shape) for shape in ((), (1,), (0,), (5, 0), (2, 1, 3, 2))]
    parallel = [Setting(leading=shape, sequence_parallel=True) for shape in ((4,), (0,), (8, 0), (4, 2, 2))]
    padding = [Setting(padding_idx=index, vocab=7) for index in (0, 3, -1)]
    check(ranks, "embedding", settings + leading + parallel + padding)


@INTERPRETED
def test_embedding_by_kernels(ranks):
    settings = [
        Setting(dtype, 7, (8, 3), sequence_parallel=parallel, backend="triton")
        for dtype, parallel in product(DTYPES[:3], (False, True))
    ]
    check(ranks, "embedding", settings)


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
    check(ranks, "head", settings + several)


@INTERPRETED
def test_head_by_kernels(ranks):
    settings = [
        Setting(leading=(8,), sequence_parallel=parallel, backend="triton") for parallel in (False, True)
    ]
    check(
        ranks, "head", [*settings, Setting(torch.bfloat16, leading=(8,), reduction="none", backend="triton")]
    )
