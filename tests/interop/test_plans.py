"""Models are split without a plan of the caller's: by one that they bring, or by names of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.interop.plan_cases import by_names, from_the_meta_device, refusals, split_by_its_own_plan
from tpkernels.interop.parallelize.hf_modules import is_linear
from tpkernels.interop.parallelize.plan import heads_read


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_a_model_that_brings_a_plan_is_the_whole_one(ranks, kv_heads, request):
    pool = request.getfixturevalue(f"ranks{ranks}")
    assert pool.run(split_by_its_own_plan, kv_heads) == [[]] * ranks


def test_it_is_built_without_memory(ranks2):
    assert ranks2.run(from_the_meta_device) == [[], []]


def test_layers_are_known_by_their_names(ranks2):
    assert ranks2.run(by_names, False) == [([], [])] * 2


def test_the_next_plan_is_taken_where_one_is_wrong(ranks2):
    (wrong, told), other = ranks2.run(by_names, True)
    assert (wrong, other) == ([], ([], []))
    assert "'middle' does not take this rank's features" in told[0]
    assert "a plan by names of layers (gathered) does" in told[0]


def test_unknown_styles_and_layers_are_refused(ranks2):
    first, second = ranks2.run(refusals)
    assert first == second


class OfOwnWords(nn.Linear):
    def forward(self, x):
        return x @ self.weight.T + self.bias


class CutOff(nn.Linear):
    def forward(self, x):
        return super().forward(x.clamp(-100, 100))


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.001


class Added(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.more = nn.Parameter(torch.zeros(()))  # a number that will not stay zero


@pytest.mark.parametrize(
    ("kind", "linear"),
    [(nn.Linear, True), (OfOwnWords, True), (CutOff, False), (Scaled, False), (Added, False)],
)
def test_a_derived_layer_is_linear_if_it_computes_what_a_linear_one_does(kind, linear):
    assert is_linear(kind(8, 12)) is linear


@pytest.mark.parametrize(
    ("heads", "queries", "ranks"),
    [(1, 4, 4), (2, 8, 4), (2, 8, 2), (3, 12, 2), (3, 12, 4), (6, 12, 4), (3, 6, 2)],
)
def test_ranks_compute_as_many_heads_and_read_the_right_ones(heads, queries, ranks):
    counts = set()
    for rank in range(ranks):
        read = heads_read(rank, heads=heads, queries=queries, ranks=ranks)
        counts.add(len(read))
        own = range(rank * queries // ranks, (rank + 1) * queries // ranks)
        for place, query in enumerate(own):
            assert read[place * len(read) // len(own)] == query * heads // queries
    assert len(counts) == 1
