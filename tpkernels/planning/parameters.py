"""How many parameters a rank holds: shards of weights, and what is replicated.

R tensor-parallel ranks, h features, a heads of d features of which g have keys and values, f features in the
MLP, V rows of vocabulary a rank:

    block        sharded     (2 a + 2 g) d h / R + (2 or 3) f h / R, and the biases of column layers
                 replicated  two norms, the biases of row layers
    embedding    sharded     V h                      replicated  positions
    head         sharded     V h, unless it is tied   replicated  a norm

The first stage of a pipeline holds the embedding, the last one the head; a tied head is there a copy of the
embedding's table.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.planning.job import Job, RankLayout


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Elements on one rank."""

    sharded: int = 0
    replicated: int = 0
    marked: int = 0  # of the replicated: with partial gradients under sequence parallelism

    @property
    def total(self) -> int:
        return self.sharded + self.replicated

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(
            self.sharded + other.sharded, self.replicated + other.replicated, self.marked + other.marked
        )

    def times(self, count: int) -> ParameterCount:
        return ParameterCount(self.sharded * count, self.replicated * count, self.marked * count)


def parameters_of_stage(job: Job, layout: RankLayout, stage: int) -> ParameterCount:
    found = parameters_of_block(job, layout.tensor).times(job.model.num_layers // layout.pipeline)
    table = ParameterCount(sharded=table_elements(job, layout.tensor))
    first, last = stage == 0, stage == layout.pipeline - 1
    if first:
        found += table + _replicated((job.model.max_positions or 0) * job.model.hidden_size)
    if last:
        found += _norm(job)
        if not job.model.tied or not first:
            found += table
    return found


def parameters_of_block(job: Job, tensor: int) -> ParameterCount:
    model, hidden = job.model, job.model.hidden_size
    of_heads = (model.num_heads + 2 * job.kv_heads) * job.head_size  # queries, keys and values
    split = (of_heads + hidden) * hidden + (job.ups + 1) * job.ffn * hidden
    replicated = 0
    if model.bias:
        split += of_heads + (job.ffn if job.ups == 1 else 0)  # a gated unit has no biases inside
        replicated += 2 * hidden
    return ParameterCount(sharded=split // tensor, replicated=replicated) + _norm(job).times(2)


def table_elements(job: Job, tensor: int) -> int:
    return job.vocabulary_rows(tensor) * job.model.hidden_size


def _norm(job: Job) -> ParameterCount:
    return _replicated(job.model.hidden_size * (2 if job.model.norm == "layer_norm" else 1))


def _replicated(elements: int) -> ParameterCount:
    return ParameterCount(replicated=elements, marked=elements)
