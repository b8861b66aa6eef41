"""Embedding and losses as layers: one seed and one training, however many ranks share the vocabulary."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks import error_of
from tests.layers.small import cut, drawn, joined_world
from tests.layers.worlds import posing
from tests.on_ranks import on_ranks
from tests.products import combined
from tpkernels import (
    ColumnParallelLinear,
    Recipe,
    VocabParallelEmbedding,
    initialize_model_parallel,
    linear_cross_entropy,
    linear_logprobs,
    ops,
    vocab_parallel_cross_entropy,
)
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region

VOCAB, FEATURES = 11, 8


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(VOCAB, (8, 3), generator=generator) for _ in range(2))
    target[0] = -100
    return ids, target


def unsharded(tied: bool) -> list[Tensor]:
    """The loss, and gradients of table and head."""
    torch.manual_seed(11)
    table, head = (nn.Parameter(nn.init.xavier_normal_(torch.empty(VOCAB, FEATURES))) for _ in range(2))
    weights = [table] if tied else [table, head]
    ids, target = batch()
    logits = F.linear(F.embedding(ids, table).tanh(), weights[-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in weights)]


def sharded(tied: bool, fused: bool, sequence_parallel: bool) -> list[Tensor]:
    """fused: head and loss by chunks; otherwise logits, and then their loss"""
    torch.manual_seed(11)
    options = {"divisible_by": 2, "sequence_parallel": sequence_parallel}
    table, head = (VocabParallelEmbedding(VOCAB, FEATURES, **options) for _ in range(2))
    layers = [table] if tied else [table, head]
    weight, (ids, target) = layers[-1].weight, batch()
    hidden, options = table(ids).tanh(), {"sequence_parallel": sequence_parallel}
    if fused:
        loss = linear_cross_entropy(hidden, weight, target, vocab_size=VOCAB, chunk_tokens=7, **options)
    else:
        options |= {"bias": False, "gather_output": False, "skip_weight_param_allocation": True}
        output = ColumnParallelLinear(FEATURES, table.split.padded_size, **options)
        losses = vocab_parallel_cross_entropy(output(hidden, weight)[0], target, vocab_size=VOCAB)
        loss = losses.sum() / (target != -100).sum()
    loss.backward()
    gradients = [gather_from_sequence_region(each.weight.grad, each.world.group) for each in layers]
    assert not any(gradient[VOCAB:].any() for gradient in gradients), "padding learns"
    return [loss.detach(), *(gradient[:VOCAB] for gradient in gradients)]


@combined
@pytest.mark.parametrize(("world", "tensor"), [("ranks1", 1), ("ranks4", 4), ("ranks4", 2)])
@on_ranks()
def test_tables_heads_and_losses_are_the_unsharded_ones(tensor, combined):
    joined_world(tensor)
    for tied, fused, sequence_parallel in combined([False, True], [False, True], [False, True]):
        ours, expected = sharded(tied, fused, sequence_parallel), unsharded(tied)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)


def seeded(**options: Any) -> VocabParallelEmbedding:
    torch.manual_seed(3)
    return VocabParallelEmbedding(VOCAB, FEATURES, **options)


@on_ranks(2)
def test_embedding_has_a_dtype_a_padding_row_and_copies():
    initialize_model_parallel(2)
    layer = seeded(padding_idx=-1, dtype=torch.bfloat16)
    ids, _ = batch()
    y = layer(ids)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 == layer.weight.grad.dtype
    assert not y[ids == VOCAB - 1].any()
    padding = VOCAB - 1 - layer.vocab_start_index
    if padding in range(layer.num_embeddings_per_partition):
        assert not layer.weight[padding].any()
        assert not layer.weight.grad[padding].any()
    copied = copy.deepcopy(layer)
    assert copied(ids).equal(y)
    assert copied.weight.tensor_model_parallel
    assert list(layer.state_dict()) == ["weight"]
    split = seeded(padding_idx=-1, dtype=torch.bfloat16, sequence_parallel=True)
    assert split(ids).equal(cut(0)(y))
    with pytest.raises(ValueError, match="expected ids from 0 to 10"):
        layer(ids + VOCAB)


@on_ranks(2)
def test_head_adds_its_gradient_to_main_grad():
    initialize_model_parallel(2)
    plain = seeded(sequence_parallel=True)
    fused = copy.deepcopy(plain)
    fused.weight.main_grad = torch.ones_like(fused.weight)
    fused.weight.grad_added_to_main_grad = False
    hidden, (_, target) = drawn((8, 3, FEATURES), 1), batch()
    for layer in (plain, fused):
        options = {"vocab_size": VOCAB, "gradient_accumulation_fusion": layer is fused}
        linear_cross_entropy(hidden, layer.weight, target, **options).backward()
    torch.testing.assert_close(fused.weight.main_grad - 1, plain.weight.grad, rtol=1e-5, atol=1e-6)
    assert fused.weight.grad_added_to_main_grad


@on_ranks(1)
def test_heads_hand_on_what_they_are_asked_for():
    x, w, ids, group = torch.randn(6, 8), torch.randn(9, 8), torch.arange(6), dist.group.WORLD
    plain, _ = linear_logprobs(x, w, ids, group=group)
    for options in ({"temperature": 0.5}, {"top_k": 8}, {"quantize": Recipe.rowwise()}):
        found, _ = linear_logprobs(x, w, ids, group=group, **options)
        assert torch.equal(found, ops.linear_logprobs(x, w, ids, group, **options)[0])
        assert not torch.equal(found, plain)
    loss = linear_cross_entropy(x, w, ids, group=group, reduction="none", quantize=Recipe.rowwise())
    assert torch.equal(-loss, found)


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
