"""Seconds of a block's transfers that its products do not hide, where a tensor group lies in one node.

They are those of the model of single calls (`timeline`): collectives in the rounds of `comm.schedule`, at
the rate and latency that NCCL reaches, beside products that they take processors from; sums of slots are
counted as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from tpkernels.gpus import RatedGpu
from tpkernels.planning.job import Job
from tpkernels.planning.timeline.node import GRAPH, Node
from tpkernels.planning.timeline.operators import Sizes
from tpkernels.planning.timeline.prediction import predict


def block_exposed(job: Job, tensor: int, gpu: RatedGpu) -> float:
    """Of one microbatch, forward and backward; what is computed again is forward once more."""
    if tensor == 1:
        return 0.0
    forwards = 2 if job.recompute == "full" else 1
    return sum(
        forwards * _exposed(operator, "forward", sizes, gpu) + _exposed(operator, "backward", sizes, gpu)
        for operator, sizes in _calls(job, tensor)
    )


def _calls(job: Job, tensor: int) -> Iterator[tuple[str, Sizes]]:
    tokens, hidden = job.tokens_at_once(), job.model.hidden_size
    of_heads, of_keys = job.model.num_heads * job.head_size, job.kv_heads * job.head_size
    split = job.sequence_parallel
    narrowest = max(1, of_keys // tensor)
    yield "column_linear", Sizes(tokens, hidden, of_heads + 2 * of_keys, tensor, split, narrowest)
    yield "row_linear", Sizes(tokens, of_heads, hidden, tensor, split)
    yield ("gated_mlp" if job.ups == 2 else "mlp"), Sizes(tokens, hidden, job.ffn, tensor, split)


@lru_cache(maxsize=1024)
def _exposed(operator: str, direction: str, sizes: Sizes, gpu: RatedGpu) -> float:
    return predict(operator, direction, "c10d", sizes, Node.of(gpu).with_host(GRAPH)).exposed
