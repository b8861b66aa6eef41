"""Seconds of a step: products at a share of the peak rate, and what of the transfers they cannot hide.

Of blocks whose tensor group lies in one node that is what a model of single calls says, which the caller
gives (`BlockExposed`). For others, and beside blocks, it is a formula. Where some of the transfers have
nothing computed beside them, and some of the products nothing that travels,

    exposed = max(transfers alone, transfers - products that something travels beside)

A gather over collectives in C rounds of R / C ranks begins with a round of which only the rank's own rows
are there, and the products of the last round wait for all others: R / C - 1 of the R - 1 shards and 1 / C
of the products are alone. So it is with a reduce-scatter, the other way round. In one round all is alone,
but what another product hides as a whole. An all-reduce gathers its sums when all are there: half of its
transfers are alone at least. Gradients travel in buckets during the last backward, the last bucket after
it. A pipeline of p stages that alternates one forward and one backward computes m microbatches in m + p - 1
turns of its slowest stage.
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

BlockExposed = Callable[[Job, int, RatedGpu], float]  # of so many ranks of a node: `streams.prediction`


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
    """Of one microbatch on a stage, forward and backward: seconds of products, and of waiting for rows."""
    tensor, stages = layout.tensor, layout.pipeline
    processors = machine.gpu.processors
    block = block_forward(job, tensor, processors) + block_backward(job, tensor, processors)
    compute, waiting = _seconds(block, machine, tensor)
    if tensor <= machine.gpus_per_node:  # else over the network, which the model of calls does not know
        times = 3 if job.recompute == "full" else 2
        _, shared = _seconds(times * shared_heads(job, tensor), machine, tensor)
        waiting = block_exposed(job, tensor, machine.gpu) + shared
    blocks = job.model.num_layers // stages
    ends = (embedding_work(job, tensor) if stage == 0 else []) + (
        head_work(job, tensor) if stage == stages - 1 else []
    )
    compute_at_end, waiting_at_end = _seconds(ends, machine, tensor)
    if stages > 1:  # a message comes while another goes, once forward and once back
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
    """What a rank sends to reduce gradients over data-parallel ranks."""
    return GRADIENT * parameters.total * (layout.data - 1) / layout.data


def update_bytes(job: Job, layout: RankLayout, parameters: ParameterCount) -> float:
    """What it sends to give its new weights to the others."""
    return job.element * parameters.total * (layout.data - 1) / layout.data


def marked_bytes(job: Job, layout: RankLayout, parameters: ParameterCount) -> float:
    """What it sends to sum partial gradients of replicated parameters over tensor-parallel ranks."""
    if not job.is_split(layout.tensor):
        return 0.0
    return 2 * GRADIENT * parameters.marked * (layout.tensor - 1) / layout.tensor


def _once_a_step(job: Job, layout: RankLayout, machine: Hardware, stage: int) -> float:
    """Seconds of transfers that follow the last backward of a stage, or outlast it."""
    tensor, data = layout.tensor, layout.data
    parameters = parameters_of_stage(job, layout, stage)
    backward, _ = _seconds(block_backward(job, tensor, machine.gpu.processors), machine, tensor)
    backward *= job.model.num_layers // layout.pipeline
    gradients = max(1, GRADIENT * parameters.total)
    # both ends are small, but for a table; what would leave less than that for one of them is one bucket
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
    """Seconds in which first and last stage sum the gradients of the table that both hold."""
    if not job.model.tied or layout.pipeline == 1:
        return 0.0
    stride = layout.tensor * layout.data * (layout.pipeline - 1)
    return machine.handing_on(GRADIENT * table_elements(job, layout.tensor), 2, stride)
