"""Ops over a vocabulary as citizens of PyTorch and of a group: compile, memory, mistakes, extreme values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.ops.parallel_behaviour import message_of
from tests.ops.test_behaviour import saved_bytes
from tests.ops.test_parallel_citizens import unlike_compiled
from tests.ops.test_vocabulary import computing_by, our_part
from tpkernels.ops import linear_cross_entropy, vocab_cross_entropy, vocab_embedding
from tpkernels.ops.tensor_parallel import parallel
from tpkernels.ops.tensor_parallel.parallel import name_of
from tpkernels.ops.vocab import chunked_head

VOCAB, FEATURES = 14, 6


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


def with_gradients(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    table, weight, *rest = arguments
    leaves = [t.clone().requires_grad_() for t in (table, weight)]
    y = function(*leaves, *rest, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_meta() -> list[tuple[int, ...]]:
    """Shapes of results and gradients without data."""
    w, h = (torch.empty(n, FEATURES, device="meta", requires_grad=True) for n in (VOCAB, 5))
    ids, group = torch.empty(5, dtype=torch.int64, device="meta"), dist.group.WORLD
    results = [
        vocab_embedding(ids, w, group),
        vocab_cross_entropy(F.linear(h, w), ids, group, label_smoothing=0.1),
        linear_cross_entropy(h, w, ids, group),
        linear_cross_entropy(h, w, ids, group, reduction="none"),
    ]
    sum(result.sum() for result in results).backward()
    return [tuple(t.shape) for t in (*results, w.grad, h.grad)]


def awkward_layouts() -> bool:
    """Strided and expanded ids, transposed tables and logits, int32: the numbers of tidy ones."""
    group, ids = dist.group.WORLD, torch.arange(24).view(6, 4) * 5 % 8
    table, logits = torch.randn(8, FEATURES), torch.randn(6, 4, 8)
    same = []
    for view in (ids.t(), ids[::2, 1::2], ids[:, :1].expand(6, 4), ids[:, 1], ids.int()):
        rows = logits.transpose(0, 1) if view.shape == (4, 6) else logits[tuple(map(slice, view.shape))]
        rows = rows[:, 0] if view.ndim == 1 else rows
        for awkward, tidy in (
            (vocab_embedding(view, table.t().contiguous().t(), group), table[view.long()]),
            (
                vocab_cross_entropy(rows, view, group),
                F.cross_entropy(rows.reshape(-1, 8), view.long().reshape(-1), reduction="none"),
            ),
        ):
            same.append(torch.allclose(awkward.reshape(tidy.shape), tidy, rtol=1e-6, atol=1e-6))
    return all(same)


def checkpointed_equals_plain(reentrant: bool) -> bool:
    def recomputed(*arguments: Tensor) -> Tensor:
        return checkpoint(model, *arguments, use_reentrant=reentrant)

    leaves = [t.requires_grad_() for t in operands()[:2]]
    y = recomputed(*leaves, *operands()[2:])
    y.backward()
    return equal(with_gradients(model, *operands()), [y.detach(), *(leaf.grad for leaf in leaves)])


def loss_of_rank() -> float:
    with torch.no_grad():
        return model(*operands()).item()


def awkward_logits() -> list[str]:
    """What is wrong with losses and gradients of rows with infinite, huge or ignored entries."""
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
    wrong = []
    if not torch.allclose(loss.double(), exact, rtol=1e-6, atol=1e-6):
        wrong.append(f"loss {loss.tolist()}, not {exact.tolist()}")
    if not torch.allclose(grad.double(), our_part(exact_grad, 1, 0.0), rtol=1e-5, atol=1e-7):
        wrong.append(f"gradient {grad.tolist()}")
    return wrong


def all_ignored() -> list[Tensor]:
    """Loss and gradients of a batch without a target, by every op."""
    table, weight, _, target = operands()
    hidden = torch.randn(*target.shape, FEATURES, requires_grad=True)
    target = torch.full_like(target, 7)
    weight.requires_grad_()
    found: list[Tensor] = []
    for reduction in ("mean", "sum", "none"):
        y = linear_cross_entropy(
            hidden, weight, target, dist.group.WORLD, ignore_index=7, reduction=reduction, vocab_size=VOCAB
        )
        found += [y, *torch.autograd.grad(y.sum(), (hidden, weight))]
    logits = torch.randn(*target.shape, len(table), requires_grad=True)
    y = vocab_cross_entropy(logits, target, dist.group.WORLD, ignore_index=7, label_smoothing=0.1)
    return [t.detach() for t in (*found, y, *torch.autograd.grad(y.sum(), logits))]


def frozen_and_forward_only() -> bool:
    """Only what is asked for is computed, and nothing is asked of communication in backward without it."""
    table, weight, ids, target = operands()
    expected = with_gradients(model, table, weight, ids, target)

    def forbidden(*_: Any) -> None:
        raise AssertionError("nobody asks for gradients")

    original, chunked_head.PartialGradients.add = chunked_head.PartialGradients.add, forbidden
    try:
        with torch.no_grad():
            alone = model(table.requires_grad_(), weight.requires_grad_(), ids, target)
    finally:
        chunked_head.PartialGradients.add = original
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
    (dh, _), (_, dw), both = results
    return (
        torch.equal(alone, expected[0]) and equal([dh, dw], both) and results[0][1] is results[1][0] is None
    )


def overwriting() -> tuple[bool, bool, str]:
    """Whether the gradient lies where the logits were and is right; what a second backward says."""
    logits, target = torch.randn(5, 8), torch.tensor([3, 0, 7, 9, 12])
    dlogits = []
    for overwrite in (False, True):
        x = logits.clone().requires_grad_()
        own = x * 1
        y = vocab_cross_entropy(own, target, dist.group.WORLD, overwrite_logits=overwrite).sum()
        dlogits.append(torch.autograd.grad(y, own, retain_graph=True)[0])
    there = dlogits[1].data_ptr() == own.data_ptr()
    return there, torch.equal(*dlogits), message_of(lambda: torch.autograd.grad(y, own))


def pass_opcheck() -> None:
    table, weight, ids, target = operands(4)
    flat, counted = ids.flatten(), target.flatten()
    hidden, logits, tokens = torch.randn(12, FEATURES), torch.randn(12, VOCAB), torch.rand(12) + 1
    operators, group = torch.ops.tpkernels, name_of(dist.group.WORLD)
    loss = (group, VOCAB, 0.1, -100, False, 5)
    calls: dict[str, list[tuple[Any, ...]]] = {
        "vocab_embedding": [(flat, table, group, VOCAB, False), (flat, table, group, VOCAB, True)],
        "vocab_embedding_backward": [(hidden, flat, VOCAB, torch.float32, group, True, 3)],
        "vocab_cross_entropy": [(logits, counted, *loss)],
        "vocab_cross_entropy_backward": [(logits, counted, tokens, tokens, tokens, *loss)],
        "linear_cross_entropy": [
            (hidden, weight, counted, *needs, "mean", *loss)
            for needs in ((True, True), (False, True), (True, False), (False, False))
        ],
        "linear_cross_entropy_backward": [
            (tokens[0], *gradients, torch.float32, torch.float32, *loss)
            for gradients in ((hidden, weight), (None, weight), (hidden, None))
        ],
        "linear_token_losses": [(hidden, weight, counted, *loss)],
        "linear_token_losses_backward": [
            (tokens, hidden, weight, counted, tokens, tokens, *needs, torch.float32, *loss)
            for needs in ((True, True), (False, True), (True, False))
        ],
    }
    for name, ways in calls.items():
        for arguments in ways:
            opcheck(getattr(operators, name).default, arguments)


def autocast_dtypes() -> list[torch.dtype]:
    """Of what each op returns in a bfloat16 region, for fp32 inputs, and of the gradient of hidden."""
    table, weight, ids, target = operands()
    hidden = torch.randn(*target.shape, FEATURES, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = vocab_embedding(ids, table, dist.group.WORLD, vocab_size=VOCAB)
        logits = F.linear(hidden, weight)
        loss = vocab_cross_entropy(logits, target, dist.group.WORLD, vocab_size=VOCAB)
        head = linear_cross_entropy(hidden, weight, target, dist.group.WORLD, vocab_size=VOCAB)
    head.backward()
    assert torch.allclose(head, loss.mean(), rtol=1e-2)
    return [x.dtype, loss.dtype, head.dtype, hidden.grad.dtype]


def one_rank_has_other_targets(wrong: int) -> str:
    """In debug mode, with another target, or one that is no id, on rank 1."""
    parallel.debug = True
    try:
        target = torch.arange(6)
        target[3] = wrong if dist.get_rank() == 1 else 3
        return message_of(lambda: vocab_cross_entropy(torch.randn(6, 8), target, dist.group.WORLD))
    finally:
        parallel.debug = False


def other_ids_from(call: int, sequence_parallel: bool) -> tuple[int, str]:
    """A rank reads a batch of its own from some call on: when it is told, and what."""
    group = dist.new_group()
    weight = torch.randn(8, 4)
    for number in range(1, 20):
        ids = torch.arange(6) + (dist.get_rank() if number >= call else 0)
        said = message_of(partial(vocab_embedding, ids, weight, group, sequence_parallel=sequence_parallel))
        if "disagree" in said:
            return number, said
    return 0, ""


class LiveBytes(TorchDispatchMode):
    """The most elements that any tensor made inside has, and the most bytes that live at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._storages: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self.largest = max(self.largest, result.numel())
                self._storages.add(result.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return results


def peak_of_head(reduction: str, tokens: int, vocab: int, chunk: int) -> dict[str, tuple[int, int]]:
    """(largest tensor in elements, peak in bytes) of the head by chunks, and of the pair of ops."""
    hidden, weight = torch.randn(tokens, FEATURES), torch.randn(vocab, FEATURES)
    target = torch.randint(vocab, (tokens,))
    group, found = dist.group.WORLD, {}

    def chunked(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, target, group, reduction=reduction, chunk_tokens=chunk)

    def pair(hidden: Tensor, weight: Tensor) -> Tensor:
        return vocab_cross_entropy(F.linear(hidden, weight), target, group)

    for name, function in (("chunked", chunked), ("pair", pair)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with LiveBytes() as live:
            function(*leaves).sum().backward()
        found[name] = live.largest, live.peak
    return found


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks compute on the CPU, where kernels run in the interpreter only"
)
BACKENDS = pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=INTERPRETED)])


def test_all_ranks_have_the_same_loss(ranks4):
    losses = ranks4.run(loss_of_rank)
    assert losses == [losses[0]] * 4


def test_infinite_huge_and_ignored_logits(ranks):
    for wrong in ranks.run(awkward_logits):
        assert not wrong


def test_nothing_to_learn_from_is_zero_and_not_nan(ranks2):
    for found in ranks2.run(all_ignored):
        assert not any(t.any() for t in found)


def test_only_what_is_asked_for_is_computed(ranks2):
    assert all(ranks2.run(frozen_and_forward_only))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_it(ranks2, reentrant):
    assert all(ranks2.run(checkpointed_equals_plain, reentrant))


def unlike_compiled_ops(sequence_parallel: bool) -> list[str]:
    """Which ops compute or keep something else when compiled, whatever is frozen, for any number of rows."""
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
    wrong += unlike_compiled(lambda t: vocab_embedding(ids, t, group, **options), [[table.requires_grad_()]])
    wrong += unlike_compiled(  # which knows of no tokens that are split
        lambda x: vocab_cross_entropy(x * 1, target, group, overwrite_logits=sequence_parallel),
        [[logits.requires_grad_()]],
    )
    reductions = {"mean": (False, True), "none": (True, False)}
    if not sequence_parallel:
        reductions = {"mean": (True, False), "none": (False, True), "sum": (False, False)}
    for reduction, needs in reductions.items():
        leaves = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight), needs, strict=True)]
        wrong += unlike_compiled(
            lambda h, w, r=reduction: linear_cross_entropy(h, w, target, group, reduction=r, **options).sum(),
            [leaves],
        )
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_compiled_ops_save_and_compute_what_eager_ones_do(ranks2, sequence_parallel):
    assert ranks2.run(unlike_compiled_ops, sequence_parallel) == [[], []]


def bytes_saved() -> dict[str, int]:
    """For VOCAB ids or columns and 12 tokens."""
    group, ids = dist.group.WORLD, torch.arange(12)
    hidden, weight = torch.randn(12, FEATURES), torch.randn(VOCAB, FEATURES)
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "embedding": (lambda table: vocab_embedding(ids, table, group), [weight]),
        "cross_entropy": (lambda x: vocab_cross_entropy(x, ids, group), [torch.randn(12, VOCAB)]),
        "mean": (lambda x, w: linear_cross_entropy(x, w, ids, group), [hidden, weight]),
        "none": (lambda x, w: linear_cross_entropy(x, w, ids, group, reduction="none"), [hidden, weight]),
    }
    return {name: saved_bytes(f, *(t.requires_grad_() for t in given)) for name, (f, given) in calls.items()}


def test_as_few_bytes_are_kept_for_backward_as_can_be(ranks1):
    ids, losses, gradients = 12 * 8, 12 * 4, (12 + VOCAB) * FEATURES * 4
    assert ranks1.run(bytes_saved) == [
        {"embedding": ids, "cross_entropy": ids + 2 * losses, "mean": gradients + 4, "none": ids + 2 * losses}
    ]


def test_meta_tensors_give_shapes(ranks1):
    ((*results, dw, dh),) = ranks1.run(on_meta)
    assert results == [(5, FEATURES), (5,), (), (5,)]
    assert (dw, dh) == ((VOCAB, FEATURES), (5, FEATURES))


@BACKENDS
def test_layouts_are_any(ranks1, backend):
    assert all(ranks1.run(computing_by, backend, awkward_layouts))


def test_registered_operators_pass_opcheck(ranks1):
    ranks1.run(pass_opcheck, timeout=180)


def test_autocast_casts_products_and_no_loss(ranks1):
    assert ranks1.run(autocast_dtypes) == [[torch.float32] * 4]


@BACKENDS
def test_logits_are_overwritten_if_that_is_allowed_and_autograd_knows(ranks2, backend):
    for there, same, message in ranks2.run(computing_by, backend, overwriting):
        assert there
        assert same
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_head_holds_a_chunk_of_logits_and_never_all(ranks1, reduction):
    tokens, vocab, chunk = 1024, 600, 64
    (found,) = ranks1.run(peak_of_head, reduction, tokens, vocab, chunk)
    (largest, peak), (pair_largest, pair_peak) = found["chunked"], found["pair"]
    assert largest == chunk * vocab
    assert pair_largest == tokens * vocab  # else the measurement sees nothing
    # beside the logits their copies in the oracle, and what is as large as hidden or weight
    assert peak < 6 * 4 * chunk * vocab + 4 * 12 * FEATURES * (tokens + vocab)
    assert peak < pair_peak / 4


def answered_mistakes() -> dict[str, tuple[str, str]]:
    """Of each mistake, what is said and what is to be said."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    x, w, ids = torch.randn(6, 8), torch.randn(8, 8), torch.arange(6)
    whole = 8 * ranks
    loss, head = partial(vocab_cross_entropy, group=group), partial(linear_cross_entropy, group=group)
    embedding = partial(vocab_embedding, group=group)
    parallel_head = partial(head, sequence_parallel=True)
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "past the end": (lambda: loss(x, ids + whole), "vocab_cross_entropy: expected target from 0 to 15"),
        "negative target": (lambda: loss(x, ids - 1), "to 15, or -100 to be ignored, got -1"),
        "padding": (lambda: loss(x, ids + 10, vocab_size=whole - 1), "to 14, or -100 to be ignored, got 15"),
        "id": (lambda: embedding(ids + whole, w), "vocab_embedding: expected ids from 0 to 15, got 16"),
        "negative id": (lambda: embedding(ids - 1, w), "expected ids from 0 to 15, got -1"),
        "target of head": (lambda: head(x, w, ids + whole), "linear_cross_entropy: expected target from 0"),
        "target shape": (lambda: loss(x, ids[1:]), "for each row of logits_shard (6, 8), got (5,)"),
        "target dtype": (lambda: loss(x, ids.float()), "TypeError: vocab_cross_entropy: expected target"),
        "integer logits": (lambda: loss(x.long(), ids), "expected floating-point logits_shard"),
        "smoothing": (lambda: loss(x, ids, label_smoothing=1.0), "from 0 to less than 1, got 1.0"),
        "smoothing one id": (
            lambda: loss(x, 0 * ids, label_smoothing=0.1, vocab_size=1), "no label_smoothing with one id"
        ),
        "vocabulary": (
            lambda: loss(x, ids, vocab_size=whole + 1), "from 1 to 16, what 2 ranks of 8 hold, got 17"
        ),
        "leaf": (lambda: loss(x.requires_grad_(), ids, overwrite_logits=True), "no leaf with"),
        "expanded": (
            lambda: loss(x.detach()[:1].expand(6, 8), ids, overwrite_logits=True), "memory of their own"
        ),
        "no group": (lambda: vocab_cross_entropy(x, ids, None), "expected a process group"),
        "ragged tokens": (lambda: embedding(ids[:5], w, sequence_parallel=True), "divisible by the 2 ranks"),
        "padding_idx": (lambda: embedding(ids, w, padding_idx=whole), "padding_idx from -16 to 15, got 16"),
        "head shapes": (lambda: head(x, w, ids[1:]), "expected target (6,) for hidden (6, 8), got (5,)"),
        "head target of a shard": (
            lambda: parallel_head(x, w, ids), "target (12,) for hidden (6, 8) of each of 2 ranks, got (6,)"
        ),
        "reduction": (lambda: head(x, w, ids, reduction="avg"), "reduction of mean, sum, none; got 'avg'"),
        "chunk": (lambda: head(x, w, ids, chunk_tokens=0), "chunk_tokens of at least 1, got 0"),
        "head dtype": (lambda: head(x, w.half(), ids), "expected one dtype"),
    }  # fmt: skip
    return {name: (message_of(call), words) for name, (call, words) in calls.items()}


def test_mistakes_are_errors_on_every_rank(ranks2):
    for answers in ranks2.run(answered_mistakes):
        for name, (said, words) in answers.items():
            assert words in said, name


@pytest.mark.parametrize(
    ("wrong", "words"), [(5, "ranks disagree on tensor 0"), (99, "on rank 1: expected target")]
)
def test_targets_that_differ_are_an_error_on_every_rank_in_debug_mode(ranks2, wrong, words):
    for message in ranks2.run(one_rank_has_other_targets, wrong):
        assert words in message


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("call", "told"), [(1, 1), (2, 2), (5, 8)])
def test_a_rank_that_reads_a_batch_of_its_own_is_told_of(ranks2, call, told, sequence_parallel):
    for number, message in ranks2.run(other_ids_from, call, sequence_parallel):
        assert number == told
        assert "vocab_embedding: ranks disagree on tensor 0: rank 0 has ids (6,) with checksum" in message
