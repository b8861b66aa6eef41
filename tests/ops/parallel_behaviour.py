"""What ranks run in tests of how ops over a group behave, beside the numbers that they compute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops.parallel_cases import Setting, equal, leaf, prepare, shard
from tpkernels import Recipe
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.comm.transports.host import HostExchange
from tpkernels.ops import column_linear, row_linear
from tpkernels.ops.tensor_parallel.parallel_mlp import parallel_mlp


def block(x: Tensor, w: Tensor, w2: Tensor, group: dist.ProcessGroup | None = None, **options: Any) -> Tensor:
    group = group or dist.group.WORLD
    h = column_linear(x, w, None, group, activation="gelu", **options)
    return row_linear(h, w2, None, group, **options)


def operands_of(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x, w, w2 = torch.randn(16, 24), torch.randn(32, 24) / 5, torch.randn(24, 32) / 5
    return [shard(x, 0), shard(w, 0), shard(w2, 1)]


def with_gradients(function: Callable[..., Tensor], operands: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [leaf(t) for t in operands]
    y = function(*leaves, **options)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)]


SENDING = {"c10d": (Transfers, "exchange"), "shared": (HostExchange, "put")}


def assert_delays_change_no_bit(sequence_parallel: bool, transport: str = "c10d", rounds: int = 5) -> None:
    """Calls with fresh data and other delays give the bits of calls without delays."""
    prepare(Setting())
    owner, name = SENDING[transport]
    original = getattr(owner, name)
    for seed in range(rounds):
        operands = operands_of(seed)
        if not sequence_parallel:
            operands[0] = torch.ones(8, 24) * torch.arange(8.0)[:, None].sin()
        calm = with_gradients(block, operands, sequence_parallel=sequence_parallel)
        delays = random.Random(100 * seed + dist.get_rank())

        def late(self: Any, *arguments: Any, delays: random.Random = delays) -> Any:
            time.sleep(delays.choice([0.0, 0.002, 0.01]))
            return original(self, *arguments)

        with patch.object(owner, name, late):
            assert equal(calm, with_gradients(block, operands, sequence_parallel=sequence_parallel))


def assert_interleaved_layers_do_not_mix() -> None:
    """Two blocks whose forwards and backwards alternate."""
    prepare(Setting())
    alone = [with_gradients(block, operands_of(seed), sequence_parallel=True) for seed in (1, 2)]
    leaves = [[leaf(t) for t in operands_of(seed)] for seed in (1, 2)]
    ys = [block(*operands, sequence_parallel=True) for operands in leaves]
    torch.autograd.backward([y.square().sum() for y in ys])
    for y, operands, expected in zip(ys, leaves, alone, strict=True):
        assert equal([y.detach(), *(t.grad for t in operands)], expected)


Model = Callable[..., Tensor]
Recipes = Sequence[Recipe | None]
RECIPES = (None, Recipe.rowwise(), Recipe.blockwise())


def mlp(x: Tensor, w: Tensor, w2: Tensor, *, gated: bool = False, **options: Any) -> Tensor:
    gate, bias = (w.flip(0), None) if gated else (None, w[:, 0])
    return parallel_mlp(x, w, bias, w2, w2[:, 0], dist.group.WORLD, w_gate_shard=gate, **options)


def assert_checkpointed_has_the_bits_of_plain(reentrant: bool, recipes: Recipes = RECIPES) -> None:
    prepare(Setting())
    for model, recipe in product((block, mlp), recipes):
        plain = partial(model, sequence_parallel=True, quantize=recipe)
        recomputed = partial(checkpoint, plain, use_reentrant=reentrant)
        assert equal(*(with_gradients(call, operands_of(3)) for call in (plain, recomputed))), recipe


def assert_forward_without_gradients_has_the_same_bits(recipes: Recipes = RECIPES) -> None:
    prepare(Setting())
    for model, recipe, tokens_split in product((block, mlp), recipes, (True, False)):
        call = partial(model, sequence_parallel=tokens_split, quantize=recipe)
        with torch.inference_mode():  # first: what it allocates must serve training too
            inferred = call(*operands_of(4))
        expected = with_gradients(call, operands_of(4))[0]
        with torch.no_grad():
            found = call(*operands_of(4))
        assert equal([found, inferred], [expected, expected]), f"{recipe}, {tokens_split=}"


def assert_several_weights_share_one_gather() -> None:
    """A list gives what single calls give, and its transfers are those of one."""
    prepare(Setting())
    x, w, _ = operands_of(5)
    weights = [w, w[:4] * 2, w[:2] * 3]
    counts = []

    def column(x: Tensor, *weights: Tensor) -> Tensor:
        ys = column_linear(x, list(weights), None, dist.group.WORLD, sequence_parallel=True)
        return torch.cat(ys, 1)

    def one_by_one(x: Tensor, *weights: Tensor) -> Tensor:
        ys = [column_linear(x, w, None, dist.group.WORLD, sequence_parallel=True) for w in weights]
        return torch.cat(ys, 1)

    column(x, *weights)  # before transfers are counted: ranks agree on the transport
    spied = patch.object(Transfers, "exchange", autospec=True, side_effect=Transfers.exchange)
    for several in (weights, weights[:1]):
        with torch.no_grad(), spied as spy:
            column(x, *several)
        counts.append(spy.call_count)
    assert counts[0] == counts[1]
    together, apart = (with_gradients(function, [x, *weights]) for function in (column, one_by_one))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def meet(event: str) -> None:
    """Wait for all ranks, by the store: connections may be closed."""
    store = dist.distributed_c10d._get_default_store()
    if store.add(event, 1) == dist.get_world_size():
        store.set(f"{event} now", "")
    store.wait([f"{event} now"])


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
