"""Ids chosen by split logits: those of the whole, on all ranks, for any number of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of
from tests.ops.test_vocabulary import our_part
from tests.products import pairwise
from tpkernels.ops import vocab_argmax, vocab_gather, vocab_sample

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WORLDS = ["ranks1", "ranks2", "ranks4"]
VOCAB = 14  # on 4 ranks: 4 each, and two of padding


def awkward_logits(dtype: torch.dtype) -> Tensor:
    """(5, 3, VOCAB), whole: with ties within ranks and across them, and infinite ones."""
    whole = torch.randint(-2, 3, (5, 3, VOCAB), generator=torch.Generator().manual_seed(1)).to(dtype)
    whole[0] = 0
    whole[1] = -torch.inf
    whole[2, 0, 3:9] = torch.inf
    whole[2, 1, VOCAB - 1] = torch.nan
    return whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks()
def test_argmax_is_the_lowest_id_of_the_largest_logit(dtype):
    whole = awkward_logits(dtype)
    ours = vocab_argmax(our_part(whole, -1, torch.inf), dist.group.WORLD, vocab_size=VOCAB)
    assert ours.equal(whole.argmax(-1))


def drawn_by_hand(
    row: list[float], number: float, temperature: float, top_k: int | None, top_p: float
) -> int:
    """One token in plain Python."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top_k]
    weights = [math.exp((row[i] - row[order[0]]) / temperature) for i in order]
    kept, together = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if together < top_p * sum(weights):
            kept.append((token, weight))
        together += weight
    left = number * sum(weight for _, weight in kept)
    for token, weight in kept:
        left -= weight
        if left < 0:
            return token
    return kept[-1][0]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 5, "temperature": 2.0},
    {"top_k": 100},
    {"top_p": 0.4},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"top_k": 9, "top_p": 0.8, "temperature": 0.7},
]


@pairwise(world=WORLDS, dtype=DTYPES)
@on_ranks()
def test_samples_are_those_drawn_by_hand_from_the_same_numbers(dtype):
    """Logits are quarters, so that many tie."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(-6, 7, (40, VOCAB), generator=generator).to(dtype) / 4
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    for options in OPTIONS:
        ours = vocab_sample(
            our_part(whole, -1, torch.inf), dist.group.WORLD, vocab_size=VOCAB, uniform=uniform, **options
        )
        temperature, top_k = options.get("temperature", 1.0), options.get("top_k")
        by_hand = [
            drawn_by_hand(row, number, temperature, top_k, options.get("top_p", 1.0))
            for row, number in zip(whole.tolist(), uniform.tolist(), strict=True)
        ]
        assert ours.tolist() == by_hand, options


def real_samples(dtype: torch.dtype) -> list[Tensor]:
    """Ids drawn with torch's own generator from logits of any value, to be compared between worlds."""
    whole = torch.randn(30, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    torch.manual_seed(4 + 1000 * dist.get_rank())  # numbers of other ranks count for nothing
    ours = our_part(whole, -1, torch.inf)
    drawn = [vocab_sample(ours, dist.group.WORLD, vocab_size=50, **options) for options in OPTIONS]
    generator = torch.Generator().manual_seed(5)
    return [*drawn, vocab_sample(ours, dist.group.WORLD, vocab_size=50, generator=generator)]


@on_ranks(2)
def test_samples_are_as_frequent_as_they_are_probable():
    row, count = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5]), 20_000
    ours = our_part(row.expand(count, -1), -1, torch.inf)
    generator = torch.Generator().manual_seed(6)
    drawn = vocab_sample(ours, dist.group.WORLD, vocab_size=6, generator=generator)
    frequent = torch.bincount(drawn, minlength=6) / count
    assert frequent[4] == 0
    torch.testing.assert_close(frequent, row.softmax(0), rtol=0, atol=0.015)  # four standard deviations


@on_ranks(2)
def test_leading_dimensions_are_any():
    for leading in ((), (0,), (2, 0), (2, 3, 1)):
        ours = our_part(torch.randn(*leading, VOCAB), -1, 0.0)
        assert vocab_argmax(ours, dist.group.WORLD, vocab_size=VOCAB).shape == leading
        assert vocab_sample(ours, dist.group.WORLD, vocab_size=VOCAB).shape == leading
        assert vocab_gather(ours, dist.group.WORLD, vocab_size=VOCAB).shape == (*leading, VOCAB)


@on_ranks()
def test_gather_brings_all_logits_and_takes_each_part_of_the_gradient():
    whole = torch.randn(4, 2, VOCAB, generator=torch.Generator().manual_seed(7))
    ours = our_part(whole, -1, torch.inf).requires_grad_()
    y = vocab_gather(ours, dist.group.WORLD, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(y, ours, whole)
    assert torch.equal(y, whole)
    assert torch.equal(grad, our_part(whole, -1, 0.0))


@on_ranks(2)
def test_mistakes_of_choosing_are_errors_on_every_rank():
    group, x = dist.group.WORLD, torch.randn(3, 4)
    sample = partial(vocab_sample, x, group)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: sample(temperature=0.0), "expected a finite temperature above 0, got 0.0; use vocab_argmax"),
        (lambda: sample(temperature=math.inf), "expected a finite temperature above 0, got inf"),
        (lambda: sample(top_k=0), "expected top_k of at least 1, got 0"),
        (lambda: sample(top_p=0.0), "expected top_p above 0 and at most 1, got 0.0"),
        (lambda: sample(top_p=1.5), "expected top_p above 0 and at most 1, got 1.5"),
        (lambda: sample(uniform=torch.rand(4)), "expected uniform (3,) on cpu, got (4,)"),
        (lambda: vocab_argmax(x.long(), group), "expected floating-point logits_shard"),
        (lambda: vocab_gather(x, group, vocab_size=100), "expected a vocab_size from 1 to 8"),
    ]
    for call, words in calls:
        assert words in message_of(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_do_not_depend_on_the_number_of_ranks(request, dtype):
    by_world = [request.getfixturevalue(world).run(real_samples, dtype) for world in WORLDS]
    ((alone,), *_) = by_world
    for by_rank in by_world:
        for drawn in by_rank:
            assert all(torch.equal(a, b) for a, b in zip(drawn, alone, strict=True))
