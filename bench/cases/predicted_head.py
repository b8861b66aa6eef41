"""Times of log-probabilities of a head over ranks by the model of streams: ours, and without fusion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.streams.device import current_device
from bench.streams.prediction import going
from bench.streams.record import Machine, record
from bench.streams.times import Node, times_of
from tpkernels.ops import column_linear, linear_logprobs
from tpkernels.ops.inputs import Context
from tpkernels.ops.vocab import vocabulary

Way = Literal["unfused", "ours"]
CALLS = 3  # in a row: the last takes what each takes where many follow each other


@dataclass(frozen=True)
class Head:
    """Of bf16, over ranks, with sequence parallelism."""

    name: str
    hidden: int
    tokens: int = 8192
    vocab: int = 128256
    ranks: int = 8


HEADS = (Head("Llama-3 8B", 4096), Head("Llama-3 70B", 8192))


class _LogProbs(torch.autograd.Function):
    """As Megatron and its users compute them: of all logits, in fp32, with three all-reduces.

    Numbers are not there, and the machine adds up only: a maximum takes as long.
    """

    @staticmethod
    def forward(ctx: Context, logits: Tensor, ids: Tensor, group: ProcessGroup) -> Tensor:
        x = logits.float()
        maximum = x.amax(1)
        dist.all_reduce(maximum, group=group)
        x = x - maximum[:, None]
        picked = x.gather(1, ids[:, None])[:, 0]
        dist.all_reduce(picked, group=group)
        exponentials = x.exp()
        total = exponentials.sum(1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials / total[:, None], ids)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Context, dlogprobs: Tensor) -> tuple[Tensor, None, None]:
        p, ids = ctx.saved_tensors
        dlogits = p * -dlogprobs[:, None]
        dlogits.scatter_add_(1, ids[:, None], dlogprobs[:, None])
        return dlogits.to(torch.bfloat16), None, None


def head_seconds(way: Way, head: Head, node: Node, *, backward: bool, **options: Any) -> float:
    """A call forward, and backward if that is asked for; options: of `linear_logprobs`."""
    calls: list[range] = []

    def body(group: ProcessGroup) -> list[Tensor]:
        tasks, shard = current_device().program.tasks, head.vocab // head.ranks

        def counted(run: Callable[[], list[Tensor]]) -> list[Tensor]:
            first, results = len(tasks), run()
            calls.append(range(first, len(tasks)))
            return results

        hidden, weight = (
            torch.empty(rows, head.hidden, dtype=torch.bfloat16, device="cuda").requires_grad_(backward)
            for rows in (head.tokens // head.ranks, shard)
        )
        ids = (torch.arange(head.tokens) % shard).to("cuda")

        def logprobs() -> Tensor:
            if way == "ours":
                return linear_logprobs(hidden, weight, ids, group, sequence_parallel=True, **options)[0]
            logits = column_linear(hidden, weight, None, group, sequence_parallel=True, overlap=False)
            found: Tensor = _LogProbs.apply(logits, ids, group)  # type: ignore[no-untyped-call]
            return found

        def step() -> list[Tensor]:
            y = logprobs()
            return [y, *torch.autograd.grad(y, (hidden, weight), torch.ones_like(y))] if backward else [y]

        return [y for _ in range(CALLS) for y in counted(step)]

    machine = Machine(head.ranks, processors=node.gpu.processors, numbers=False)
    schedule = "naive" if way == "unfused" else "c10d"
    # ids are not compared between ranks, for which the host would read them
    with going(schedule), patch.object(vocabulary, "_is_compared", lambda *_: False):
        program = record(machine, body, "c10d")
    *_, before, last = times_of(program, calls, node)
    return max(ran.stop for ran in last) - max(ran.stop for ran in before)
