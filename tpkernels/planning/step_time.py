"""Seconds of a step: products at a fraction of the peak rate, plus transfers that they do not hide.

With transfers alone (no product runs at the same time) and products alone (no transfer does),

    exposed = max(transfers alone, transfers - (products - products alone))

A gather over collectives in C rounds of R / C ranks begins with a round that has only the rank's own rows,
and the products of the last round wait for all others: R / C - 1 of the R - 1 shards and 1 / C of the
products are alone. A reduce-scatter is the same in reverse. In one round all is alone, unless another product
hides the full transfer. An all-reduce gathers its sums at the end: at least half of its transfers are alone.
Gradients are sent in buckets during the last backward, the last bucket after it. A pipeline of p stages with
a 1F1B schedule computes m microbatches in m + p - 1 turns of its slowest stage.

FLOPs and bytes sent by a rank for one microbatch, in the order of the operators.

R tensor-parallel ranks, t tokens of h features in e bytes, s tokens in a sequence, a heads of d features.
There are g heads of keys and values, f features in the MLP (`ups` products into it, two for a gated unit),
and V rows of the vocabulary on a rank. A rank sends U = t h e (R - 1) / R bytes in an all-gather of tokens,
or a reduce-scatter. An all-reduce is both in turn, or with little data t h e (R - 1) bytes at once. With and
without sequence parallelism:

    forward     queries, keys, values    2 t h (a + 2 g) d / R     U      -
                attention                2 t s a d / R             -      -     half of the scores: causal
                output                   2 t h a d / R             U      2 U
                MLP, up                  2 t h f ups / R           U      -
                MLP, down                2 t h f / R               U      2 U
    backward    MLP                      twice forward             3 U    2 U
                output                   twice                     U      -
                attention                2.5 times                 -      -     scores are computed again
                queries, keys, values    twice                     2 U    2 U
    embedding   forward                  -                         U      2 U   nothing to hide it
                backward                 -                         U      -     the same
    head        forward                  6 t h V                   U      -     and both of its gradients
                backward                 -                         U      2 U   nothing to hide it
                losses                   -                   12 t (R - 1)       three numbers in fp32 a token

With fewer heads of keys and values than ranks, shards of keys and of values are gathered, and their gradients
reduced. Recomputation repeats the forward of a block with its transfers, or of attention only.

`advise` sorts all layouts of a number of GPUs for a job: layouts that fit by time, others by excess memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tpkernels.buckets.layout import SMALLEST_BUCKET_BYTES
from tpkernels.comm.schedule import collective_rounds, swaps_full_sums
from tpkernels.planning.job import Hardware, Job, RankLayout, layouts
from tpkernels.planning.memory import (
    GRADIENT,
    MemoryUse,
    ParameterCount,
    memory_of,
    parameters_of_stage,
    table_elements,
)


@dataclass(frozen=True, slots=True)
class OverlappedWork:
    """Products, and the transfers that they hide."""

    flops: float = 0.0
    sent: float = 0.0  # bytes by each rank to the others of its tensor group
    products_alone: float = 1.0  # the fraction of products without a transfer at the same time
    transfers_alone: float = 1.0  # the fraction of transfers without a product at the same time


@dataclass(frozen=True, slots=True)
class _TransferTimes:
    """Transfers of all tokens between the ranks of a tensor group, over c10d on GPUs."""

    job: Job
    tensor: int
    processors: int = 1  # of a GPU, for products

    def gathers(self, flops: float, features: int = 0, *, beside: bool = False) -> OverlappedWork:
        """Return a product with, only under sequence parallelism, a gather or a reduce-scatter.

        features: width of the product that takes or gives rows in rounds; 0: none
        beside: the flops are of a product that does not need these rows, and hides the full transfer
        """
        if not self.job.is_split(self.tensor):
            return OverlappedWork(flops)
        rounds = self._rounds(features)
        return OverlappedWork(flops, self._once, *((0.0, 0.0) if beside else self._alone(rounds)))

    def sums(self, flops: float, features: int = 0, *, beside: bool = False) -> OverlappedWork:
        """Return a product with an all-reduce, or a reduce-scatter with sequence parallelism."""
        if self.job.sequence_parallel or self.tensor == 1:
            return self.gathers(flops, features, beside=beside)
        rounds = self._rounds(features)
        products, transfers = (0.0, 0.0) if beside else self._alone(rounds)
        if rounds == 1 and swaps_full_sums(self._bytes, self.tensor):
            return OverlappedWork(flops, (self.tensor - 1) * self._bytes, products, transfers)
        return OverlappedWork(
            flops, 2 * self._once, products, (1 + transfers) / 2
        )  # sums are gathered at the end

    def _rounds(self, features: int) -> int:
        return collective_rounds(self.job.tokens_at_once(), features, self.tensor, self.processors)

    def _alone(self, rounds: int) -> tuple[float, float]:
        """Return the fractions of products and transfers that are alone, see `step_time`."""
        return 1 / rounds, (self.tensor / rounds - 1) / (self.tensor - 1)

    @property
    def _once(self) -> float:
        return self._bytes * (self.tensor - 1) / self.tensor

    @property
    def _bytes(self) -> int:
        return self.job.tokens_at_once() * self.job.model.hidden_size * self.job.element


def block_forward(job: Job, tensor: int, processors: int) -> list[OverlappedWork]:
    """Return the work of a block's forward. processors: of a GPU"""
    moving, flops = _TransferTimes(job, tensor, processors), FlopsOfBlock.of(job, tensor)
    keys, hidden = job.kv_heads * job.head_size // tensor, job.model.hidden_size
    return [
        moving.gathers(flops.qkv, features=keys),  # the narrowest of three products
        *shared_heads(job, tensor),
        OverlappedWork(flops.attention),
        moving.sums(flops.output, features=hidden),
        moving.gathers(flops.up, features=job.ffn // tensor),
        moving.sums(flops.down, features=hidden),
    ]


def block_backward(job: Job, tensor: int, processors: int) -> list[OverlappedWork]:
    """Return the work of a block's backward, recomputation first; dgrad and wgrad cost a product each."""
    moving, flops = _TransferTimes(job, tensor, processors), FlopsOfBlock.of(job, tensor)
    recomputed = {
        "none": [],
        "selective": [OverlappedWork(flops.attention)],
        "full": block_forward(job, tensor, processors),
    }
    return [
        *recomputed[job.recompute],
        moving.gathers(flops.down, features=job.ffn // tensor),  # dy, for dgrad
        moving.gathers(flops.down, beside=True),  # x, beside wgrad
        OverlappedWork(flops.up),
        moving.sums(flops.up, beside=True),  # dx, beside wgrad
        moving.gathers(flops.output, features=job.model.num_heads * job.head_size // tensor),
        OverlappedWork(flops.output),
        OverlappedWork(2.5 * flops.attention),
        *shared_heads(job, tensor),
        moving.gathers(flops.qkv, beside=True),  # x, beside dgrad
        moving.sums(flops.qkv, beside=True),  # dx, beside wgrad
    ]


def embedding_work(job: Job, tensor: int) -> list[OverlappedWork]:
    """Return the work of the embedding's forward and backward."""
    moving = _TransferTimes(job, tensor)
    return [moving.sums(0.0), moving.gathers(0.0)]


def head_work(job: Job, tensor: int) -> list[OverlappedWork]:
    """Return the work of the head's forward and backward, where transfers and products do not overlap."""
    moving = _TransferTimes(job, tensor)
    product = 2.0 * job.tokens_at_once() * job.model.hidden_size * job.vocabulary_rows(tensor)
    losses = OverlappedWork(sent=12.0 * job.tokens_at_once() * (tensor - 1))
    return [moving.gathers(0.0), OverlappedWork(3 * product), losses, moving.sums(0.0)]


def message_between_stages(job: Job, tensor: int) -> float:
    """Return the bytes that a rank sends to the next stage, or back, for one microbatch."""
    full = job.tokens_at_once() * job.model.hidden_size * job.element
    return full / tensor if job.is_split(tensor) else full


@dataclass(frozen=True, slots=True)
class FlopsOfBlock:
    qkv: float
    attention: float
    output: float
    up: float
    down: float

    @staticmethod
    def of(job: Job, tensor: int) -> FlopsOfBlock:
        model = job.model
        product = 2.0 * job.tokens_at_once() * model.hidden_size / tensor  # for each other feature
        of_heads = model.num_heads * job.head_size
        return FlopsOfBlock(
            qkv=product * (of_heads + 2 * job.kv_heads * job.head_size),
            attention=2.0 * job.tokens_at_once() * job.tokens * of_heads / tensor,
            output=product * of_heads,
            up=product * job.ffn * job.ups,
            down=product * job.ffn,
        )


def shared_heads(job: Job, tensor: int) -> list[OverlappedWork]:
    """Return the gather of keys and values if a rank computes a shard of a head only; nothing hides it."""
    if job.kv_heads >= tensor:
        return []
    features = 2 * job.kv_heads * job.head_size
    return [OverlappedWork(sent=job.tokens_at_once() * features * job.element * (tensor - 1) / tensor)]


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


def step_time(job: Job, layout: RankLayout, machine: Hardware) -> StepTime:
    stages = layout.pipeline
    turns = [_turn(job, layout, machine, stage) for stage in range(stages)]
    compute, waiting = max(turns, key=sum)
    once = max(_once_a_step(job, layout, machine, stage) for stage in range(stages))
    count = job.micro_batches(layout)
    return StepTime(
        compute=count * compute,
        exposed=count * waiting + once + _tied_table(job, layout, machine),
        bubble=(stages - 1) * (compute + waiting),
    )


def _turn(job: Job, layout: RankLayout, machine: Hardware, stage: int) -> tuple[float, float]:
    """Return seconds of products and of waits, for forward and backward of one microbatch on a stage."""
    tensor, stages = layout.tensor, layout.pipeline
    processors = machine.gpu.processors
    block = block_forward(job, tensor, processors) + block_backward(job, tensor, processors)
    compute, waiting = _seconds(block, machine, tensor)
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


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory and time of a layout."""

    layout: RankLayout
    memory: MemoryUse  # on a GPU of the stage that needs most
    time: StepTime
    excess: int  # bytes above the usable memory; negative: bytes left

    @property
    def fits(self) -> bool:
        return self.excess <= 0


@dataclass(frozen=True, slots=True)
class Advice:
    """All layouts, each in one of these lists."""

    fitting: list[Prediction]  # the fastest first
    too_large: list[Prediction]  # the least excess first
    impossible: list[tuple[RankLayout, str]]  # and the error of the sizes


def advise(job: Job, machine: Hardware, world_size: int, most_tensor: int) -> Advice:
    for name, count in {"world_size": world_size, "max_tp": most_tensor}.items():
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    predictions, impossible = [], []
    for layout in layouts(world_size, most_tensor):
        try:
            job.require_split(layout)
        except ValueError as error:
            impossible.append((layout, str(error)))
        else:
            predictions.append(predict(job, machine, layout))
    return Advice(
        fitting=sorted(
            (found for found in predictions if found.fits), key=lambda p: (p.time.total, p.memory.peak)
        ),
        too_large=sorted((found for found in predictions if not found.fits), key=lambda p: p.excess),
        impossible=impossible,
    )


def predict(job: Job, machine: Hardware, layout: RankLayout) -> Prediction:
    memory = memory_of(job, layout)
    time = step_time(job, layout, machine)
    return Prediction(layout, memory, time, memory.peak - machine.usable_memory)
