"""Embedding and losses as layers: one seed and one training, however many ranks share the vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.checks import error_of
from tests.layers import vocabulary_cases as cases
from tests.layers.worlds import posing
from tpkernels import VocabParallelEmbedding, vocab_parallel_cross_entropy


@pytest.mark.parametrize(("world", "tensor"), [("ranks1", 1), ("ranks2", 2), ("ranks4", 4), ("ranks4", 2)])
def test_training_is_the_unsharded_one(request, world, tensor):
    for wrong in request.getfixturevalue(world).run(cases.training_is_the_unsharded_one, tensor):
        assert not wrong


@pytest.mark.parametrize("world", ["ranks1", "ranks2"])
def test_embedding_keeps_its_promises(request, world):
    for kept in request.getfixturevalue(world).run(cases.behaviour):
        assert all(kept.values()), kept


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_are_rows_of_one_table_and_zeros(ranks, unit):
    torch.manual_seed(5)
    whole = nn.init.xavier_normal_(torch.empty(7, 4))
    shards = []
    for rank in range(ranks):
        with posing(rank, ranks):
            torch.manual_seed(5)
            layer = VocabParallelEmbedding(7, 4, divisible_by=unit)
        assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, 0)
        assert layer.weight.partition_stride == 1
        assert layer.num_embeddings_per_partition == len(layer.weight)
        assert len(layer.weight) % unit == 0
        assert layer.vocab_start_index == sum(map(len, shards))
        shards.append(layer.weight.detach())
    table = torch.cat(shards)
    assert torch.equal(table[:7], whole)
    assert not table[7:].any()


def test_layer_on_the_meta_device_is_filled_later():
    with posing(1, 2):
        torch.manual_seed(5)
        layer = VocabParallelEmbedding(7, 4, padding_idx=5, device="meta").to_empty(device="cpu")
        layer.reset_parameters()
        assert layer.weight.tensor_model_parallel
        torch.manual_seed(5)
        again = VocabParallelEmbedding(7, 4, padding_idx=5)
    assert torch.equal(layer.weight, again.weight)
    assert not layer.weight[1].any()
    assert "7, 4, rank 1 of 2 holds rows 4 to 7" in repr(layer)


def test_mistakes_are_told_in_words():
    with posing(0, 2):
        assert "padding_idx from -7 to 6, got 7" in error_of(VocabParallelEmbedding, 7, 4, padding_idx=7)[1]
        assert "positive integer, got 0" in error_of(VocabParallelEmbedding, 0, 4)[1]
    logits, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    assert "not initialized" in error_of(vocab_parallel_cross_entropy, logits, target)[1]
