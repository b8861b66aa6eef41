"""What ranks run in tests of second derivatives: ops over a group, which refuse, and regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.functional import hessian, hvp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.ops.parallel_behaviour import message_of
from tests.ops.parallel_cases import shard
from tpkernels.ops import column_linear, linear_cross_entropy, row_linear, vocab_cross_entropy
from tpkernels.ops.tensor_parallel import mappings
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp
from tpkernels.ops.vocab.embedding import vocab_embedding

WORDS = "expected to be differentiated once, got a second derivative"
TOKENS, K, N, VOCAB = 4, 4, 4, 8


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _ids(seed: int) -> Tensor:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def _embedding(weight: Tensor) -> Tensor:
    return vocab_embedding(_ids(0), weight, _world())


def _head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, weight, _ids(1), _world(), **options)


Op = Callable[..., Tensor]
OPS: dict[str, tuple[Op, tuple[tuple[int, ...], ...]]] = {  # with the shapes of all its inputs
    "column": (lambda x, w, b: column_linear(x, w, b, _world()), ((TOKENS, K), (N, K), (N,))),
    "column_gelu": (
        lambda x, w, b: column_linear(x, w, b, _world(), activation="gelu"),
        ((TOKENS, K), (N, K), (N,)),
    ),
    "column_sequence": (
        lambda x, w, b: column_linear(x, w, b, _world(), activation="silu", sequence_parallel=True),
        ((TOKENS, K), (N, K), (N,)),
    ),
    "row": (lambda x, w, b: row_linear(x, w, b, _world()), ((TOKENS, K), (N, K), (N,))),
    "row_sequence": (
        lambda x, w, b: row_linear(x, w, b, _world(), sequence_parallel=True),
        ((TOKENS, K), (N, K), (N,)),
    ),
    "mlp": (
        lambda x, wu, bu, wd, bd: parallel_mlp(x, wu, bu, wd, bd, _world()),
        ((TOKENS, K), (N, K), (N,), (K, N), (K,)),
    ),
    "gated_mlp": (
        lambda x, wu, wg, wd, bd: parallel_mlp(x, wu, None, wd, bd, _world(), w_gate_shard=wg),
        ((TOKENS, K), (N, K), (N, K), (K, N), (K,)),
    ),
    "embedding": (_embedding, ((VOCAB, K),)),
    "cross_entropy": (
        lambda logits: vocab_cross_entropy(logits, _ids(1), _world()),
        ((TOKENS, VOCAB),),
    ),
    "head_mean": (_head, ((TOKENS, K), (VOCAB, K))),
    "head_none": (lambda h, w: _head(h, w, reduction="none"), ((TOKENS, K), (VOCAB, K))),
}


def _operands(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(shape, generator=generator) for shape in OPS[name][1]]


LINEAR_IN = {"column": 2, "row": 2, "row_sequence": 2, "mlp": 4, "gated_mlp": 4, "embedding": 0}


def _told(call: Callable[[], object], words: str = WORDS) -> str:
    message = message_of(call)
    return "refused" if words in message else message


def _square(y: Tensor) -> Tensor:
    return y.square().sum()


def _penalty(op: Op, leaves: list[Tensor], number: int, loss: Op = _square) -> None:
    """A penalty on all gradients, differentiated by one input alone, which may be unused."""
    first = torch.autograd.grad(loss(op(*leaves)), [t for t in leaves if t.requires_grad], create_graph=True)
    torch.autograd.grad(
        torch.stack([g.square().sum() for g in first]).sum(), leaves[number], allow_unused=True
    )


def refusals(name: str) -> dict[str, str]:
    """What each way to ask for a second derivative comes to."""
    op, given = OPS[name][0], _operands(name)

    def fresh(only: int | None = None) -> list[Tensor]:
        return [t.clone().requires_grad_(only in (None, i)) for i, t in enumerate(given)]

    def computed(*tensors: Tensor) -> Tensor:
        return op(*(t * 1 for t in tensors))

    def recomputed(*tensors: Tensor) -> Tensor:
        return checkpoint(op, *tensors, use_reentrant=False)  # type: ignore[no-any-return]

    def value(*tensors: Tensor) -> Tensor:
        return _square(op(*tensors))

    found = {
        "hessian": _told(lambda: hessian(value, tuple(given))),
        "hvp": _told(lambda: hvp(value, tuple(given), tuple(given))),
    }
    for number in range(len(given)):
        calls = {
            "plain": lambda number=number: _penalty(op, fresh(), number),
            "others frozen": lambda number=number: _penalty(op, fresh(number), number),
            "no leaves": lambda number=number: _penalty(computed, fresh(), number),
            "checkpointed": lambda number=number: _penalty(recomputed, fresh(), number),
        }
        if LINEAR_IN.get(name) != number:  # else the true answer is that it is unused
            calls["constant gradient"] = lambda number=number: _penalty(op, fresh(), number, torch.sum)
        found |= {f"input {number}: {kind}": _told(call) for kind, call in calls.items()}
    ranks = range(1, dist.get_world_size() + 1)  # which are of use still
    total = mappings.reduce_from_region(torch.tensor([dist.get_rank() + 1.0]), _world())
    assert total.item() == sum(ranks)
    return found


def unlike_with_graph(name: str) -> list[int]:
    """Which first gradients have other bits when a graph of them is made."""
    op, _ = OPS[name]
    results = []
    for create_graph in (False, True):
        leaves = [t.requires_grad_() for t in _operands(name)]
        results.append(torch.autograd.grad(_square(op(*leaves)), leaves, create_graph=create_graph))
    assert all(gradient.requires_grad for gradient in results[1])
    return [i for i, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)]


def refused_at_once() -> dict[str, str]:
    """create_graph=True alone, where nothing could be raised later."""
    group = _world()
    x, w, b = (t.requires_grad_() for t in _operands("column"))
    computed, target, into = b * 1, _ids(1) % N, torch.zeros(N, K)

    def backward(y: Tensor, words: str = WORDS) -> str:
        told = _told(lambda: torch.autograd.grad(_square(y), x, create_graph=True), words)
        assert not into.any(), "added to main_grad before it was refused"
        return told

    at_once, fused = "This is raised already now", "expected no create_graph=True with main_grad"
    return {
        "bias": backward(column_linear(x, w, computed, group, activation="gelu"), at_once),
        "gathered": backward(
            column_linear(x * 1, w, b, group, sequence_parallel=True, save_gathered=True), at_once
        ),
        "b_up": backward(parallel_mlp(x, w, computed, w, b, group), at_once),
        "column main_grad": backward(column_linear(x, w, b, group, main_grad=into), fused),
        "row main_grad": backward(row_linear(x, w, b, group, main_grad=into), fused),
        "mlp main_grad": backward(parallel_mlp(x, w, b, w, b, group, main_grads=[into, None]), fused),
        "head main_grad": backward(linear_cross_entropy(x, w, target, group, main_grad=into), fused),
    }


def _whole(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _split_features(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An MLP between two regions."""
    group = _world()
    h = F.gelu(F.linear(mappings.copy_to_region(x, group), shard(up, 0)))
    return mappings.reduce_from_region(F.linear(h, shard(down, 1)), group)


def _split_tokens(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same under sequence parallelism, from and to all tokens."""
    group = _world()
    x = mappings.scatter_to_sequence_region(x, group)
    x = mappings.gather_from_sequence_region(x, group)
    y = F.linear(F.gelu(F.linear(x, shard(up, 0))), shard(down, 1))
    y = mappings.reduce_scatter_to_sequence_region(y, group)
    return mappings.gather_from_sequence_region(y, group, tensor_parallel_output_grad=False)


def _split_between(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Features are split where they are gated, and whole where they are multiplied."""
    group = _world()
    z = mappings.scatter_to_region(F.linear(x, up), group)
    return F.linear(mappings.gather_from_region(F.gelu(z) * z, group), down)


def _gated_whole(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = F.linear(x, up)
    return F.linear(F.gelu(z) * z, down)


def _mlp_whole(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up)), down)


def wrong_penalties() -> list[str]:
    """Which models of regions have other gradients of a penalty on dx than the unsharded model.

    Weights are given whole and cut within: the gradient of each is zero but for our shard, or whole.
    """
    wrong = []
    for split, whole in (
        (_split_features, _mlp_whole),
        (_split_tokens, _mlp_whole),
        (_split_between, _gated_whole),
    ):
        found = []
        for model in (split, whole):
            leaves = [t.requires_grad_() for t in (_whole(0, 8, 6), _whole(1, 8, 6), _whole(2, 6, 8))]
            loss = model(*leaves).sin().sum()
            (dx,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
            found.append([dx, *torch.autograd.grad(loss + dx.square().sum(), leaves)])
        for name, ours, truth in zip(("dx", "x", "up", "down"), *found, strict=True):
            if split is not _split_between and name in ("up", "down"):
                dim = int(name == "down")
                ours, truth = shard(ours, dim), shard(truth, dim)
            if not torch.allclose(ours, truth, rtol=1e-12, atol=1e-12):
                wrong.append(f"{split.__name__}, gradient of {name}")
    return wrong
