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

from tpkernels.comm.schedule import collective_rounds, swaps_full_sums
from tpkernels.planning.job import Job


@dataclass(frozen=True, slots=True)
class OverlappedWork:
    """Products, and the transfers that they hide."""

    flops: float = 0.0
    sent: float = 0.0  # bytes, by each rank, to the others of its tensor group
    products_alone: float = 1.0  # the share of them that nothing travels beside
    transfers_alone: float = 1.0  # the share of them that nothing is computed beside


@dataclass(frozen=True, slots=True)
class _TransferTimes:
    """Of all tokens between the ranks of a tensor group, over c10d on GPUs."""

    job: Job
    tensor: int
    processors: int = 1  # of a GPU, for products

    def gathers(self, flops: float, features: int = 0, *, beside: bool = False) -> OverlappedWork:
        """Under sequence parallelism a gather or a reduce-scatter, else no transfer.

        features: width of the product that takes or gives rows in rounds; 0: there is none
        beside: the flops are of a product that does not need these rows, and hides them as a whole
        """
        if not self.job.is_split(self.tensor):
            return OverlappedWork(flops)
        rounds = self._rounds(features)
        return OverlappedWork(flops, self._once, *((0.0, 0.0) if beside else self._alone(rounds)))

    def sums(self, flops: float, features: int = 0, *, beside: bool = False) -> OverlappedWork:
        """An all-reduce, or under sequence parallelism the half that reduces; arguments as of `gathers`."""
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
        """Shares of products and transfers, see `step_time`."""
        return 1 / rounds, (self.tensor / rounds - 1) / (self.tensor - 1)

    @property
    def _once(self) -> float:
        return self._bytes * (self.tensor - 1) / self.tensor

    @property
    def _bytes(self) -> int:
        return self.job.tokens_at_once() * self.job.model.hidden_size * self.job.element


def block_forward(job: Job, tensor: int, processors: int) -> list[OverlappedWork]:
    """processors: of a GPU"""
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
    """What is computed again comes first. dgrad and wgrad are as large as the product in forward."""
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
    """Forward and backward."""
    moving = _TransferTimes(job, tensor)
    return [moving.sums(0.0), moving.gathers(0.0)]


def head_work(job: Job, tensor: int) -> list[OverlappedWork]:
    """Forward and backward. The transfers wait for the products, or these for them."""
    moving = _TransferTimes(job, tensor)
    product = 2.0 * job.tokens_at_once() * job.model.hidden_size * job.vocabulary_rows(tensor)
    losses = OverlappedWork(sent=12.0 * job.tokens_at_once() * (tensor - 1))
    return [moving.gathers(0.0), OverlappedWork(3 * product), losses, moving.sums(0.0)]


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


def shared_heads(job: Job, tensor: int) -> list[OverlappedWork]:
    """Keys and values, where a rank has computed a shard of a head only. Nothing hides it."""
    if job.kv_heads >= tensor:
        return []
    features = 2 * job.kv_heads * job.head_size
    return [OverlappedWork(sent=job.tokens_at_once() * features * job.element * (tensor - 1) / tensor)]
