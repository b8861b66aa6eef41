"""What goes wrong ends in an error that says so, on every rank: nothing hangs, nothing aborts."""

import copy
import io
import os
import pickle
import re
import signal
import warnings
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    assert_gradients,
    backward,
    chain,
    loss_of,
    own_batch,
    refused_on_rank_1,
    step,
    two_by_two,
    wrap,
)
from tests.buckets.ways import both_ways, on_ranks, under
from tests.checks import error_of
from tests.on_ranks import equal_on_all
from tests.patience import patient
from tests.programs import forked
from tests.ranks import RankFailure, RankPool
from tpkernels import GradientBuckets, bucketed_all_reduce_


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(*shape, dtype=dtype))


A, B, C = ("a", parameter(3)), ("b", parameter(2, 4)), ("c", parameter(2, 4))
GOOD = [A, B, C]
FP8 = torch.ones(2, 4).to(torch.float8_e4m3fn).requires_grad_()
C_IS = "rank 0 has 'c' (2, 4) float32 on cpu; rank 1 has"
WHOLE_BYTES = "bucket_bytes: expected a whole number of at least 1, got"
BETWEEN = "timeout: expected more than zero and less than a year, got"
DISAGREEMENTS = {  # what rank 1 brings, and what both ranks are told
    "count": (GOOD[:2], {}, "rank 0 has 3; rank 1 has 2; the first that some ranks lack is 'c' (2, 4)"),
    "shape": ([A, B, ("c", parameter(4, 2))], {}, f"{C_IS} 'c' (4, 2)"),
    "dtype": ([A, B, ("c", parameter(2, 4, dtype=torch.bfloat16))], {}, f"{C_IS} 'c' (2, 4) bfloat16"),
    # equal shapes: only the names tell
    "order": ([A, C, B], {}, "same order: rank 0 has 'b' (2, 4) float32 on cpu; rank 1 has 'c' (2, 4)"),
    "name": ([A, B, ("d", parameter(2, 4))], {}, f"in the same order: {C_IS} 'd' (2, 4)"),
    "options": (GOOD, {"average": False}, "average=False"),
    "fp8": ([("c", FP8)], {}, "on rank 1: 'c' is torch.float8_e4m3fn; expected one of float64, float32"),
    "computed": ([("c", C[1] * 2)], {}, "on rank 1: 'c' is computed from other tensors; expected a param"),
    "twice": ([A, B, ("b", C[1])], {}, "on rank 1: 2 parameters are called 'b'; names must differ"),
    "no pairs": ([A[1]], {}, "on rank 1: expected pairs of name and parameter, got Parameter"),
    "no module": (7, {}, "on rank 1: expected a module or pairs of name and parameter, got int"),
    "number": ([A, B, (2, C[1])], {}, "on rank 1: expected a name for each parameter, got 2"),
    "bytes": (GOOD, {"bucket_bytes": -1}, f"{WHOLE_BYTES} -1"),
    "part of a byte": (GOOD, {"bucket_bytes": 1.5}, f"{WHOLE_BYTES} 1.5"),
    "timeout": (GOOD, {"timeout": 5}, "timeout: expected a datetime.timedelta, got 5"),
    **{  # no clock counts these
        f"timeout {time}": (GOOD, {"timeout": time}, f"{BETWEEN} {time}")
        for time in (timedelta(0), timedelta(seconds=-1), timedelta.max)
    },
    "reduce": (GOOD, {"reduce": "gather"}, "expected 'all_reduce' or 'reduce_scatter', got 'gather'"),
    "grad_dtype": (GOOD, {"grad_dtype": torch.int32}, "grad_dtype: expected one of float64, float32, float"),
}
TYPE_ERRORS = {"fp8", "no pairs", "no module", "number", "timeout", "grad_dtype"}


@on_ranks(2)
def test_disagreement_is_the_same_error_on_every_rank():
    """Rank 1 brings something else; or all ask for a transport that is none."""
    kind, text = equal_on_all(error_of(under, "Shared", wrap, chain()))
    assert kind == "ValueError"
    assert "TPKERNELS_TRANSPORT is 'Shared'; expected one of auto, c10d, shared, symmetric" in text
    for case, (named, options, words) in DISAGREEMENTS.items():
        brought, given = (named, options) if dist.get_rank() == 1 else (GOOD, {})
        kind, text = refused_on_rank_1(GradientBuckets, brought, dist.group.WORLD, **given)
        assert kind == ("TypeError" if case in TYPE_ERRORS else "ValueError"), case
        assert words in text, case


@on_ranks(4)
def test_disagreement_names_all_ranks_and_reaches_other_data_parallel_groups():
    """Rank 2 has another parameter: in the group of all, and in its data-parallel one."""
    tensor_group, data_group = two_by_two()
    named = [("w", parameter(3 + (dist.get_rank() == 2)))]
    words = r"ranks 0, 1, 3 has 'w' \(3,\).* rank 2 has 'w' \(4,\) float32"
    assert re.search(words, equal_on_all(error_of(wrap, named))[1])
    with pytest.raises(ValueError, match=r"rank 2 has 'w' \(4,\) float32"):
        GradientBuckets(named, data_group, tensor_parallel_group=tensor_group)


@on_ranks(2)
def test_none_and_non_member_groups_are_refused():
    rank, module, lonely = dist.get_rank(), chain(1), dist.new_group([0])
    words = f"group: expected a process group that rank {rank} is a member of, got "
    with pytest.raises(ValueError, match=f"{words}None"):
        GradientBuckets(module, None)
    with pytest.raises(ValueError, match=f"{words}not a member's group") if rank else nullcontext():
        GradientBuckets(module, lonely).detach()
    with pytest.raises(ValueError, match="tensor_parallel_group: expected a process group"):
        GradientBuckets(module, dist.group.WORLD, tensor_parallel_group=7)


def test_default_group_is_needed():
    kind, text = error_of(bucketed_all_reduce_, [torch.ones(1)])
    assert kind == "ValueError"
    assert "call init_process_group first" in text


def lost_in_a_step(dies, seconds):
    """Rank 1 is not there in the third step. What rank 0 is told."""
    module = chain()
    buckets = wrap(module, timeout=timedelta(seconds=seconds))
    store = dist.distributed_c10d._get_default_store()
    for number in range(3):
        buckets.zero()
        dist.barrier()
        if number == 2 and dist.get_rank() == 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            store.wait(["rank 0 gave up"])
            return None
        backward(module, number)
        kind, text = error_of(buckets.finish)
        assert kind == ("RuntimeError" if number == 2 else "nothing"), text
    store.set("rank 0 gave up", "now")
    kind, said = error_of(buckets.zero)  # which has nothing to give up any more
    assert kind == "nothing" or "has failed and cannot be used any more" in said, said
    assert "all_reduce of bucket 0 of 4 ('3.weight' to '3.bias', " in text
    assert f"failed in process group '{dist.group.WORLD.group_name}' of 2 ranks, here on rank 0" in text
    assert "a rank died, came too late, or left the common order of calls. Cause: " in text
    return text


@both_ways
def test_late_rank_is_an_error_within_the_time_out(ranks2):
    text, _ = ranks2.run(lost_in_a_step, False, patient(3.0))  # the group's own is a minute
    assert "timeout" in text.lower() or "timed out" in text.lower()


def test_dead_rank_is_an_error():
    """Over c10d; in shared memory `test_dead_rank_is_named_with_the_bucket_that_it_lacks`."""
    with RankPool(2) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        ranks.run(under, "c10d", lost_in_a_step, True, patient(10.0))
    assert [*caught.value.exceptions] == [1], caught.value  # rank 0 saw what it was to see


def die_before_agreement():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for check, words in (
        (False, "bucketed_all_reduce_: all_reduce of 1 buckets failed in process group"),
        (True, "could not compare what they bring; a rank died"),
        (False, "has failed and cannot be used any more: rank 0: RuntimeError: "),
    ):
        kind, text = error_of(bucketed_all_reduce_, [torch.ones(3)], check=check)
        assert kind == "RuntimeError"
        assert words in text


def test_dead_rank_in_a_bucketed_call():
    with RankPool(2) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        ranks.run(die_before_agreement)
    assert [*caught.value.exceptions] == [1], caught.value


@both_ways
@on_ranks(2)
def test_use_after_destroy_is_an_error():
    module = chain(2)
    buckets = wrap(module)
    for _ in range(2):
        step(module, buckets)
    buckets.zero()
    dist.destroy_process_group()
    for call in (lambda: backward_alone(module), buckets.finish, buckets.zero):
        with pytest.raises(RuntimeError, match="was destroyed; make a new group and new GradientBuckets"):
            call()


def backward_alone(module):
    loss_of(module(torch.ones(1, 8, dtype=torch.float64))).backward()


@pytest.mark.way("c10d")  # in shared memory `test_fork_reaches_neither_its_parent_nor_other_ranks`
@on_ranks(2)
def test_use_after_fork_is_an_error():
    module = chain(2)
    buckets = wrap(module)
    for kind, text in forked(lambda: [error_of(buckets.zero), error_of(buckets.finish)]):
        assert kind == "RuntimeError"
        assert "which was forked from it; make process groups and GradientBuckets after the fork" in text
    step(module, buckets)  # the parent is well


@on_ranks(2)
def test_deepcopy_of_a_wrapped_module_raises():
    module = chain(2)
    buckets = wrap(module)
    with pytest.raises(RuntimeError, match="a module under GradientBuckets cannot be copied"):
        copy.deepcopy(module)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match="GradientBuckets cannot be copied or pickled; make new ones"):
            call(buckets)
    torch.save(module.state_dict(), io.BytesIO())
    assert len(copy.deepcopy(module.state_dict())) == 4
    free = pickle.loads(pickle.dumps(module))
    assert torch.equal(copy.deepcopy(free)[0].weight, module[0].weight)
    buckets.detach()
    copy.deepcopy(module)
    wrap(module)  # and let go at once
    copy.deepcopy(module)


@on_ranks(2)
def test_wrong_backwards_are_told():
    """Each mistake is told, and the next step is right."""
    embedding = nn.Embedding(4, 2, sparse=True)
    sparse = wrap(embedding)
    with pytest.raises(TypeError, match="the gradient of 'weight' is sparse; expected a dense one"):
        embedding(torch.tensor([1])).sum().backward()
    sparse.detach()
    module = chain()
    buckets = wrap(module)

    def backwards(times=1, create_graph=False):
        output = loss_of(module(own_batch()))
        for _ in range(times):
            output.backward(retain_graph=True, create_graph=create_graph)

    for _ in range(2):
        step(module, buckets)
    right = [p.grad.clone() for p in module.parameters()]
    buckets.zero()
    kind, text = equal_on_all(error_of(backwards, times=2))
    assert kind == "RuntimeError"
    assert "' received gradient 2 of this step, but 1 had been expected" in text
    assert "run all backwards but the last under no_sync()" in text
    buckets.zero()
    words = r"backward\(create_graph=True\) is not supported, use torch\.autograd\.grad"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=words):
            backwards(create_graph=True)
    step(module, buckets)
    assert_gradients(module, right)


@pytest.mark.parametrize("options", [{"average": False}, {"reduce": "reduce_scatter"}], ids=["sum", "shards"])
@on_ranks(2)
def test_nothing_is_added_to_sums_that_are_reduced(options):
    module = chain(2)
    buckets = wrap(module, **options)
    step(module, buckets)
    words = r"is reduced already, and more cannot be added to it; call zero\(\)"
    with pytest.raises(RuntimeError, match=words):
        backward(module)
    step(module, buckets)


@both_ways
@on_ranks(2)
def test_buckets_may_be_dropped_in_a_round():
    for _ in range(3):
        module = chain()
        buckets = wrap(module)
        for _ in range(2):
            buckets.zero()
            backward(module)
            if not buckets.launched_in_backward:
                buckets.finish()
        del buckets  # with all its buckets in flight
        backward(module)
