"""The bucketed collectives do what a loop of plain ones does."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checks import error_of
from tpkernels import (
    bucketed_all_gather,
    bucketed_all_reduce_,
    bucketed_broadcast_,
    bucketed_reduce_scatter,
)
from tpkernels.buckets import collectives
from tpkernels.comm.groups import start_together

pytestmark = pytest.mark.way("c10d")  # which lists always take

SHAPES = [(4, 3), (8,), (0, 5), (4, 1, 2), (16, 16), (4,), (12, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.float64, torch.uint8]
ONE_BUCKET, FEW, EACH = 10**6, 400, 1  # bytes


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


def all_reduces(bucket_bytes, op, whole):
    dtypes = DTYPES if op == "sum" else [dtype for dtype in DTYPES if dtype.is_floating_point]
    tensors = mixed_tensors(dtypes, whole)[: None if dist.get_world_size() == 2 else -2]
    expected = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for tensor in expected:
        dist.all_reduce(tensor, op={"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[op])
    bucketed_all_reduce_(tensors, op=op, bucket_bytes=bucket_bytes)
    for tensor, plain in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, plain)


@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, FEW, EACH], ids=["one", "few", "each"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_equals_a_loop(ranks2, bucket_bytes, op):
    ranks2.run(all_reduces, bucket_bytes, op, False)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_equals_a_loop_on_four_ranks(ranks4, op):
    # With more than two ranks, gloo's order of additions depends on where in the buffer an element lies.
    ranks4.run(all_reduces, ONE_BUCKET, op, True)
    ranks4.run(all_reduces, EACH, op, False)


def broadcasts(bucket_bytes):
    for src in range(dist.get_world_size()):
        tensors = mixed_tensors()
        expected = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for tensor in expected:
            dist.broadcast(tensor, src)
        bucketed_broadcast_(tensors, src, bucket_bytes=bucket_bytes)
        for tensor, plain in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, plain)


def gathers(bucket_bytes):
    tensors = [*mixed_tensors(), torch.tensor(float(dist.get_rank()))]
    gathered = bucketed_all_gather(tensors, bucket_bytes=bucket_bytes)
    for tensor, result in zip(tensors, gathered, strict=True):
        parts = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        assert torch.equal(result, torch.cat(parts) if tensor.dim() else torch.stack(parts))
        assert result.is_contiguous()


def reduce_scatters(bucket_bytes, op):
    dtypes = DTYPES if op == "sum" else [torch.float32, torch.bfloat16]
    tensors = mixed_tensors(dtypes, whole=True)
    for tensor, shard in zip(
        tensors, bucketed_reduce_scatter(tensors, op=op, bucket_bytes=bucket_bytes), strict=True
    ):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op={"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[op])
        own = total.tensor_split(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(shard, own, rtol=1e-6, atol=1e-6)
        assert shard.shape == own.shape


@pytest.mark.parametrize("pool", ["ranks2", "ranks4"])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, FEW, EACH], ids=["one", "few", "each"])
def test_others_equal_loops(pool, bucket_bytes, request, way):
    ranks = request.getfixturevalue(pool)
    ranks.run(broadcasts, bucket_bytes)
    ranks.run(gathers, bucket_bytes)
    ranks.run(reduce_scatters, bucket_bytes, "sum")
    ranks.run(reduce_scatters, bucket_bytes, "avg")


def in_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return error_of(bucketed_all_reduce_, [torch.ones(1)], group)
    tensor = torch.tensor([float(dist.get_rank())])
    bucketed_broadcast_([tensor], 3, group)
    assert tensor.item() == 3.0
    bucketed_all_reduce_([tensor], group)
    assert tensor.item() == 6.0
    return error_of(bucketed_broadcast_, [tensor], 0, group)


def test_subgroups(ranks4):
    outsider, member, *_ = ranks4.run(in_a_subgroup)
    assert outsider[0] == "ValueError"
    assert "expected a process group that rank 0 is a member of" in outsider[1]
    assert member[0] == "ValueError"
    assert "on ranks 1, 3: src: expected a rank of the group [1, 3], got 0" in member[1]


def empty_and_leaves():
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


def test_empty_lists_leaves_and_unchanged_inputs(ranks2):
    ranks2.run(empty_and_leaves)


def refuse(case):
    """One call that rank 1 alone gets wrong; what both ranks are told."""
    wrong = dist.get_rank() == 1
    good = [torch.ones(4), torch.ones(2, 2)]
    bad = {
        "count": good[:1],
        "shape": [torch.ones(4), torch.ones(4)],
        "dtype": [torch.ones(4), torch.ones(2, 2, dtype=torch.bfloat16)],
        "strides": [torch.ones(4), torch.ones(2, 2).T],
        "meta": [torch.ones(4), torch.ones(2, 2, device="meta")],
        "fp8": [torch.ones(4), torch.ones(2, 2).to(torch.float8_e4m3fn)],
        "bool": [torch.ones(4), torch.ones(2, 2, dtype=torch.bool)],
        "sparse": [torch.ones(4), torch.ones(2, 2).to_sparse()],
        "expanded": [torch.ones(1).expand(4), torch.ones(2, 2)],
        "no tensor": [torch.ones(4), 3.0],
        "op": good,
        "bytes": good,
    }[case]
    options = {}
    if wrong and case == "op":
        options["op"] = "max"
    if wrong and case == "bytes":
        options["bucket_bytes"] = 0
    answer = error_of(bucketed_all_reduce_, bad if wrong else good, **options)
    assert all(bool((tensor == 1).all()) for tensor in good)  # nothing was sent
    return answer


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        (
            "count",
            "ValueError",
            "number of tensors: rank 0 has 2; rank 1 has 1; the first that",
        ),
        (
            "shape",
            "ValueError",
            "tensor 1: rank 0 has '1' (2, 2) float32 on cpu; rank 1 has '1' (4,)",
        ),
        (
            "dtype",
            "ValueError",
            "has '1' (2, 2) float32 on cpu; rank 1 has '1' (2, 2) bfloat16 on cpu",
        ),
        ("strides", "ValueError", "rank 1 has '1' (2, 2) float32 on cpu strides (1, 2)"),
        ("meta", "ValueError", "on rank 1: '1' is on the meta device"),
        ("fp8", "TypeError", "on rank 1: '1' is torch.float8_e4m3fn; expected one of float64, float32, "),
        ("bool", "TypeError", "on rank 1: '1' is torch.bool; expected one of"),
        ("sparse", "TypeError", "on rank 1: '1' is torch.sparse_coo; expected a dense tensor"),
        ("expanded", "ValueError", "on rank 1: '0' has elements that share memory"),
        ("no tensor", "TypeError", "on rank 1: '1': expected a tensor, got float"),
        ("op", "ValueError", "on rank 1: op: expected 'sum' or 'avg', got 'max'"),
        ("bytes", "ValueError", "on rank 1: bucket_bytes: expected at least one byte, got 0"),
    ],
)
def test_what_one_rank_gets_wrong_all_are_told(ranks2, case, kind, words):
    first, second = ranks2.run(refuse, case)
    assert first == second
    assert first[0] == kind
    assert words in first[1]


def refuse_everywhere():
    return [
        error_of(bucketed_reduce_scatter, [torch.ones(3)]),
        error_of(bucketed_reduce_scatter, [torch.tensor(1.0)]),
        error_of(bucketed_all_reduce_, [torch.ones(3, dtype=torch.int64)], op="avg"),
        error_of(bucketed_all_reduce_, [torch.ones(3, dtype=torch.int16)], check=False),
        error_of(bucketed_all_reduce_, [torch.ones(1)], "world"),
    ]


def test_refusals(ranks2):
    uneven, scalar, whole, unchecked, group = ranks2.run(refuse_everywhere)[0]
    assert "'0' has shape (3,); expected a first dimension that 2 ranks can share evenly" in uneven[1]
    assert "'0' has shape (); expected a first dimension" in scalar[1]
    assert "'0' is torch.int64; expected one of float64, float32, float16, bfloat16" in whole[1]
    assert "on rank 0: '0' is torch.int16" in unchecked[1]
    assert "got 'world'" in group[1]
    assert group[0] == "ValueError"


class _Coalescing:
    """A group whose backend sends several collectives in one launch."""

    supports_coalescing = True

    def __init__(self):
        self.calls = []

    def _get_backend(self, device):
        return self

    def _start_coalescing(self, device):
        self.calls.append("start")

    def _end_coalescing(self, device):
        self.calls.append("end")
        return "work of all"


def test_one_launch_where_the_backend_can():
    group = _Coalescing()
    works = start_together(group, torch.device("cpu"), [lambda g: g.calls.append("collective")] * 2)
    assert group.calls == ["start", "collective", "collective", "end"]
    assert works == ["work of all"]
    group.calls.clear()
    start_together(group, torch.device("cpu"), [lambda g: g.calls.append("send")])
    assert group.calls == ["start", "send", "end"]  # its receiver may be in a launch of several
    group.supports_coalescing = False
    assert start_together(group, torch.device("cpu"), [lambda g: math.pi] * 2) == [math.pi] * 2


def launches_of(calls):
    """How many collectives each call of ours starts together."""
    together = []

    def noted(group, device, starts):
        together.append(len(starts))
        return start_together(group, device, starts)

    tensors = [torch.ones(4, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)] * 2
    with patch.object(collectives, "start_together", noted):
        for call, arguments in calls:
            getattr(collectives, call)(tensors, *arguments)
    return together


def test_all_buckets_of_a_call_are_one_launch(ranks2):
    calls = [
        ("bucketed_all_reduce_", ()),
        ("bucketed_broadcast_", (0,)),
        ("bucketed_all_gather", ()),
        ("bucketed_reduce_scatter", ()),
    ]
    assert ranks2.run(launches_of, calls) == [[3, 3, 3, 3]] * 2  # a bucket of each dtype
