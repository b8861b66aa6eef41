"""linear_logprobs: log-probabilities and entropies of the unsharded logits, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tests.on_ranks import equal_on_all, on_ranks
from tests.ops.invariant_cases import whole_of
from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import BOUND, assert_within, leaf, same, split
from tests.ops.quantized_oracle import RECIPES, Oracle
from tests.ops.test_behaviour import saved_bytes
from tests.ops.test_parallel_citizens import unlike_compiled
from tests.ops.test_vocab_behaviour import LiveBytes
from tests.ops.test_vocabulary import (
    DTYPES,
    INTERPRETED,
    Setting,
    assert_right,
    logits_of,
    our_part,
    prepare,
    random,
    run_all,
    with_a_head,
)
from tpkernels import Recipe
from tpkernels.comm.tensor_parallel import TensorParallel
from tpkernels.dispatch import backends
from tpkernels.gate.numerics import relative_error
from tpkernels.ops import column_linear, linear_cross_entropy, linear_logprobs, vocab_cross_entropy
from tpkernels.ops.vocab import cross_entropy
from tpkernels.ops.vocab import head_chunks as head


@dataclass(frozen=True)
class LogprobSetting(Setting):
    """n: targets a token, 0: no dimension of them; entropy: it has a gradient; ties: logits are integers"""

    scale: float = 1.0  # of hidden
    n: int = 0
    temperature: float = 0.7
    entropy: bool = True
    top_k: int | None = None
    ties: bool = False


FORBIDDEN = 7.0  # in the place of minus infinity, which has no difference


def oracle(s: LogprobSetting, target: Tensor, logits: Tensor) -> Tensor:
    """Log-probabilities, then entropies, flat; in fp32 or wider."""
    if s.top_k is not None:
        least = logits.topk(min(s.top_k, s.vocab)).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    logp = (logits / s.temperature).log_softmax(-1)
    several = target if s.n else target[..., None]
    picked = logp.gather(-1, several.clamp_min(0)).masked_fill(several == -100, 0)
    picked = picked.masked_fill(picked == -torch.inf, FORBIDDEN)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    entropy = entropy.masked_fill((several == -100).all(-1), 0) * s.entropy
    return torch.cat([picked.flatten(), entropy.flatten()])


def draw(s: LogprobSetting, generator: torch.Generator, *shape: int) -> Tensor:
    """Hidden or weight: integers whose products every dtype holds, or random numbers."""
    if s.ties:
        return torch.randint(-1, 2, shape, generator=generator).to(s.dtype)
    return random(s, generator, *shape) * s.scale


def logprobs(s: LogprobSetting, seed: int) -> dict[str, float]:
    """linear_logprobs and its gradients, as a part of what is allowed."""
    generator = prepare(seed)
    target = torch.randint(s.vocab, (*s.leading, s.n) if s.n else s.leading, generator=generator)
    target.view(-1)[: s.ignored] = -100
    if s.n > 1 and target.numel():
        target[..., 1] = target[..., 0]  # twice the same one
    dy = torch.randn(target.numel() + math.prod(s.leading), generator=generator, dtype=torch.float64)
    dy[target.numel() :] *= s.entropy

    def ours(*args: Any, **options: Any) -> Tensor:
        options |= {"temperature": s.temperature, "return_entropy": s.entropy, "top_k": s.top_k}
        found, entropy = linear_logprobs(*args, **options)
        assert found.shape == target.shape
        assert (entropy is not None) == s.entropy
        entropy = found.new_zeros(s.leading) if entropy is None else entropy
        assert entropy.shape == s.leading
        found = found.masked_fill(found == -torch.inf, FORBIDDEN)
        return torch.cat([found.flatten(), entropy.flatten()])

    def unsharded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return oracle(s, target, logits_of(s, hidden, weight, bias))

    return with_a_head(s, generator, ours, unsharded, target, dy, draw)


def test_logprobs_and_entropies_are_the_unsharded_ones(ranks):
    settings = [
        LogprobSetting(dtype, vocab, sequence_parallel=parallel, n=n, temperature=temperature)
        for dtype, (parallel, n, vocab, temperature) in zip(
            DTYPES * 2,
            [(False, 0, 50, 1.0), (True, 4, 7, 0.7), (True, 0, 5, 0.7), (False, 4, 50, 1.0)] * 2,
            strict=True,
        )
    ]
    several = [
        LogprobSetting(entropy=False),
        LogprobSetting(entropy=False, temperature=1.0, n=3, sequence_parallel=True),
        LogprobSetting(torch.bfloat16, n=2, main_grad=True, sequence_parallel=True),
        LogprobSetting(n=1, chunk_tokens=None),
        LogprobSetting(torch.float16, n=9, vocab=6, ignored=30),  # more targets than ids
        LogprobSetting(leading=(), ignored=0),
        LogprobSetting(leading=(), ignored=0, n=2),
        LogprobSetting(leading=(0,), n=2),
        LogprobSetting(vocab=1, leading=(4,), ignored=1),
        LogprobSetting(ignored=24),
        LogprobSetting(bias=True, softcap=1.5),
        LogprobSetting(torch.bfloat16, bias=True, softcap=3.0, n=3, sequence_parallel=True),
    ]
    extreme = [LogprobSetting(temperature=t, n=n) for t, n in ((1e-2, 0), (1e3, 0), (1e-2, 2), (1e30, 2))]
    assert_right(ranks, logprobs, settings + several + extreme)


def test_of_the_largest_logits_they_are_those_of_what_is_kept(ranks):
    settings = [  # with integers several are equal to the last that is kept
        LogprobSetting(dtype, vocab, sequence_parallel=parallel, n=n, top_k=k, temperature=t, ties=True)
        for dtype, (parallel, n, vocab, k, t) in zip(
            DTYPES * 2,
            [(False, 0, 50, 3, 1.0), (True, 4, 7, 2, 0.7), (True, 0, 5, 4, 0.7), (False, 4, 50, 14, 3.0)] * 2,
            strict=True,
        )
    ]
    several = [
        LogprobSetting(top_k=1, ties=True, entropy=False, temperature=1.0),
        LogprobSetting(top_k=1),
        LogprobSetting(top_k=20, entropy=False, sequence_parallel=True),
        LogprobSetting(torch.float64, top_k=9, n=3),
        LogprobSetting(torch.bfloat16, top_k=9, ties=True, main_grad=True),
        LogprobSetting(top_k=4, leading=(), ignored=0),
        LogprobSetting(top_k=4, leading=(0,), n=2),
        LogprobSetting(top_k=4, ignored=24, chunk_tokens=None),
        LogprobSetting(top_k=3, temperature=1e-2),
        LogprobSetting(top_k=5, softcap=1.5, bias=True),
        LogprobSetting(torch.bfloat16, top_k=5, softcap=20.0, n=2),
    ]
    assert_right(ranks, logprobs, settings + several)


@INTERPRETED
def test_logprobs_by_kernels(ranks2):
    settings = [  # several blocks of columns on each rank
        LogprobSetting(vocab=150, leading=(4,), backend="triton"),
        LogprobSetting(torch.bfloat16, 150, (4,), n=3, sequence_parallel=True, backend="triton"),
        LogprobSetting(torch.bfloat16, 150, (4,), n=2, top_k=12, ties=True, backend="triton"),
    ]
    assert_within(ranks2.run(run_all, logprobs, settings), settings)


@pytest.mark.parametrize("top_k", [None, 3])
@on_ranks(2)
def test_gradients_are_those_of_finite_differences(top_k):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = (torch.randn(3, 4, generator=generator, dtype=torch.float64) + dist.get_rank()).requires_grad_()
    target, group = torch.tensor([[0, 4], [3, 3], [-100, 1]]), dist.group.WORLD

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"temperature": 0.6, "vocab_size": 5, "chunk_tokens": 2, "top_k": top_k}
        found, entropy = linear_logprobs(hidden, weight, target, group, return_entropy=True, **options)
        assert entropy is not None
        return found.masked_fill(found == -torch.inf, 0), entropy

    # each rank perturbs its shard of the weight, and hidden alike
    assert torch.autograd.gradcheck(lambda h: both(h, weight.detach()), [hidden])
    ours, step = [], 1e-6
    (dweight,) = torch.autograd.grad([t.sum() for t in both(hidden.detach(), weight)], weight)
    for rank in range(2):
        delta = torch.zeros_like(weight)
        delta[0, 1] = step * (rank == dist.get_rank())
        with torch.no_grad():
            up, down = (sum(t.sum() for t in both(hidden, weight + sign * delta)) for sign in (1, -1))
        ours.append((up - down) / (2 * step))
    torch.testing.assert_close(dweight[0, 1], ours[dist.get_rank()], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])
@on_ranks(2)
def test_forbidden_certain_and_equal_ids_have_their_entropies(backend):
    """Logits are the weights: one feature, hidden is 1."""
    rank, group = dist.get_rank(), dist.group.WORLD
    rows = {
        "two forbidden": ([0.0, 1.0, -torch.inf, 2.0, 0.5, -torch.inf], 3),
        "a rank forbidden": ([-torch.inf] * 3 + [1.0, 2.0, 3.0], 4),
        "a rank lowest": ([torch.finfo(torch.float32).min] * 3 + [1.0, 2.0, 3.0], 4),
        "certain": ([-torch.inf] * 5 + [7.0], 5),
        "equal": ([3.0] * 6, 0),
        "target forbidden": ([0.0, 1.0, -torch.inf, 2.0, 0.5, 0.0], 2),
        "huge": ([1e4, -1e4, 9999.0, 0.0, 0.0, -1e30], 2),
    }
    for name, (row, target) in rows.items():
        weight = torch.tensor(row)[:, None].chunk(2)[rank].clone().requires_grad_()
        with patch.object(backends, "backend", backend):
            found, entropy = linear_logprobs(
                torch.ones(1, 1), weight, torch.tensor([target]), group, return_entropy=True
            )
            assert entropy is not None
            (dweight,) = torch.autograd.grad([found, entropy], weight, [torch.ones(1), 3 * torch.ones(1)])
        x = torch.tensor(row, dtype=torch.float64)
        logp, p = x.log_softmax(0), x.softmax(0)
        exact = -(torch.where(p > 0, logp, 0) * p).sum()
        pull = torch.zeros(6, dtype=torch.float64)
        pull[target] = 1
        gradient = pull - p - 3 * p * (torch.where(p > 0, logp, 0) + exact)
        torch.testing.assert_close(found[0].double(), logp[target], rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(entropy[0].double(), exact, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(dweight.double()[:, 0], gradient.chunk(2)[rank], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_target_that_top_k_drops_is_forbidden_and_moves_nothing():
    """Whatever gradient is asked of it; NaN is not hidden, and the vocabulary is no limit at all."""
    torch.manual_seed(5)  # the same on both ranks
    hidden, weight = torch.randn(6, 8), our_part(torch.randn(11, 8), 0, 100.0)
    group, options = dist.group.WORLD, {"vocab_size": 11, "chunk_tokens": 4}
    target = torch.arange(6)[:, None] + torch.arange(3)
    found, _ = linear_logprobs(hidden, weight, target, group, top_k=4, **options)
    dropped = found == -torch.inf
    assert dropped.any()
    assert not dropped.all()
    assert not found.isnan().any()
    gradients = []
    for filler in (0.0, -3.0, torch.inf, torch.nan):
        leaves = leaf(hidden), leaf(weight)
        found, entropy = linear_logprobs(*leaves, target, group, top_k=4, return_entropy=True, **options)
        assert entropy is not None
        dlogprobs = torch.ones_like(found).masked_fill(dropped, filler)
        gradients.append(torch.autograd.grad([found, entropy], leaves, [dlogprobs, torch.ones_like(entropy)]))
    assert all(torch.equal(a, b) for found in gradients for a, b in zip(gradients[0], found, strict=True))
    for k in (11, 12, 10**6):
        calls = [linear_logprobs(hidden, weight, target, group, top_k=top, **options) for top in (None, k)]
        assert torch.equal(calls[0][0], calls[1][0])
    hidden[2] = torch.nan
    found, _ = linear_logprobs(hidden, weight, target, group, top_k=4, **options)
    assert equal_on_all(found.isnan().tolist()) == [[row == 2] * 3 for row in range(6)]


@on_ranks(2)
def test_it_is_the_loss_with_its_sign_changed_and_several_targets_cost_one_product():
    torch.manual_seed(5)  # the same on both ranks
    hidden, whole = torch.randn(6, 2, 8), torch.randn(12, 8)
    target, group = torch.randint(12, (6, 2, 3)), dist.group.WORLD
    target[0] = -100
    weight = our_part(whole, 0, 0.0)
    loss = linear_cross_entropy(hidden, weight, target[..., 0].contiguous(), group, reduction="none")
    one, nothing = linear_logprobs(hidden, weight, target[..., 0], group)
    assert nothing is None
    assert torch.equal(one, -loss)
    assert equal_on_all(one.tolist())[0] == [0.0, 0.0]
    assert not one.signbit()[0].any(), "-0"
    leaves = leaf(hidden), leaf(weight)
    with patch.object(head, "_logits", wraps=head._logits) as products:
        found, entropy = linear_logprobs(*leaves, target, group, return_entropy=True)
        assert products.call_count == 1
        assert entropy is not None
        (found.sum() + entropy.sum()).backward()
        assert products.call_count == 2
    torch.testing.assert_close(found[..., 0].detach(), one)


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_in_fp8_a_head_is_a_column_layer_and_the_loss_of_its_logits(recipe):
    """By the definition of fp8, and to the bit that of the two ops, whose logits exist at once."""
    quantize, group, vocab = RECIPES[recipe], dist.group.WORLD, 297
    generator = torch.Generator().manual_seed(5)
    hidden, whole = (torch.randn(n, 140, generator=generator) / 4 for n in (24, vocab))
    target = torch.randint(vocab, (24,), generator=generator)
    target[:3] = -100
    for dtype, parallel in ((torch.float32, True), (torch.bfloat16, False)):
        x, w, tokens = hidden.to(dtype), our_part(whole.to(dtype), 0, 0.0), split(0) if parallel else same
        options = {"vocab_size": vocab, "sequence_parallel": parallel, "quantize": quantize}

        def results(
            loss: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, w: Tensor = w
        ) -> tuple[Tensor, Tensor, Tensor]:
            """The loss, and both gradients."""
            x, w, main_grad = leaf(x), leaf(w), torch.zeros_like(w, dtype=torch.float32)
            y = loss(x, w, main_grad)
            y.sum().backward()
            assert x.grad is not None
            return y.detach(), x.grad, main_grad

        def pair(x: Tensor, w: Tensor, main_grad: Tensor) -> Tensor:
            logits = column_linear(x, w, None, group, main_grad=main_grad, quantize=quantize)
            return vocab_cross_entropy(logits, target, group, vocab_size=vocab)

        def ours(
            x: Tensor, w: Tensor, main_grad: Tensor, reduction: str, chunk: int, options: Any = options
        ) -> Tensor:
            options = options | {"main_grad": main_grad, "reduction": reduction, "chunk_tokens": chunk}
            return linear_cross_entropy(x, w, target, group, **options)

        loss, dx, dw = results(pair, x)
        exact = [Oracle(quantize).linear(x, shard) for shard in whole_of((w, 0)).chunk(2)]
        truth = F.cross_entropy(torch.cat(exact, 1)[:, :vocab], target, reduction="none")
        assert relative_error(loss, truth) < BOUND[dtype]
        logprobs, _ = linear_logprobs(tokens(x), w, target, group, **options)
        assert torch.equal(logprobs, 0 - loss)
        for chunk, reduction in ((24, "none"), (24, "sum"), (7, "none")):
            found = results(partial(ours, reduction=reduction, chunk=chunk), tokens(x))
            theirs = [loss if reduction == "none" else loss.sum(), tokens(dx), dw]
            errors = [relative_error(a, b.double()) for a, b in zip(found, theirs, strict=True)]
            assert errors[0] < BOUND[torch.float32]
            if chunk == 24:
                assert errors[1:] == [0, 0]
            elif quantize.wgrad == "bf16":  # in fp8 scales of columns are those of a chunk
                assert max(errors) < BOUND[dtype]


def test_gradients_of_16_bits_are_rounded_once():
    """The gradient at a target whose p rounds to 1 is what p lacks to 1, and not 0."""
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.0]]).bfloat16()
    target = torch.tensor([[1, 1, 3]])
    options = cross_entropy.LossOptions("test", None, 0.0, -100)
    losses = cross_entropy.sharded_loss(options, 4, TensorParallel(None))
    _, known = losses.of_rows(logits, target)
    dlogits = losses.gradient(logits.clone(), known, torch.tensor([[1.0, 1.0, 0.0]]), in_place=True)
    exact = logits.double().softmax(1) * 2
    exact[0, 1] -= 2
    torch.testing.assert_close(dlogits.double(), exact, rtol=2**-8, atol=0)


VOCABULARY = 128256  # Llama 3's


def most_bytes(
    dtype: torch.dtype, needs: tuple[bool, bool], rows: int, chunk: int, features: int, entropy: bool, k: int
) -> int:
    """What a call and its backward allocate at most beside inputs, as docs/vocabulary.md has it."""
    size, scratch = dtype.itemsize, 4 * (cross_entropy.IN_CACHE // VOCABULARY) * VOCABULARY  # full rows
    logits, statistics = size * chunk * VOCABULARY, (8 + 3 * 4 + 24 * bool(k)) * rows
    mask = bool(k) * VOCABULARY * -(-chunk // head.MASKS)
    dhidden, dweight = needs[0] * size * rows * features, needs[1] * 4 * VOCABULARY * features
    while_computed = scratch * (entropy if size == 4 else 1 + entropy / 2)
    backward = dhidden + dweight + max(mask, while_computed) if any(needs) else 0
    return logits + statistics + max(scratch, mask, (2 * size + 8) * k * chunk, backward)


@pytest.mark.parametrize(
    ("dtype", "needs"),
    [
        (torch.float32, (False, False)),
        (torch.float32, (True, False)),
        (torch.float32, (True, True)),
        (torch.bfloat16, (True, True)),
    ],
)
@on_ranks(1)
def test_memory_is_that_of_one_chunk_by_a_formula(dtype, needs):
    rows, chunk, features, group = 12, 4, 2, dist.group.WORLD
    target = torch.arange(rows) * 9999
    for entropy, top_k in ((False, None), (True, None), (False, 50), (False, VOCABULARY // 2)):
        hidden, weight = (
            torch.randn(n, features, dtype=dtype).requires_grad_(need)
            for n, need in zip((rows, VOCABULARY), needs, strict=True)
        )
        with LiveBytes() as live:
            options = {"return_entropy": entropy, "top_k": top_k}
            found, entropies = linear_logprobs(hidden, weight, target, group, chunk_tokens=chunk, **options)
            if any(needs):
                (found.sum() + (entropies.sum() if entropy else 0)).backward()
        allowed = most_bytes(dtype, needs, rows, chunk, features, entropy, top_k or 0)
        found = live.peak - weight.nbytes - hidden.nbytes
        assert live.largest == chunk * VOCABULARY
        # but for a few numbers of a token
        assert abs(found - allowed) <= 32 * rows, (found, allowed, entropy, top_k)


@on_ranks(2)
def test_a_frozen_head_saves_nothing_and_a_trained_one_what_it_must():
    group, ids, rows = dist.group.WORLD, torch.arange(12), 12
    hidden, weight = torch.randn(rows, 6), torch.randn(7, 6)
    call = partial(linear_logprobs, target=ids, group=group, return_entropy=True, temperature=0.5)
    forbidden = AssertionError("nobody asks for gradients")
    with patch.object(head.PartialGradients, "add", side_effect=forbidden):
        found, entropy = call(hidden, weight)
        assert not found.requires_grad
        assert entropy is not None
        assert not entropy.requires_grad
    kept = saved_bytes(lambda h: call(h, weight)[0], hidden.clone().requires_grad_())
    assert kept == rows * (8 + 3 * 4) + weight.nbytes
    for need in (0, 1):
        leaves = [t.clone().requires_grad_(number == need) for number, t in enumerate((hidden, weight))]
        call(*leaves)[1].sum().backward()
        assert [each.grad is None for each in leaves] == [bool(need), not need]


@on_ranks(2)
def test_compiled_it_saves_and_computes_what_it_does_eagerly():
    torch.manual_seed(3)
    target = torch.randint(9, (16, 2))

    def both(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"temperature": 0.5, "return_entropy": True, "sequence_parallel": True, "top_k": 9}
        options["quantize"] = Recipe.rowwise()
        found, entropy = linear_logprobs(hidden, weight, target, dist.group.WORLD, **options)
        return found.sum() + entropy.sum()

    wrong = unlike_compiled(both, [[leaf(torch.randn(8, 6)), leaf(torch.randn(9, 6) + dist.get_rank())]])
    assert not wrong, wrong


@on_ranks(2)
def test_mistakes_are_errors_on_every_rank():
    x, w, ids = torch.randn(6, 8), torch.randn(8, 8), torch.arange(6)
    call: Callable[..., Any] = partial(linear_logprobs, group=dist.group.WORLD)
    for wrong in (0, -1.0, 1e-31, 1e31, 10**400, math.nan, math.inf, torch.ones(6)):
        words = "linear_logprobs: expected a temperature from 1e-30 to 1e+30, got"
        assert words in message_of(partial(call, x, w, ids, temperature=wrong))
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: call(x, w, ids[1:]),
            "expected target (6,), or one dimension more, for hidden (6, 8), got (5,)",
        ),
        (lambda: call(x, w, ids.view(1, 6)), "or one dimension more, for hidden (6, 8), got (1, 6)"),
        (lambda: call(x, w, ids + 16), "linear_logprobs: expected target from 0 to 15"),
        (lambda: call(x, w, ids.float()), "TypeError: linear_logprobs: expected target"),
        (lambda: call(x, w, ids, chunk_tokens=0), "linear_logprobs: expected chunk_tokens of at least 1"),
        (lambda: call(x, w.half(), ids), "linear_logprobs: expected one dtype"),
        (
            lambda: call(x.double(), w.double(), ids, quantize=Recipe.rowwise()),
            "TypeError: linear_logprobs: expected x in bfloat16, float16 or float32 with quantize",
        ),
        (lambda: call(x, w, ids, vocab_size=17), "linear_logprobs: expected a vocab_size from 1 to 16"),
        (lambda: call(x, w, ids, top_k=0), "linear_logprobs: expected top_k of at least 1, got 0"),
        (lambda: call(x, w, ids, top_k=True), "linear_logprobs: expected top_k of at least 1, got True"),
    ]
    for run, words in calls:
        assert words in message_of(run)


@on_ranks(1)
def test_entropies_need_no_target():
    """Also of rows that have none: nothing is ignored there."""
    group, x, w = dist.group.WORLD, torch.randn(3, 4), torch.randn(8, 4)
    _, expected = linear_logprobs(x, w, torch.zeros(3, 1, dtype=torch.long), group, return_entropy=True)
    none = torch.zeros(3, 0, dtype=torch.long)
    logprobs, entropy = linear_logprobs(x, w, none, group, return_entropy=True)
    assert logprobs.shape == (3, 0)
    assert torch.equal(entropy, expected)
