"""The bucketed collectives do what a loop of plain ones does."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.golden import refused_on_rank_1
from tests.buckets.ways import on_ranks
from tests.checks import error_of
from tpkernels import bucketed_all_gather, bucketed_all_reduce_, bucketed_broadcast_, bucketed_reduce_scatter
from tpkernels.buckets import collectives
from tpkernels.comm.groups import start_together

pytestmark = pytest.mark.way("c10d")  # which lists always take

SHAPES = [(4, 3), (8,), (0, 5), (4, 1, 2), (16, 16), (4,), (12, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.float64, torch.uint8]
ONE_BUCKET, FEW, EACH = 10**6, 400, 1  # bytes
each_size = pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, FEW, EACH], ids=["one", "few", "each"])


def mixed_tensors(dtypes=DTYPES, whole=False):
    """Different on each rank. whole: small whole numbers, whose sums are exact in any order"""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = []
    for index, shape in enumerate(SHAPES * 2):
        values = torch.randint(0, 9, shape, generator=generator)
        dtype = dtypes[index % len(dtypes)]
        if not whole and dtype.is_floating_point:
            values = torch.randn(shape, generator=generator)
        tensors.append(values.to(dtype))
    tensors.append(torch.randn(6, 8, generator=generator).T)  # not contiguous
    tensors.append(torch.randn(8, 4, generator=generator)[:, ::2])
    return tensors


OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def contiguous(tensors):
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


@pytest.mark.parametrize("op", OPS)
@on_ranks(2, 4)
def test_all_reduce_equals_a_loop(op):
    two = dist.get_world_size() == 2
    dtypes = DTYPES if op == "sum" else [dtype for dtype in DTYPES if dtype.is_floating_point]
    # With more than two ranks, gloo's order of additions depends on where in the buffer an element lies.
    for bucket_bytes, whole in ((ONE_BUCKET, not two), (FEW, not two), (EACH, False)):
        tensors = mixed_tensors(dtypes, whole)[: None if two else -2]
        expected = contiguous(tensors)
        for tensor in expected:
            dist.all_reduce(tensor, op=OPS[op])
        bucketed_all_reduce_(tensors, op=op, bucket_bytes=bucket_bytes)
        assert all(map(torch.equal, tensors, expected))


@each_size
@on_ranks(2, 4)
def test_broadcast_equals_a_loop(bucket_bytes):
    for src in range(dist.get_world_size()):
        tensors = mixed_tensors()
        expected = contiguous(tensors)
        for tensor in expected:
            dist.broadcast(tensor, src)
        bucketed_broadcast_(tensors, src, bucket_bytes=bucket_bytes)
        assert all(map(torch.equal, tensors, expected))


@each_size
@on_ranks(2, 4)
def test_all_gather_equals_a_loop(bucket_bytes):
    tensors = [*mixed_tensors(), torch.tensor(float(dist.get_rank()))]
    gathered = bucketed_all_gather(tensors, bucket_bytes=bucket_bytes)
    for tensor, result in zip(tensors, gathered, strict=True):
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        assert torch.equal(result, torch.cat(parts) if tensor.dim() else torch.stack(parts))
        assert result.is_contiguous()


@each_size
@pytest.mark.parametrize("op", OPS)
@on_ranks(2, 4)
def test_reduce_scatter_equals_a_loop(bucket_bytes, op):
    tensors = mixed_tensors(DTYPES if op == "sum" else [torch.float32, torch.bfloat16], whole=True)
    shards = bucketed_reduce_scatter(tensors, op=op, bucket_bytes=bucket_bytes)
    for total, shard in zip(contiguous(tensors), shards, strict=True):
        dist.all_reduce(total, op=OPS[op])
        own = total.tensor_split(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(shard, own, rtol=1e-6, atol=1e-6)
        assert shard.shape == own.shape


@on_ranks(4)
def test_subgroups():
    rank, group = dist.get_rank(), dist.new_group([1, 3])
    if rank not in (1, 3):
        words = f"expected a process group that rank {rank} is a member of"
        with pytest.raises(ValueError, match=words):
            bucketed_all_reduce_([torch.ones(1)], group)
        return
    tensor = torch.tensor([float(rank)])
    bucketed_broadcast_([tensor], 3, group)
    assert tensor.item() == 3.0
    bucketed_all_reduce_([tensor], group)
    assert tensor.item() == 6.0
    words = r"on ranks 1, 3: src: expected a rank of the group \[1, 3\], got 0"
    with pytest.raises(ValueError, match=words):
        bucketed_broadcast_([tensor], 0, group)


@on_ranks(2)
def test_empty_lists_leaves_and_unchanged_inputs():
    bucketed_all_reduce_([])
    bucketed_broadcast_([], 0)
    assert bucketed_all_gather([]) == []
    assert bucketed_reduce_scatter([]) == []
    leaf = torch.ones(3, requires_grad=True)
    bucketed_all_reduce_([leaf, torch.ones(2)])
    assert leaf.tolist() == [2.0] * 3
    unchanged = torch.ones(4, requires_grad=True)
    assert bucketed_reduce_scatter([unchanged])[0].tolist() == [2.0, 2.0]
    assert unchanged.tolist() == [1.0] * 4
    bucketed_all_reduce_([leaf], check=False)
    assert leaf.tolist() == [4.0] * 3


VALUE, TYPE = "ValueError", "TypeError"
ONES, MATRIX, BF16 = torch.ones(4), torch.ones(2, 2), torch.bfloat16
FP8, META = MATRIX.to(torch.float8_e4m3fn), torch.ones(2, 2, device="meta")
FLOAT = "'1' (2, 2) float32 on cpu"
WRONG = {  # what rank 1 brings, and what all are told
    "count": ([ONES], {}, VALUE, "rank 0 has 2; rank 1 has 1; the first that"),
    "shape": ([ONES, ONES], {}, VALUE, f"must bring the same, in the same order: rank 0 has {FLOAT}"),
    "dtype": ([ONES, MATRIX.to(BF16)], {}, VALUE, f"has {FLOAT}; rank 1 has '1' (2, 2) bfloat16 on cpu"),
    "strides": ([ONES, MATRIX.T], {}, VALUE, f"rank 1 has {FLOAT} strides (1, 2)"),
    "meta": ([ONES, META], {}, VALUE, "on rank 1: '1' is on the meta device"),
    "fp8": ([ONES, FP8], {}, TYPE, "'1' is torch.float8_e4m3fn; expected one of float64, float32, "),
    "bool": ([ONES, MATRIX.bool()], {}, TYPE, "on rank 1: '1' is torch.bool; expected one of"),
    "sparse": ([ONES, MATRIX.to_sparse()], {}, TYPE, "'1' is torch.sparse_coo; expected a dense tensor"),
    "expanded": ([torch.ones(1).expand(4), MATRIX], {}, VALUE, "'0' has elements that share memory"),
    "negated": ([torch._neg_view(torch.ones(4)), MATRIX], {}, VALUE, "'0' has torch's lazy negation"),
    "no tensor": ([ONES, 3.0], {}, TYPE, "on rank 1: '1': expected a tensor, got float"),
    "op": ([ONES, MATRIX], {"op": "max"}, VALUE, "on rank 1: op: expected 'sum' or 'avg', got 'max'"),
    "bytes": ([ONES, MATRIX], {"bucket_bytes": 0}, VALUE, "bucket_bytes: expected at least one byte, got 0"),
}


@on_ranks(2)
def test_what_one_rank_gets_wrong_all_are_told():
    for case, (bad, options, kind, words) in WRONG.items():
        good = [torch.ones(4), torch.ones(2, 2)]
        call = (bad, options) if dist.get_rank() == 1 else (good, {})
        told = refused_on_rank_1(bucketed_all_reduce_, call[0], **call[1])
        assert told[0] == kind, case
        assert words in told[1], case
        assert all(bool((tensor == 1).all()) for tensor in good)  # nothing was sent


@on_ranks(2)
def test_what_every_rank_gets_wrong_is_told():
    dtypes, first = "'0' is torch.int64; expected one of float64, float32, float16, bfloat16", "'0' has shape"
    for error, words in (
        (error_of(bucketed_reduce_scatter, [torch.ones(3)]), f"{first} (3,); expected a first dimension"),
        (error_of(bucketed_reduce_scatter, [torch.ones(3)]), "dimension that 2 ranks can share evenly"),
        (error_of(bucketed_reduce_scatter, [torch.tensor(1.0)]), f"{first} (); expected a first dimension"),
        (error_of(bucketed_all_reduce_, [torch.ones(3).long()], op="avg"), dtypes),
        (error_of(bucketed_all_reduce_, [torch.ones(3).short()], check=False), "'0' is torch.int16"),
        (error_of(bucketed_all_reduce_, [torch.ones(1)], "world"), "got 'world'"),
    ):
        assert words in error[1]


@on_ranks(2)
def test_a_backward_that_has_saved_what_was_overwritten_raises():
    for overwrite in (bucketed_all_reduce_, lambda tensors: bucketed_broadcast_(tensors, 0)):
        for count in (1, 2):
            x = torch.ones(3, requires_grad=True)
            saved = x.exp()
            overwrite([saved, torch.ones(1)][:count])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.sum().backward()


@on_ranks(2)
def test_all_buckets_of_a_call_are_one_launch():
    together = []

    def noted(group, device, starts):
        together.append(len(starts))
        return start_together(group, device, starts)

    tensors = [torch.ones(4, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)] * 2
    with patch.object(collectives, "start_together", noted):
        bucketed_all_reduce_(tensors)
        bucketed_broadcast_(tensors, 0)
        bucketed_all_gather(tensors)
        bucketed_reduce_scatter(tensors)
    assert together == [3, 3, 3, 3]  # a bucket of each dtype
