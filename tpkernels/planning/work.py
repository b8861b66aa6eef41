"""What a rank computes and sends for one microbatch, in the order of the operators.

R tensor-parallel ranks, t tokens of h features in e bytes, s tokens in a sequence, a heads of d features of
which g have keys and values, f features in the MLP (`ups` products into it, two of a gated unit), V rows of
vocabulary a rank. U = t h e (R - 1) / R is what a rank sends in a gather of all tokens, or in a
reduce-scatter; an all-reduce is one after the other, or with little data t h e (R - 1) at once. With and
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
reduced. Recomputation repeats the forward of a block, or of attention alone, transfers included.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.comm.schedule import parts_of_shard, swaps_whole_parts
from tpkernels.planning.job import Job


@dataclass(frozen=True, slots=True)
class Work:
    """Products, and the transfers that they hide."""

    flops: float = 0.0
    sent: float = 0.0  # bytes, by each rank, to the others of its tensor group
    chunks: int = 1  # that products and transfers are cut into
    ends_with_sum: bool = False  # the last chunk is reduced and gathered when all products are done


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Of all tokens between the ranks of a tensor group."""

    job: Job
    tensor: int

    def gathers(self, flops: float, count: int = 1) -> Work:
        """Under sequence parallelism so many gathers or reduce-scatters beside products, else none."""
        sent = count * self._once if self.job.sequence_parallel else 0.0
        return Work(flops, sent, self.tensor * self._parts)

    def sums(self, flops: float, scatters: int = 1) -> Work:
        """An all-reduce beside products, or under sequence parallelism so many of its halves."""
        if self.job.sequence_parallel:
            return self.gathers(flops, scatters)
        is_small = swaps_whole_parts(self._bytes, self.tensor)
        sent = (self.tensor - 1) * self._bytes if is_small else 2 * self._once
        return Work(flops, sent, self._parts, ends_with_sum=True)

    @property
    def _once(self) -> float:
        return self._bytes * (self.tensor - 1) / self.tensor

    @property
    def _bytes(self) -> int:
        return self.job.tokens_at_once() * self.job.model.hidden_size * self.job.element

    @property
    def _parts(self) -> int:
        return parts_of_shard(self._bytes // self.tensor)


def block_forward(job: Job, tensor: int) -> list[Work]:
    moving, flops = _Transfers(job, tensor), FlopsOfBlock.of(job, tensor)
    return [
        moving.gathers(flops.qkv),
        *_shared_heads(job, tensor),
        Work(flops.attention),
        moving.sums(flops.output),
        moving.gathers(flops.up),
        moving.sums(flops.down),
    ]


def block_backward(job: Job, tensor: int) -> list[Work]:
    """What is computed again comes first."""
    moving, flops = _Transfers(job, tensor), FlopsOfBlock.of(job, tensor)
    again = {"none": [], "selective": [Work(flops.attention)], "full": block_forward(job, tensor)}
    return [
        *again[job.recompute],
        moving.sums(2 * (flops.up + flops.down), scatters=3),
        moving.gathers(2 * flops.output),
        Work(2.5 * flops.attention),
        *_shared_heads(job, tensor),
        moving.sums(2 * flops.qkv, scatters=2),
    ]


def embedding_work(job: Job, tensor: int) -> list[Work]:
    """Forward and backward."""
    moving = _Transfers(job, tensor)
    return [moving.sums(0.0), moving.gathers(0.0)]


def head_work(job: Job, tensor: int) -> list[Work]:
    """Forward and backward. The transfers wait for the products, or these for them."""
    moving = _Transfers(job, tensor)
    product = 2.0 * job.tokens_at_once() * job.model.hidden_size * job.vocabulary_rows(tensor)
    losses = Work(sent=12.0 * job.tokens_at_once() * (tensor - 1))
    return [moving.gathers(0.0), Work(3 * product), losses, moving.sums(0.0)]


def message_between_stages(job: Job, tensor: int) -> float:
    """Bytes that a rank sends to the next stage, or back, for one microbatch."""
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
        product = 2.0 * job.tokens_at_once() * model.hidden_size / tensor  # a feature on the other side
        of_heads = model.num_heads * job.head_size
        return FlopsOfBlock(
            qkv=product * (of_heads + 2 * job.kv_heads * job.head_size),
            attention=2.0 * job.tokens_at_once() * job.tokens * of_heads / tensor,
            output=product * of_heads,
            up=product * job.ffn * job.ups,
            down=product * job.ffn,
        )


def _shared_heads(job: Job, tensor: int) -> list[Work]:
    """Keys and values, where a rank has computed a shard of a head only. Nothing hides it."""
    if job.kv_heads >= tensor:
        return []
    features = 2 * job.kv_heads * job.head_size
    return [Work(sent=job.tokens_at_once() * features * job.element * (tensor - 1) / tensor)]
