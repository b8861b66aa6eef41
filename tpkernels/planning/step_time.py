"""Seconds of a step: products at a fraction of the peak rate, plus transfers that they do not hide.

For blocks whose tensor group lies in one node, the caller passes a model of single calls (`BlockExposed`).
Other blocks and other work use a formula. With transfers alone (no product runs at the same time) and
products alone (no transfer does),

    exposed = max(transfers alone, transfers - (products - products alone))

A gather over collectives in C rounds of R / C ranks begins with a round that has only the rank's own rows,
and the products of the last round wait for all others: R / C - 1 of the R - 1 shards and 1 / C of the
products are alone. A reduce-scatter is the same in reverse. In one round all is alone, unless another product
hides the full transfer. An all-reduce gathers its sums at the end: at least half of its transfers are alone.
Gradients are sent in buckets during the last backward, the last bucket after it. A pipeline of p stages with
a 1F1B schedule computes m microbatches in m + p - 1 turns of its slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tpkernels.buckets.layout import SMALLEST_BUCKET_BYTES
from tpkernels.gpus import RatedGpu
from tpkernels.planning.job import Job, RankLayout
from tpkernels.planning.machine import Hardware
from tpkernels.planning.memory import GRADIENT
from tpkernels.planning.parameters import ParameterCount, parameters_of_stage, table_elements
from tpkernels.planning.work import (
    OverlappedWork,
    block_backward,
    block_forward,
    embedding_work,
    head_work,
    message_between_stages,
    shared_heads,
)

BlockExposed = Callable[[Job, int, RatedGpu], float]  # by the number of ranks in a node: `streams.prediction`


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step."""

    compute: float
    exposed: float  # transfers that nothing hides
    bubble: float  # waiting for other stages

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.bubble


def exposed(work: OverlappedWork, products: float, transfers: float) -> float:
    """Seconds of transfers that products do not hide."""
    return max(work.transfers_alone * transfers, transfers - products * (1 - work.products_alone))


def step_time(job: Job, layout: RankLayout, machine: Hardware, block_exposed: BlockExposed) -> StepTime:
    stages = layout.pipeline
    turns = [_turn(job, layout, machine, stage, block_exposed) for stage in range(stages)]
    compute, waiting = max(turns, key=sum)
    once = max(_once_a_step(job, layout, machine, stage) for stage in range(stages))
    count = job.micro_batches(layout)
    return StepTime(
        compute=count * compute,
        exposed=count * waiting + once + _tied_table(job, layout, machine),
        bubble=(stages - 1) * (compute + waiting),
    )


def _turn(
    job: Job, layout: RankLayout, machine: Hardware, stage: int, block_exposed: BlockExposed
) -> tuple[float, float]:
    """Return seconds of products and of waits, for forward and backward of one microbatch on a stage."""
    tensor, stages = layout.tensor, layout.pipeline
    processors = machine.gpu.processors
    block = block_forward(job, tensor, processors) + block_backward(job, tensor, processors)
    compute, waiting = _seconds(block, machine, tensor)
    if tensor <= machine.gpus_per_node:  # else over the network, which the model of calls does not cover
        times = 3 if job.recompute == "full" else 2
        _, shared = _seconds(times * shared_heads(job, tensor), machine, tensor)
        waiting = block_exposed(job, tensor, machine.gpu) + shared
    blocks = job.model.num_layers // stages
    ends = (embedding_work(job, tensor) if stage == 0 else []) + (
        head_work(job, tensor) if stage == stages - 1 else []
    )
    compute_at_end, waiting_at_end = _seconds(ends, machine, tensor)
    if stages > 1:  # a message arrives while another is sent, once in forward and once in backward
        message = message_between_stages(job, tensor)
        waiting_at_end += 2 * machine.handing_on(message, stages, tensor * layout.data)
    return blocks * compute + compute_at_end, blocks * waiting + waiting_at_end


def _seconds(works: Iterable[OverlappedWork], machine: Hardware, tensor: int) -> tuple[float, float]:
    compute = waiting = 0.0
    for work in works:
        products = machine.computing(work.flops)
        compute += products
        waiting += exposed(work, products, machine.exchanging(work.sent, tensor, 1))
    return compute, waiting


def gradient_bytes(layout: RankLayout, parameters: ParameterCount) -> float:
    """Return the bytes that a rank sends to reduce gradients over data-parallel ranks."""
    return GRADIENT * parameters.total * (layout.data - 1) / layout.data


def update_bytes(job: Job, layout: RankLayout, parameters: ParameterCount) -> float:
    """Return the bytes that a rank sends to all-gather its new weights."""
    return job.element * parameters.total * (layout.data - 1) / layout.data


def marked_bytes(job: Job, layout: RankLayout, parameters: ParameterCount) -> float:
    """Return the bytes that a rank sends to sum partial gradients over tensor-parallel ranks."""
    if not job.is_split(layout.tensor):
        return 0.0
    return 2 * GRADIENT * parameters.marked * (layout.tensor - 1) / layout.tensor


def _once_a_step(job: Job, layout: RankLayout, machine: Hardware, stage: int) -> float:
    """Return seconds of transfers after the last backward of a stage."""
    tensor, data = layout.tensor, layout.data
    parameters = parameters_of_stage(job, layout, stage)
    backward, _ = _seconds(block_backward(job, tensor, machine.gpu.processors), machine, tensor)
    backward *= job.model.num_layers // layout.pipeline
    gradients = max(1, GRADIENT * parameters.total)
    # both ends are small, except a table; gradients of less than two smallest buckets are one bucket
    first_bucket = SMALLEST_BUCKET_BYTES if gradients >= 2 * SMALLEST_BUCKET_BYTES else gradients
    last_bucket = max(first_bucket, GRADIENT * table_elements(job, tensor) if stage == 0 else 0)
    reducing = machine.circling(gradient_bytes(layout, parameters), data, tensor)
    gathering = machine.circling(update_bytes(job, layout, parameters), data, tensor)
    summing = machine.circling(marked_bytes(job, layout, parameters), tensor, 1)
    ends = OverlappedWork(
        products_alone=first_bucket / gradients, transfers_alone=min(1.0, last_bucket / gradients)
    )
    return exposed(ends, backward, reducing) + gathering + summing


def _tied_table(job: Job, layout: RankLayout, machine: Hardware) -> float:
    """Return seconds in which first and last stage sum the gradients of the table that both hold."""
    if not job.model.tied or layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.data * (layout.pipeline - 1)
    return machine.handing_on(GRADIENT * table_elements(job, layout.tensor), 2, stride)
