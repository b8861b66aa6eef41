"""What a sharded optimizer needs: parts of parameters and of what is like them, and the way back."""

from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import chain, expected_gradients, step, wrap
from tests.buckets.ways import both_ways, on_ranks
from tpkernels.buckets import gradients as buckets_module

WEIGHT = 512  # bytes of a layer's weight in `chain`, and of its bias with what aligns it


@both_ways
@on_ranks(2, 4)
def test_sharded_optimizer_trains_like_an_unsharded_one():
    module, whole = chain(), chain()
    buckets = wrap(module, reduce="reduce_scatter")
    shards = [nn.Parameter(shard) for shard in buckets.parameter_shards()]
    sharded = torch.optim.AdamW(shards, lr=0.05)
    unsharded = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for number in range(4):
        step(module, buckets, number)
        for shard, gradient in zip(shards, buckets.gradient_shards(), strict=True):
            shard.grad = gradient
        sharded.step()
        buckets.gather_parameters([shard.detach() for shard in shards])
        for parameter, gradient in zip(whole.parameters(), expected_gradients(whole, (number,)), strict=True):
            parameter.grad = gradient
        unsharded.step()
        torch.testing.assert_close(list(module.parameters()), list(whole.parameters()))
    elements = sum(bucket.numel() for bucket in buckets.buckets)
    assert sum(shard.numel() for shard in shards) == elements // dist.get_world_size()
    with pytest.raises(ValueError, match="of the sizes of parameter_shards"):
        buckets.gather_parameters(shards[:-1])


@on_ranks(2, 4)
def test_what_is_cut_like_gradients_is_joined_again():
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
    with pytest.raises(ValueError, match="tensors: expected one for each of 6 parameters, of its shape"):
        buckets.shard(tensors[1:])
    with pytest.raises(ValueError, match="expected"):
        buckets.unshard(shards[1:])


@on_ranks(2)
def test_a_few_buckets_are_gathered_at_once():
    """New weights of a whole model beside the old ones would be most of a GPU's memory."""
    for at_once in (1, 2**28):
        module = chain(3)
        shards_of = wrap(module, reduce="reduce_scatter")
        gather = Mock(wraps=buckets_module.bucketed_all_gather)
        with patch.multiple(buckets_module, bucketed_all_gather=gather, GATHERED_BYTES=at_once):
            shards_of.gather_parameters([2 * shard for shard in shards_of.parameter_shards()])
        for parameter, before in zip(module.parameters(), chain(3).parameters(), strict=True):
            torch.testing.assert_close(parameter, 2 * before)
        count = len(shards_of.buckets)
        assert count > 1
        gathered = [len(call.args[0]) for call in gather.call_args_list]
        assert gathered == ([1] * count if at_once == 1 else [count])


def trained(reduce, smallest, bucket_bytes):
    """(elements of buckets, parameters after three steps)"""
    module = chain(12)
    with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
        buckets = wrap(module, reduce=reduce, bucket_bytes=bucket_bytes)
    for number in range(3):
        step(module, buckets, number)
        with torch.no_grad():
            shards = zip(buckets.parameter_shards(), buckets.gradient_shards(), strict=True)
            buckets.gather_parameters([shard - 0.01 * gradient for shard, gradient in shards])
    return [bucket.numel() for bucket in buckets.buckets], [p.detach() for p in module.parameters()]


@both_ways
@pytest.mark.parametrize("reduce", ["all_reduce", "reduce_scatter"])
def test_sizes_do_not_change_a_bit_with_two_ranks(ranks2, reduce):
    growing, others = ranks2.run(trained, reduce, WEIGHT, 8 * WEIGHT)
    assert growing[0] == others[0]
    assert len(growing[0]) == 9
    assert 4 * growing[0][0] <= max(growing[0]) >= 4 * growing[0][-1]
    alike = ranks2.run(trained, reduce, 8 * WEIGHT, 8 * WEIGHT)[0]
    assert alike[0] == [512] * 3
    assert all(map(torch.equal, growing[1], alike[1]))
    assert not any(map(torch.equal, growing[1], chain(12).parameters()))
