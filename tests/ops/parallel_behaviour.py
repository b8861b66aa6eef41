"""What ranks run in tests of how ops over a group behave, beside the numbers that they compute."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.ops import parallel_cases
from tests.ops.parallel_cases import Setting, leaf, prepare, shard
from tpkernels import Recipe
from tpkernels.comm.calls import begin
from tpkernels.comm.schedule import bounds
from tpkernels.comm.transports.c10d import Transfers
from tpkernels.comm.transports.host import HostExchange
from tpkernels.comm.transports.rows import AllReducing, Swapping
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
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SENDING = {"c10d": (Transfers, "exchange"), "shared": (HostExchange, "put")}


def repeats_are_equal(sequence_parallel: bool, transport: str = "c10d", rounds: int = 5) -> bool:
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
            delayed = with_gradients(block, operands, sequence_parallel=sequence_parallel)
        if not _equal(calm, delayed):
            return False
    return True


def interleaved_layers_do_not_mix() -> bool:
    """Two blocks whose forwards and backwards alternate."""
    prepare(Setting())
    alone = [with_gradients(block, operands_of(seed), sequence_parallel=True) for seed in (1, 2)]
    leaves = [[leaf(t) for t in operands_of(seed)] for seed in (1, 2)]
    ys = [block(*operands, sequence_parallel=True) for operands in leaves]
    torch.autograd.backward([y.square().sum() for y in ys])
    together = [[y.detach(), *(t.grad for t in operands)] for y, operands in zip(ys, leaves, strict=True)]
    return all(_equal(a, b) for a, b in zip(alone, together, strict=True))


Model = Callable[..., Tensor]
Recipes = Sequence[Recipe | None]
RECIPES = (None, Recipe.rowwise(), Recipe.blockwise())


def mlp(x: Tensor, w: Tensor, w2: Tensor, *, gated: bool = False, **options: Any) -> Tensor:
    gate, bias = (w.flip(0), None) if gated else (None, w[:, 0])
    return parallel_mlp(x, w, bias, w2, w2[:, 0], dist.group.WORLD, w_gate_shard=gate, **options)


def checkpointed_unlike_plain(reentrant: bool, recipes: Recipes = RECIPES) -> list[str]:
    """Which models give other bits when their forward is computed twice."""
    prepare(Setting())
    wrong = []
    for model, recipe in product((block, mlp), recipes):
        call = partial(model, sequence_parallel=True, quantize=recipe)
        leaves = [leaf(t) for t in operands_of(3)]
        y = checkpoint(call, *leaves, use_reentrant=reentrant)
        y.square().sum().backward()
        if not _equal(with_gradients(call, operands_of(3)), [y.detach(), *(t.grad for t in leaves)]):
            wrong.append(f"{model.__name__}, {recipe}")
    return wrong


def unlike_with_grad(recipes: Recipes = RECIPES) -> list[str]:
    """Which models give other bits without gradients than with them."""
    prepare(Setting())
    wrong = []
    for model, recipe, tokens_split in product((block, mlp), recipes, (True, False)):
        call = partial(model, sequence_parallel=tokens_split, quantize=recipe)
        with torch.inference_mode():  # first: what it allocates must serve training too
            inferred = call(*operands_of(4))
        expected = with_gradients(call, operands_of(4))[0]
        with torch.no_grad():
            found = call(*operands_of(4))
        if not (found.equal(expected) and inferred.equal(expected)):
            wrong.append(f"{model.__name__}, {recipe}, {tokens_split=}")
    return wrong


def lists_share_one_gather() -> tuple[bool, int]:
    """Whether a list gives what single calls give, and how many transfers three need more than one."""
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
    together = with_gradients(column, [x, *weights])
    apart = with_gradients(one_by_one, [x, *weights])
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(together, apart, strict=True))
    return close, counts[0] - counts[1]


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


def bad_calls() -> dict[str, str]:
    """What is said of each mistake."""
    group = dist.group.WORLD
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    calls: dict[str, Callable[[], object]] = {
        "ragged tokens": lambda: row_linear(x[:5], w, None, group, sequence_parallel=True),
        "no group": lambda: column_linear(x, w, None, None),  # type: ignore[arg-type]
        "width": lambda: column_linear(x, torch.randn(8, 7), None, group),
        "dtype": lambda: row_linear(x, w.half(), None, group),
        "no tokens": lambda: column_linear(x[0], w, None, group, sequence_parallel=True),
        "lists": lambda: column_linear(x, [w, w], [None], group),
        "main_grad": lambda: row_linear(x, w, None, group, main_grad=torch.zeros(3, 8)),
        "elsewhere": lambda: row_linear(x.to("meta"), w.to("meta"), None, group),
        "gated bias": lambda: parallel_mlp(x, w, x[0], w, None, group, w_gate_shard=w),
    }
    return {name: message_of(call) for name, call in calls.items()}


def peer_stays_away(seconds: float) -> str:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    x, w, _ = operands_of(8)
    column_linear(x, w, None, group, sequence_parallel=True)
    message = "late"
    if dist.get_rank() == 0:
        message = message_of(lambda: column_linear(x, w, None, group, sequence_parallel=True))
    meet("the late one waits here, alive")
    return message


def doubled_bias() -> float:
    """What the comparison says of a bias that lands once a rank: it has to be far beyond what is allowed."""

    def doubled(x: Tensor, w: Tensor, b: Tensor, group: dist.ProcessGroup, **options: Any) -> Tensor:
        return row_linear(x, w, b * group.size(), group, **options)

    with patch.object(parallel_cases, "row_linear", doubled):
        return parallel_cases.row(Setting())["y"]


def wrong_all_reduces(dtypes: list[torch.dtype]) -> list[str]:
    """Both ways, of rows that ranks and chunks divide or not: the sum in the order of ranks, to the bit."""
    prepare(Setting())
    group, wrong = dist.group.WORLD, []
    for (rows, cols), chunks, dtype in product([(16, 6), (7, 3), (1, 5), (0, 4)], [1, 3], dtypes):
        torch.manual_seed(0)
        parts = [torch.randn(rows, cols).to(dtype) for _ in range(group.size())]
        bias = torch.randn(cols).to(dtype)
        total = sum(part.to(torch.promote_types(dtype, torch.float32)) for part in parts)
        exact, own = (total + bias).to(dtype), parts[group.rank()]
        chunk_rows = [slice(*bounds(rows, chunks, chunk)) for chunk in range(chunks)]
        swap, reduce_and_gather = (begin(op, "all", group) for op in ("swap", "reduce and gather"))
        partials = ((own[chunk].__getitem__, chunk.stop - chunk.start) for chunk in chunk_rows)
        ways = {
            "swap": Swapping(swap, (own[chunk] for chunk in chunk_rows), bias),
            "reduce and gather": AllReducing(reduce_and_gather, partials, cols, own, bias),
        }
        for name, way in ways.items():
            if not torch.equal(way.wait(), exact):
                wrong.append(f"{name} of ({rows}, {cols}) {dtype} in {chunks} chunks")
    return wrong
