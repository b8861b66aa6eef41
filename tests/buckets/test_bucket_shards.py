"""What a sharded optimizer needs: parts of parameters and of what is like them, and the way back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import chain, expected_gradients, loss_of, own_batch, wrap
from tests.checks import error_of
from tpkernels.buckets import gradients as buckets_module

on_two_and_four = pytest.mark.parametrize("pool", ["ranks2", "ranks4"])


def sharded_training():
    module, whole = chain(), chain()
    buckets = wrap(module, reduce="reduce_scatter")
    shards = [nn.Parameter(shard) for shard in buckets.parameter_shards()]
    sharded = torch.optim.AdamW(shards, lr=0.05)
    unsharded = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for step in range(4):
        buckets.zero()
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
        for shard, gradient in zip(shards, buckets.gradient_shards(), strict=True):
            shard.grad = gradient
        sharded.step()
        buckets.gather_parameters([shard.detach() for shard in shards])
        for parameter, gradient in zip(whole.parameters(), expected_gradients(whole, (step,)), strict=True):
            parameter.grad = gradient
        unsharded.step()
        torch.testing.assert_close(list(module.parameters()), list(whole.parameters()))
    elements = sum(bucket.numel() for bucket in buckets.buckets)
    assert sum(shard.numel() for shard in shards) == elements // dist.get_world_size()
    with pytest.raises(ValueError, match="of the sizes of parameter_shards"):
        buckets.gather_parameters(shards[:-1])


@on_two_and_four
def test_sharded_optimizer_trains_like_an_unsharded_one(pool, request, way):
    request.getfixturevalue(pool).run(sharded_training)


def cut_and_joined():
    module = chain(3)
    buckets = wrap(module, reduce="reduce_scatter")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(parameter.shape, generator=generator) for parameter in module.parameters()]
    shards = buckets.shard(tensors)
    for parameter, tensor in zip(module.parameters(), tensors, strict=True):
        parameter.grad = tensor.double()
    buckets.finish()  # every rank brings the same, so that their mean is just that
    for shard, gradient in zip(shards, buckets.gradient_shards(), strict=True):
        assert torch.equal(shard.double(), gradient)
    joined = buckets.unshard(shards)
    assert {tensor.dtype for tensor in joined} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(joined, tensors, strict=True))
    return error_of(buckets.shard, tensors[1:]), error_of(buckets.unshard, shards[1:])


@on_two_and_four
def test_what_is_cut_like_gradients_is_joined_again(pool, request, way):
    for cut, join in request.getfixturevalue(pool).run(cut_and_joined):
        assert cut == ("ValueError", "tensors: expected one for each of 6 parameters, of its shape")
        assert join[0] == "ValueError"


def gathered_in_turns(at_once):
    """(parameters, how many buckets went into each gather)"""
    module = chain(3)
    shards_of = wrap(module, reduce="reduce_scatter")
    counts = []
    usual = buckets_module.bucketed_all_gather, buckets_module.GATHERED_BYTES

    def counting(shards, group):
        counts.append(len(shards))
        return usual[0](shards, group)

    buckets_module.bucketed_all_gather, buckets_module.GATHERED_BYTES = counting, at_once
    try:
        shards_of.gather_parameters([2 * shard for shard in shards_of.parameter_shards()])
    finally:
        buckets_module.bucketed_all_gather, buckets_module.GATHERED_BYTES = usual
    return [parameter.detach() for parameter in module.parameters()], counts, len(shards_of.buckets)


def test_a_few_buckets_are_gathered_at_once(ranks2):
    """New weights of a whole model beside the old ones would be most of a GPU's memory."""
    expected = [2 * parameter.detach() for parameter in chain(3).parameters()]
    for at_once in (1, 2**28):
        for values, counts, buckets in ranks2.run(gathered_in_turns, at_once):
            torch.testing.assert_close(values, expected)
            assert buckets > 1
            assert counts == ([1] * buckets if at_once == 1 else [buckets])
