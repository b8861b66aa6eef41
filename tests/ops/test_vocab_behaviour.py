"""Ops over a vocabulary as citizens of PyTorch and of a group: compile, memory, mistakes, extreme values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.live_bytes import LiveBytes
from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import message_of, with_gradients
from tests.ops.parallel_cases import equal
from tests.ops.test_behaviour import saved_bytes
from tests.ops.test_parallel_citizens import OPCHECKS, unlike_compiled
from tests.ops.test_vocabulary import INTERPRETED, our_part
from tpkernels.dispatch import backends
from tpkernels.ops import LossMetrics, linear_cross_entropy, vocab_cross_entropy, vocab_embedding
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import name_of
from tpkernels.ops.vocab.head_chunks import PartialGradients

VOCAB, FEATURES = 14, 6
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])


def model(table: Tensor, weight: Tensor, ids: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Ids, through a table that ranks share, to a loss for each of them in two ways."""
    group = dist.group.WORLD
    parallel = options.get("sequence_parallel", False)
    x = vocab_embedding(ids, table, group, vocab_size=VOCAB, sequence_parallel=parallel)
    reduced = linear_cross_entropy(x, weight, target, group, vocab_size=VOCAB, **options)
    tokens = linear_cross_entropy(
        x, weight, target, group, vocab_size=VOCAB, reduction="none", label_smoothing=0.1, **options
    )
    if not parallel:
        logits = torch.nn.functional.linear(x, weight)
        tokens = tokens + vocab_cross_entropy(logits, target, group, vocab_size=VOCAB)
    return reduced + (tokens * torch.arange(float(tokens.numel())).view_as(tokens)).sum()


def operands(rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's parts of two tables, ids and targets."""
    generator = torch.Generator().manual_seed(seed)
    table, weight = (torch.randn(VOCAB, FEATURES, generator=generator) for _ in range(2))
    ids, target = (torch.randint(VOCAB, (rows, 3), generator=generator) for _ in range(2))
    return our_part(table, 0, 9.0), our_part(weight, 0, 9.0), ids, target


@on_ranks(1)
def test_meta_tensors_give_shapes():
    w, h = (torch.empty(n, FEATURES, device="meta", requires_grad=True) for n in (VOCAB, 5))
    ids, group = torch.empty(5, dtype=torch.int64, device="meta"), dist.group.WORLD
    results = [
        vocab_embedding(ids, w, group),
        vocab_cross_entropy(F.linear(h, w), ids, group, label_smoothing=0.1),
        linear_cross_entropy(h, w, ids, group),
        linear_cross_entropy(h, w, ids, group, reduction="none"),
    ]
    sum(result.sum() for result in results).backward()
    assert [result.shape for result in results] == [(5, FEATURES), (5,), (), (5,)]
    assert (w.grad.shape, h.grad.shape) == ((VOCAB, FEATURES), (5, FEATURES))


@BACKENDS
@on_ranks(1)
def test_strided_and_expanded_ids_and_transposed_tables_and_logits(backend):
    group, ids = dist.group.WORLD, torch.arange(24).view(6, 4) * 5 % 8
    table, logits = torch.randn(8, FEATURES), torch.randn(6, 4, 8)
    for view in (ids.t(), ids[::2, 1::2], ids[:, :1].expand(6, 4), ids[:, 1], ids.int()):
        rows = logits.transpose(0, 1) if view.shape == (4, 6) else logits[tuple(map(slice, view.shape))]
        rows = rows[:, 0] if view.ndim == 1 else rows
        with patch.object(backends, "backend", backend):
            found = vocab_embedding(view, table.t().contiguous().t(), group)
            losses = vocab_cross_entropy(rows, view, group)
        expected = F.cross_entropy(rows.reshape(-1, 8), view.long().reshape(-1), reduction="none")
        torch.testing.assert_close(found, table[view.long()], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(losses.flatten(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpointing_around_it(reentrant):
    table, weight, *others = operands()
    plain, recomputed = (
        with_gradients(lambda *t, call=call: call(*t, *others), [table, weight])
        for call in (model, partial(checkpoint, model, use_reentrant=reentrant))
    )
    assert equal(plain, recomputed)


def loss_of_rank() -> float:
    with torch.no_grad():
        return model(*operands()).item()


@on_ranks()
def test_infinite_huge_and_ignored_logits():
    whole = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5))
    target = torch.tensor([0, VOCAB - 1, 3, 5, -100, 2])
    whole[0] = -torch.inf
    whole[0, 0] = 7.0  # certain: all ids but one are masked
    whole[1, :7] = -torch.inf  # whole ranks are masked
    whole[2, 4] = 1e4
    whole[3, 5] = -torch.inf  # an impossible target
    whole[4] = torch.nan  # ignored
    whole[5] += 1e4  # shifted: the loss stays as it is
    ours = our_part(whole, 1, torch.inf).requires_grad_()
    loss = vocab_cross_entropy(ours, target, dist.group.WORLD, vocab_size=VOCAB)
    (grad,) = torch.autograd.grad(loss.sum(), ours)
    x = whole.double().requires_grad_()
    exact = F.cross_entropy(x, target, reduction="none")
    (exact_grad,) = torch.autograd.grad(exact.sum(), x)
    exact_grad[4] = 0
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), our_part(exact_grad, 1, 0.0), rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_a_batch_without_a_target_is_zero_and_not_nan():
    table, weight, _, target = operands()
    hidden = torch.randn(*target.shape, FEATURES, requires_grad=True)
    target, group = torch.full_like(target, 7), dist.group.WORLD
    weight.requires_grad_()
    terms = {"softcap": 2.0, "class_weight": torch.ones(VOCAB), "z_loss": 0.1, "label_smoothing": 0.1}
    for reduction, more in product(("mean", "sum", "none"), ({}, terms)):
        metrics = LossMetrics()
        options = {"ignore_index": 7, "reduction": reduction, "vocab_size": VOCAB, "metrics": metrics, **more}
        y = linear_cross_entropy(hidden, weight, target, group, **options)
        assert not any(t.any() for t in (y, *torch.autograd.grad(y.sum(), (hidden, weight))))
        assert not metrics.accuracy.any()
        assert metrics.z_loss is None or not metrics.z_loss.any()
    logits = torch.randn(*target.shape, len(table), requires_grad=True)
    y = vocab_cross_entropy(logits, target, group, ignore_index=7, label_smoothing=0.1)
    assert not any(t.any() for t in (y, *torch.autograd.grad(y.sum(), logits)))


@BACKENDS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@on_ranks()
def test_metrics_are_those_of_the_loss_and_ties_go_to_the_lowest_id(backend, reduction):
    """Logits are small integers, which every rank computes exactly."""
    generator = torch.Generator().manual_seed(3)
    hidden, whole = (torch.randint(-1, 2, shape, generator=generator).float() for shape in ((40, 3), (11, 3)))
    logits = hidden @ whole.t()
    best = logits.argmax(1)
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).any(), "no ties"
    equal_one = torch.where(logits == logits.amax(1, keepdim=True), torch.arange(11), -1).amax(1)
    target = torch.where(
        torch.arange(40) % 2 == 0, best, equal_one
    )  # the lowest and the highest of equal ids
    target[:4] = -100
    metrics = LossMetrics()
    options = {"reduction": reduction, "vocab_size": 11, "chunk_tokens": 7, "metrics": metrics}
    with patch.object(backends, "backend", backend):
        loss = linear_cross_entropy(
            hidden.requires_grad_(),
            our_part(whole, 0, 100.0),
            target,
            dist.group.WORLD,
            z_loss=0.5,
            **options,
        )
        plain = linear_cross_entropy(
            hidden, our_part(whole, 0, 100.0), target, dist.group.WORLD, reduction=reduction, vocab_size=11
        )
    counted = target != -100
    right, z = (best == target) & counted, 0.5 * logits.logsumexp(1).square() * counted
    if reduction != "none":
        right = right.sum() / counted.sum()
        z = z.sum() / (counted.sum() if reduction == "mean" else 1)
    torch.testing.assert_close(metrics.accuracy, right)
    torch.testing.assert_close(metrics.z_loss, z)
    torch.testing.assert_close(loss - plain, z, rtol=1e-4, atol=1e-5)
    assert not metrics.accuracy.requires_grad
    assert not metrics.z_loss.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@on_ranks(1)
def test_a_weighted_gradient_of_16_bits_is_rounded_once(smoothing):
    """Also at the target, where p rounds to 1."""
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.0]]).bfloat16()
    weight, target = torch.tensor([0.5, 1.0, 0.25, 1.0]), torch.tensor([1])
    own = logits.clone().requires_grad_()
    options = {"class_weight": weight, "z_loss": 1e-4, "label_smoothing": smoothing}
    vocab_cross_entropy(own, target, dist.group.WORLD, **options).sum().backward()
    exact = logits.double().requires_grad_()
    smoothed = {"weight": weight.double(), "label_smoothing": smoothing * 4 / 3}
    loss = F.cross_entropy(exact, target, reduction="sum", **smoothed) + 1e-4 * exact.logsumexp(1).square()
    loss.sum().backward()
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@on_ranks(1)
def test_class_weights_of_any_dtype_count_in_that_of_the_loss(dtype):
    logits, target = torch.randn(6, 8), torch.arange(6)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(8, 4)
    given = torch.rand(8).to(dtype)
    for call in (
        partial(vocab_cross_entropy, logits, target, dist.group.WORLD),
        partial(linear_cross_entropy, hidden, weight, target, dist.group.WORLD),
    ):
        found, right = (call(class_weight=w, label_smoothing=0.1) for w in (given, given.float()))
        assert found.dtype is torch.float32
        assert torch.equal(found, right)


@on_ranks(2)
def test_class_weights_that_differ_between_ranks_are_an_error():
    weight = torch.ones(16)
    weight[3] += dist.get_rank()
    with pytest.raises(ValueError, match=r"other data on the ranks .* class_weight \(16,\)"):
        vocab_cross_entropy(torch.randn(6, 8), torch.arange(6), dist.new_group(), class_weight=weight)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@on_ranks(2)
def test_compiled_terms_of_a_loss_are_those_of_eager_ones(reduction):
    torch.manual_seed(3)
    target, weights = torch.randint(VOCAB, (12,)), torch.rand(VOCAB)
    _, ours, *_ = operands()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        metrics = LossMetrics()
        options = {"class_weight": weights, "z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction}
        y = linear_cross_entropy(
            hidden,
            weight,
            target,
            dist.group.WORLD,
            bias_shard=bias,
            softcap=2.0,
            vocab_size=VOCAB,
            metrics=metrics,
            **options,
        )
        return y.sum() + metrics.accuracy.sum() + metrics.z_loss.sum()

    leaves = [t.requires_grad_() for t in (torch.randn(12, FEATURES), ours, torch.randn(len(ours)))]
    wrong = unlike_compiled(loss, [leaves])
    assert wrong == []


@on_ranks(2)
def test_only_gradients_that_are_asked_for_are_computed():
    table, weight, ids, target = operands()
    expected, *_ = with_gradients(lambda *t: model(*t, ids, target), [table, weight])
    forbidden = AssertionError("nobody asks for gradients")
    with torch.no_grad(), patch.object(PartialGradients, "add", side_effect=forbidden):
        assert model(table.requires_grad_(), weight.requires_grad_(), ids, target).equal(expected)
    weight.requires_grad_(False)
    hidden = torch.randn(*target.shape, FEATURES)
    results = []
    for needs in ((True, False), (False, True), (True, True)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((hidden, weight), needs, strict=True)]
        for reduction in ("mean", "none"):
            y = linear_cross_entropy(
                *leaves, target, dist.group.WORLD, reduction=reduction, vocab_size=VOCAB, chunk_tokens=5
            )
            y.sum().backward()
        results.append([leaf.grad for leaf in leaves])
    (dh, no_dw), (no_dh, dw), both = results
    assert no_dw is no_dh is None
    assert equal([dh, dw], both)


@BACKENDS
@on_ranks(2)
def test_logits_are_overwritten_if_that_is_allowed_and_autograd_knows(backend):
    logits, target = torch.randn(5, 8), torch.tensor([3, 0, 7, 9, 12])
    dlogits = []
    with patch.object(backends, "backend", backend):
        for overwrite in (False, True):
            own = logits.clone().requires_grad_() * 1
            y = vocab_cross_entropy(own, target, dist.group.WORLD, overwrite_logits=overwrite).sum()
            dlogits.append(torch.autograd.grad(y, own, retain_graph=True)[0])
        assert dlogits[1].data_ptr() == own.data_ptr()
        assert torch.equal(*dlogits)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, own)


@on_ranks(1)
def test_registered_operators_pass_opcheck():
    table, weight, ids, target = operands(4)
    flat, counted = ids.flatten(), target.flatten()
    hidden, logits, tokens = torch.randn(12, FEATURES), torch.randn(12, VOCAB), torch.rand(12) + 1
    operators, group = torch.ops.tpkernels, name_of(dist.group.WORLD)
    whole, split = (group, False, True, 0, ""), (group, True, True, 0, "")
    fp32, plain, weights = torch.float32, (None, 0.0, False), torch.rand(VOCAB)
    on_one = ("loss", VOCAB, 0.1, -100, None, 5, None, *plain, *whole)
    scaled = ("logprobs", VOCAB, 0.0, -100, 0.7, 5, 3, *plain, *whole[:-1], "rowwise")
    with_all = ("loss", VOCAB, 0.1, -100, None, 5, None, 3.0, 0.1, True, *whole)
    pairs, known = torch.stack([counted, flat], 1), (counted, tokens, tokens, None, None, None)
    head, biased = (hidden, weight, None), (hidden, weight, torch.randn(VOCAB))
    calls: dict[str, list[tuple[Any, ...]]] = {
        "vocab_embedding": [(flat, table, VOCAB, *whole), (flat, table, VOCAB, *split)],
        "vocab_embedding_backward": [(hidden, flat, VOCAB, fp32, 3, *split)],
        "vocab_cross_entropy": [(logits, counted, weights, *on_one)],
        "vocab_cross_entropy_backward": [(logits, tokens, weights, *known, *on_one)],
        "linear_cross_entropy": [
            (*biased, counted, weights, True, False, True, "mean", *with_all),
            *(
                (*head, counted, None, *needs, False, "mean", *on_one)
                for needs in ((True, True), (False, True), (True, False), (False, False))
            ),
        ],
        "linear_cross_entropy_backward": [
            (hidden, tokens[0], fp32, "loss", *part) for part in (whole, split)
        ],
        "linear_token_losses": [
            (*biased, counted, weights, *with_all),
            (*head, pairs, None, *scaled),
        ],
        "linear_token_losses_backward": [
            (tokens, None, *biased, weights, True, True, True, *known, *with_all),
            *(
                (tokens, None, *head, None, *needs, False, *known, *on_one)
                for needs in ((True, True), (False, True), (True, False))
            ),
        ],
    }
    for name, (first, *others) in calls.items():
        opcheck(getattr(operators, name).default, first)
        for arguments in others:  # which `test_compiled_ops_...` compiles
            opcheck(getattr(operators, name).default, arguments, test_utils=OPCHECKS[:2])


@on_ranks(1)
def test_autocast_casts_products_and_no_loss():
    table, weight, ids, target = operands()
    hidden = torch.randn(*target.shape, FEATURES, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = vocab_embedding(ids, table, dist.group.WORLD, vocab_size=VOCAB)
        logits = F.linear(hidden, weight)
        loss = vocab_cross_entropy(logits, target, dist.group.WORLD, vocab_size=VOCAB)
        head = linear_cross_entropy(hidden, weight, target, dist.group.WORLD, vocab_size=VOCAB)
    head.backward()
    torch.testing.assert_close(head, loss.mean(), rtol=1e-2, atol=0)
    assert [t.dtype for t in (x, loss, head, hidden.grad)] == [torch.float32] * 4


@on_ranks(2)
def test_targets_that_differ_are_an_error_on_every_rank_in_debug_mode():
    """Another target, or one that is no id."""
    with patch.object(parallel, "debug", True):
        for wrong, words in (
            (5, "other data on the ranks of a tensor group"),
            (99, "on rank 1: expected target"),
        ):
            target = torch.arange(6)
            target[3] = wrong if dist.get_rank() == 1 else 3
            with pytest.raises(ValueError, match=words):
                vocab_cross_entropy(torch.randn(6, 8), target, dist.new_group())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("call", [1, 2, 5])
@on_ranks(2)
def test_a_rank_that_reads_a_batch_of_its_own_is_told_of(call, sequence_parallel):
    """At once by a look, in the first call and in the second; in the fifth by what is noted."""
    looked = call in (1, 2)
    words = r"^vocab_embedding: other data on the ranks of a tensor group: give each .* rank 0 has ids \(6,"
    words = words if looked else "ranks have left the common order of calls: before call"
    group, weight = dist.new_group(), torch.randn(8, 4)
    for number in range(1, call + 1):
        ids = torch.arange(6) + (dist.get_rank() if number >= call else 0)
        told = pytest.raises(ValueError if looked else RuntimeError, match=words)
        with told if number == call else nullcontext():
            vocab_embedding(ids, weight, group, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("terms", ["plain", "all_terms"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@on_ranks(1)
def test_head_holds_a_chunk_of_logits_and_never_all(reduction, terms):
    tokens, vocab, chunk, group = 1024, 600, 64, dist.group.WORLD
    more = {"softcap": 2.0, "class_weight": torch.rand(vocab), "z_loss": 0.1, "label_smoothing": 0.1}
    hidden, weight = torch.randn(tokens, FEATURES), torch.randn(vocab, FEATURES)
    target = torch.randint(vocab, (tokens,))

    def chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"reduction": reduction, "chunk_tokens": chunk, **(more if terms == "all_terms" else {})}
        return linear_cross_entropy(hidden, weight, target, group, **options)

    def pair(hidden: Tensor, weight: Tensor) -> Tensor:
        return vocab_cross_entropy(F.linear(hidden, weight), target, group)

    def measured(function: Callable[..., Tensor]) -> LiveBytes:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with LiveBytes() as live:
            function(*leaves).sum().backward()
        return live

    ours, both = measured(chunked), measured(pair)
    assert ours.largest == chunk * vocab
    assert both.largest == tokens * vocab  # else the measurement sees nothing
    # beside the logits their copies in the oracle, and what is as large as hidden or weight
    assert ours.peak < 6 * 4 * chunk * vocab + 4 * 12 * FEATURES * (tokens + vocab)
    assert ours.peak < both.peak / 4


def test_all_ranks_have_the_same_loss(ranks4):
    losses = ranks4.run(loss_of_rank)
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize(("world", "sequence_parallel"), [("ranks1", False), ("ranks2", True)])
@on_ranks()
def test_compiled_ops_save_and_compute_what_eager_ones_do(sequence_parallel):
    """Whatever is frozen, for any number of rows."""
    table, weight, ids, target = operands(4)
    group, ids, target = dist.group.WORLD, ids.flatten(), target.flatten()
    rows = ids.numel() // (group.size() if sequence_parallel else 1)
    hidden, logits = torch.randn(rows, FEATURES), torch.randn(12, len(weight))
    options = {"sequence_parallel": sequence_parallel, "vocab_size": VOCAB}
    several = unlike_compiled(
        partial(model, sequence_parallel=sequence_parallel),
        [[t.requires_grad_() for t in operands(n, n)[:2]] + list(operands(n, n)[2:]) for n in (8, 12)],
    )
    wrong = [line for line in several if not line.startswith("saved bytes")]  # a graph saves ids once for all
    if sequence_parallel:
        table.requires_grad_()
        wrong += unlike_compiled(lambda t: vocab_embedding(ids, t, group, **options), [[table]])
    else:  # the loss knows of no tokens that are split
        logits.requires_grad_()
        overwriting = partial(vocab_cross_entropy, overwrite_logits=True)
        wrong += unlike_compiled(lambda x: overwriting(x * 1, target, group), [[logits]])
    reductions = {"mean": (False, True), "none": (True, False)}
    if not sequence_parallel:
        reductions = {"mean": (True, False), "none": (False, True), "sum": (False, False)}
    for reduction, needs in reductions.items():
        leaves = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight), needs, strict=True)]
        wrong += unlike_compiled(
            lambda h, w, r=reduction: linear_cross_entropy(h, w, target, group, reduction=r, **options).sum(),
            [leaves],
        )
    assert wrong == []


@on_ranks(1)
def test_as_few_bytes_are_kept_for_backward_as_can_be():
    group, ids = dist.group.WORLD, torch.arange(12)
    hidden, weight = torch.randn(12, FEATURES), torch.randn(VOCAB, FEATURES)
    of_ids, of_losses, of_gradients = 12 * 8, 12 * 4, (12 + VOCAB) * FEATURES * 4
    calls: list[tuple[Callable[..., Tensor], list[Tensor], int]] = [
        (lambda table: vocab_embedding(ids, table, group), [weight], of_ids),
        (lambda x: vocab_cross_entropy(x, ids, group), [torch.randn(12, VOCAB)], of_ids + 2 * of_losses),
        (lambda x, w: linear_cross_entropy(x, w, ids, group), [hidden, weight], of_gradients + 4),
        (
            lambda x, w: linear_cross_entropy(x, w, ids, group, reduction="none"),
            [hidden, weight],
            of_ids + 2 * of_losses,
        ),
    ]
    for function, given, expected in calls:
        assert saved_bytes(function, *(t.requires_grad_() for t in given)) == expected


@on_ranks(2)
def test_mistakes_are_errors_on_every_rank():
    group, ranks = dist.group.WORLD, dist.get_world_size()
    x, w, ids = torch.randn(6, 8), torch.randn(8, 8), torch.arange(6)
    whole = 8 * ranks
    loss, head = partial(vocab_cross_entropy, group=group), partial(linear_cross_entropy, group=group)
    embedding = partial(vocab_embedding, group=group)
    parallel_head = partial(head, sequence_parallel=True)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: loss(x, ids + whole), "vocab_cross_entropy: expected target from 0 to 15"),
        (lambda: loss(x, ids - 1), "to 15, or -100 to be ignored, got -1"),
        (lambda: loss(x, ids + 10, vocab_size=whole - 1), "to 14, or -100 to be ignored, got 15"),
        (lambda: embedding(ids + whole, w), "vocab_embedding: expected ids from 0 to 15, got 16"),
        (lambda: embedding(ids - 1, w), "expected ids from 0 to 15, got -1"),
        (lambda: head(x, w, ids + whole), "linear_cross_entropy: expected target from 0"),
        (lambda: loss(x, ids[1:]), "for each row of logits_shard (6, 8), got (5,)"),
        (lambda: loss(x, ids.float()), "TypeError: vocab_cross_entropy: expected target"),
        (lambda: loss(x.long(), ids), "expected floating-point logits_shard"),
        (lambda: loss(x, ids, label_smoothing=1.0), "from 0 to less than 1, got 1.0"),
        (lambda: loss(x, 0 * ids, label_smoothing=0.1, vocab_size=1), "no label_smoothing with one id"),
        (lambda: loss(x, ids, vocab_size=whole + 1), "from 1 to 16, what 2 ranks of 8 hold, got 17"),
        (lambda: loss(x.requires_grad_(), ids, overwrite_logits=True), "no leaf with"),
        (lambda: loss(x.detach()[:1].expand(6, 8), ids, overwrite_logits=True), "memory of their own"),
        (lambda: vocab_cross_entropy(x, ids, None), "expected a process group"),
        (lambda: embedding(ids[:5], w, sequence_parallel=True), "divisible by the 2 ranks"),
        (lambda: embedding(ids, w, padding_idx=whole), "padding_idx from -16 to 15, got 16"),
        (lambda: head(x, w, ids[1:]), "expected target (6,) for hidden (6, 8), got (5,)"),
        (lambda: parallel_head(x, w, ids), "target (12,) for hidden (6, 8) of each of 2 ranks, got (6,)"),
        (lambda: head(x, w, ids, reduction="avg"), "reduction of mean, sum, none; got 'avg'"),
        (lambda: head(x, w, ids, chunk_tokens=0), "chunk_tokens of at least 1, got 0"),
        (lambda: head(x, w.half(), ids), "expected one dtype"),
        (lambda: head(x, w, ids, bias_shard=x[0, :5]), "expected bias_shard (8,) for weight_shard (8, 8)"),
        (lambda: head(x, w, ids, softcap=0.0), "softcap above 0, got 0.0; None leaves logits as they are"),
        (lambda: head(x, w, ids, softcap=float("nan")), "softcap above 0, got nan"),
        (lambda: loss(x, ids, z_loss=-0.1), "z_loss, a coefficient, of at least 0, got -0.1"),
        (lambda: loss(x, ids, class_weight=torch.ones(8)), "class_weight (16,), one for each id of the full"),
        (lambda: head(x, w, ids, class_weight=torch.ones(16).long()), "got (16,) in torch.int64"),
        (lambda: loss(x, ids, class_weight=torch.ones(16, device="meta")), "class_weight on cpu like the"),
        (
            lambda: loss(x, ids, class_weight=torch.ones(16, requires_grad=True)),
            "class_weight without a gradient, which it does not get; detach it",
        ),
    ]
    for call, words in calls:
        assert words in message_of(call)


@on_ranks(2)
def test_embeddings_of_no_features_have_no_features():
    weight = torch.ones(4, 0, requires_grad=True)
    y = vocab_embedding(torch.tensor([1, 6]), weight, dist.group.WORLD)
    assert y.shape == (2, 0)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (4, 0)
