"""What ranks run in tests of how ops over a vocabulary behave, beside the numbers that they compute."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ops.parallel_behaviour import message_of
from tests.ops.vocab_cases import computed_by, our_part
from tpkernels.comm.transports import rows as rows_in_flight
from tpkernels.comm.transports.c10d import Transfers
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


def compiled_equals_eager(sequence_parallel: bool) -> list[bool]:
    """Whether each number of rows gives the same loss and gradients, compiled once for all."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    same = []
    for rows in (8, 12, 20):
        results = [
            with_gradients(function, *operands(rows, seed=rows), sequence_parallel=sequence_parallel)
            for function in (model, compiled)
        ]
        same.append(equal(*results))
    return same


def compiled_with_frozen_operands() -> list[bool]:
    """Whether each combination of required gradients gives what eager gives, and no more."""
    _, weight, _, target = operands()
    hidden = torch.randn(*target.shape, FEATURES)
    same = []
    for reduction in ("mean", "none"):

        def loss(hidden: Tensor, weight: Tensor, reduction: str = reduction) -> Tensor:
            group = dist.group.WORLD
            return linear_cross_entropy(hidden, weight, target, group, reduction=reduction).sum()

        for needs in ((True, False), (False, True), (False, False)):
            torch._dynamo.reset()
            grads = []
            for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
                leaves = [t.clone().requires_grad_(n) for t, n in zip((hidden, weight), needs, strict=True)]
                y = function(*leaves)
                grads.append([y.detach()])
                if any(needs):
                    y.backward()
                    grads[-1] += [leaf.grad for leaf in leaves if leaf.grad is not None]
            same.append(len(grads[0]) == 1 + sum(needs) and equal(*grads))
    return same


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


def awkward_layouts(backend: str) -> bool:
    with computed_by(backend):
        return _awkward_layouts()


def _awkward_layouts() -> bool:
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


def repeats_are_equal() -> bool:
    return equal(with_gradients(model, *operands(40)), with_gradients(model, *operands(40)))


def losses_of_rank(smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss of each token, to be compared between ranks, and by Megatron's formula on the whole logits."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(9, VOCAB, generator=generator)
    target = torch.randint(VOCAB, (9,), generator=generator)
    loss = vocab_cross_entropy(
        our_part(whole, 1, 50.0), target, dist.group.WORLD, label_smoothing=smoothing, vocab_size=VOCAB
    )
    log_p = whole.double() - whole.double().exp().sum(1, keepdim=True).log()
    given_away = smoothing * VOCAB / (VOCAB - 1)
    by_hand = -(1 - given_away) * log_p.gather(1, target[:, None])[:, 0] - given_away * log_p.mean(1)
    return loss, by_hand


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


def overwriting(backend: str) -> tuple[bool, bool, str]:
    """Whether the gradient lies where the logits were and is right; what a second backward says."""
    with computed_by(backend):
        return _overwriting()


def compiled_with_overwriting() -> bool:
    """Whether compiled code takes `overwrite_logits`, whose gradients are those without."""
    torch._dynamo.reset()
    x, target = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)), torch.arange(6)
    gradients = []
    for overwrite in (False, True):
        own = x.clone().requires_grad_()

        def loss(x: Tensor, overwrite: bool = overwrite) -> Tensor:
            return vocab_cross_entropy(x * 1, target, dist.group.WORLD, overwrite_logits=overwrite).sum()

        (torch.compile(loss, fullgraph=True, backend="aot_eager") if overwrite else loss)(own).backward()
        gradients.append(own.grad)
    return torch.equal(*gradients)


def _overwriting() -> tuple[bool, bool, str]:
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


def a_rank_alone_touches_no_transfer() -> bool:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a rank alone has nobody to talk to")

    Transfers.__init__ = forbidden  # type: ignore[assignment, method-assign]
    rows_in_flight.start_all_gather = forbidden  # type: ignore[assignment]
    return all(bool(t.isfinite().all()) for t in with_gradients(model, *operands(), sequence_parallel=True))


def all_bad_calls(names: list[str]) -> list[str]:
    return [bad_call(name) for name in names]


def bad_call(name: str) -> str:
    group = dist.group.WORLD
    x, w, ids = torch.randn(6, 8), torch.randn(8, 8), torch.arange(6)
    whole = 8 * dist.get_world_size()
    calls: dict[str, Callable[[], object]] = {
        "target past the end": lambda: vocab_cross_entropy(x, ids + whole, group),
        "negative target": lambda: vocab_cross_entropy(x, ids - 1, group),
        "target in padding": lambda: vocab_cross_entropy(x, ids + 10, group, vocab_size=whole - 1),
        "id past the end": lambda: vocab_embedding(ids + whole, w, group),
        "negative id": lambda: vocab_embedding(ids - 1, w, group),
        "target of head": lambda: linear_cross_entropy(x, w, ids + whole, group),
        "target shape": lambda: vocab_cross_entropy(x, ids[1:], group),
        "target dtype": lambda: vocab_cross_entropy(x, ids.float(), group),
        "integer logits": lambda: vocab_cross_entropy(x.long(), ids, group),
        "smoothing": lambda: vocab_cross_entropy(x, ids, group, label_smoothing=1.0),
        "smoothing one id": lambda: vocab_cross_entropy(x, 0 * ids, group, label_smoothing=0.1, vocab_size=1),
        "vocabulary": lambda: vocab_cross_entropy(x, ids, group, vocab_size=whole + 1),
        "leaf": lambda: vocab_cross_entropy(x.requires_grad_(), ids, group, overwrite_logits=True),
        "expanded": lambda: vocab_cross_entropy(x[:1].expand(6, 8), ids, group, overwrite_logits=True),
        "no group": lambda: vocab_cross_entropy(x, ids, None),  # type: ignore[arg-type]
        "ragged tokens": lambda: vocab_embedding(ids[:5], w, group, sequence_parallel=True),
        "padding_idx": lambda: vocab_embedding(ids, w, group, padding_idx=whole),
        "head shapes": lambda: linear_cross_entropy(x, w, ids[1:], group),
        "head target of a shard": lambda: linear_cross_entropy(x, w, ids, group, sequence_parallel=True),
        "reduction": lambda: linear_cross_entropy(x, w, ids, group, reduction="avg"),  # type: ignore[arg-type]
        "chunk": lambda: linear_cross_entropy(x, w, ids, group, chunk_tokens=0),
        "head dtype": lambda: linear_cross_entropy(x, w.half(), ids, group),
    }
    return message_of(calls[name])


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


def peer_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    vocab_cross_entropy(torch.randn(6, 8), torch.arange(6), dist.group.WORLD)
