"""Sizes of buckets: the same on all ranks, and no matter to results."""

from unittest.mock import patch

import pytest
import torch

from tests.buckets.golden import chain, loss_of, own_batch, wrap
from tpkernels.buckets import gradients as buckets_module

WEIGHT = 512  # bytes of a layer's weight in `chain`, and of its bias with what aligns it


def trained(reduce, smallest, bucket_bytes):
    """(elements of buckets, parameters after three steps)"""
    module = chain(12)
    with patch.object(buckets_module, "SMALLEST_BUCKET_BYTES", smallest):
        buckets = wrap(module, reduce=reduce, bucket_bytes=bucket_bytes)
    for step in range(3):
        buckets.zero()
        loss_of(module(own_batch(step))).backward()
        buckets.finish()
        with torch.no_grad():
            shards = zip(buckets.parameter_shards(), buckets.gradient_shards(), strict=True)
            buckets.gather_parameters([shard - 0.01 * gradient for shard, gradient in shards])
    return [bucket.numel() for bucket in buckets.buckets], [p.detach() for p in module.parameters()]


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
