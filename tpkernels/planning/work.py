"""FLOPs and bytes sent by a rank for one microbatch, in the order of the operators.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.comm.schedule import collective_rounds, swaps_full_sums
from tpkernels.planning.job import Job


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
