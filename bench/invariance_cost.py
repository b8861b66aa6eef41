"""`python -m bench invariance_cost`: CPU time of products with TP-invariance, and bytes that ranks send."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from bench.invariance import DTYPES, MODELS, SEGMENTS, config_of
from bench.measure import Seconds, Way, interleave, seconds_of_processor, slowest
from tests.ranks import RankPool
from tests.segments import tp_invariance
from tests.training.invariant_runs import CPU
from tpkernels import create_parallel_state, ops, plan_groups
from tpkernels.comm.groups import group_or_world
from tpkernels.comm.transports import select
from tpkernels.comm.transports.c10d import Message, Transfers
from tpkernels.training.config import TrainConfig
from tpkernels.training.trainer import Trainer

SHAPES = ((256, 512, 1024), (1024, 768, 3072))  # tokens, in_features, out_features
SEGMENTS_OF = {"ours": SEGMENTS, "plain": 0}


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--rounds", type=int, default=15, metavar="N")


def main(options: Namespace) -> int:
    rounds = options.rounds
    with RankPool(1) as ranks1, RankPool(2) as ranks2:
        print(
            "| op | tokens x in x out | dtype | TP | forward, ms | to plain | with backward, ms | to plain |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for op, shape, dtype, pool in product(PRODUCTS, SHAPES, DTYPES, (ranks1, ranks2)):
            seconds = slowest(pool.run(product_seconds, op, shape, DTYPES[dtype], rounds))
            low = {way: sorted(times)[len(times) // 4] for way, times in seconds.items()}
            sizes = " x ".join(map(str, shape))
            cells = [op, sizes, dtype, str(pool.world_size)]
            for pass_ in ("forward", "both"):
                ours, plain = low[f"ours {pass_}"], low[f"plain {pass_}"]
                cells += [f"{1e3 * ours:.1f}", f"{ours / plain:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        print("\n| model | dtype | sequence parallel | plain, MB | MB | to plain |")
        print("|---|---|---|---|---|---|")
        for model, dtype, split in product(MODELS, DTYPES, (False, True)):
            config = replace(config_of(MODELS[model], DTYPES[dtype], 2), sequence_parallel=split)
            plain_bytes, bytes_ = (ranks2.run(bytes_sent, config, segments)[0] for segments in (0, SEGMENTS))
            sums = f"{plain_bytes / 1e6:.2f} | {bytes_ / 1e6:.2f} | {bytes_ / plain_bytes:.2f}"
            print(f"| {model} | {dtype} | {'on' if split else 'off'} | {sums} |", flush=True)
    return 0


def _column(x: Tensor, weight: Tensor) -> Tensor:
    return ops.column_linear(x, weight, None, group_or_world(None))


def _row(x: Tensor, weight: Tensor) -> Tensor:
    return ops.row_linear(x, weight, None, group_or_world(None))


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"column_linear": _column, "row_linear": _row}


def product_seconds(op: str, shape: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> Seconds:
    """Forward, and forward and backward, each in both modes."""
    tokens, inner, outer = shape
    ranks = dist.get_world_size()
    inner, outer = (inner // ranks, outer) if op == "row_linear" else (inner, outer // ranks)
    x, weight = (torch.randn(*size).to(dtype).requires_grad_() for size in ((tokens, inner), (outer, inner)))
    gradient = torch.randn(tokens, outer).to(dtype)

    def forward(segments: int) -> Tensor:
        with tp_invariance(segments):
            return PRODUCTS[op](x, weight)

    def both(segments: int) -> object:
        y = forward(segments)
        with tp_invariance(segments):
            return torch.autograd.grad(y, [x, weight], gradient)

    ways: dict[str, Way] = {}
    for way, segments in SEGMENTS_OF.items():
        ways |= {f"{way} forward": partial(forward, segments), f"{way} both": partial(both, segments)}
    return interleave(ways, rounds, seconds_of_processor(2))


def bytes_sent(config: TrainConfig, segments: int) -> int:
    """By this rank in the second step of a run, over torch.distributed."""
    with tp_invariance(segments), patch.object(select, "requested_transport", "c10d"):
        state = create_parallel_state(
            plan_groups(world_size=dist.get_world_size(), tensor=dist.get_world_size())
        )
        trainer = Trainer(config, state, CPU)
        trainer.step()
        with _counted() as sent:
            trainer.step()
        return sum(sent)


@contextmanager
def _counted() -> Iterator[list[int]]:
    sent: list[int] = []
    exchange_all = Transfers.exchange_all

    def counting(self: Transfers, outgoing: Sequence[Message], incoming: Sequence[Message]) -> Any:
        sent.extend(rows.nbytes for _, rows in outgoing)
        return exchange_all(self, outgoing, incoming)

    with patch.object(Transfers, "exchange_all", counting):
        yield sent
