"""What goes wrong ends in an error that says so, on every rank: nothing hangs, nothing aborts."""

import copy
import io
import os
import pickle
import signal
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import assert_gradients, chain, loss_of, own_batch, wrap
from tests.buckets.ways import WAYS, under
from tests.checks import error_of
from tests.forks import forked
from tests.ranks import RankFailure, RankPool
from tpkernels import GradientBuckets, bucketed_all_reduce_

QUICK = timedelta(seconds=1.5)


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.ones(*shape, dtype=dtype))


def disagreeing(case):
    """Rank 1 brings something else; what both ranks are told."""
    good = [("a", parameter(3)), ("b", parameter(2, 4)), ("c", parameter(2, 4))]
    bad = {
        "count": good[:2],
        "shape": [*good[:2], ("c", parameter(4, 2))],
        "dtype": [*good[:2], ("c", parameter(2, 4, dtype=torch.bfloat16))],
        "order": [good[0], good[2], good[1]],  # equal shapes: only the names tell
        "name": [*good[:2], ("d", parameter(2, 4))],
        "options": good,
        "meta": [*good[:2], ("c", nn.Parameter(torch.ones(2, 4, device="meta")))],
        "fp8": [*good[:2], ("c", torch.ones(2, 4).to(torch.float8_e4m3fn).requires_grad_())],
        "sparse": [*good[:2], ("c", torch.ones(2, 4).to_sparse().requires_grad_())],
        "expanded": [*good[:2], ("c", nn.Parameter(torch.ones(1).expand(2, 4)))],
        "computed": [*good[:2], ("c", parameter(2, 4) * 2)],
        "twice": [*good[:2], ("b", parameter(2, 4))],
        "no pairs": [parameter(3)],
        "no module": 7,
        "number": [*good[:2], (2, parameter(2, 4))],
        "bytes": good,
        "part of a byte": good,
        "timeout": good,
        "reduce": good,
        "grad_dtype": good,
    }[case]
    wrong = dist.get_rank() == 1
    options = {
        "options": {"average": False},
        "bytes": {"bucket_bytes": -1},
        "part of a byte": {"bucket_bytes": 1.5},
        "timeout": {"timeout": 5},
        "reduce": {"reduce": "gather"},
        "grad_dtype": {"grad_dtype": torch.int32},
    }.get(case, {})
    kind, text = error_of(
        GradientBuckets, bad if wrong else good, dist.group.WORLD, **(options if wrong else {})
    )
    # the group is as good as before
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
    return kind, text


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("count", "ValueError", "rank 0 has 3; rank 1 has 2; the first that some ranks lack is 'c' (2, 4)"),
        ("shape", "ValueError", "rank 0 has 'c' (2, 4) float32 on cpu; rank 1 has 'c' (4, 2)"),
        ("dtype", "ValueError", "rank 0 has 'c' (2, 4) float32 on cpu; rank 1 has 'c' (2, 4) bfloat16"),
        ("order", "ValueError", "tensor 1: rank 0 has 'b' (2, 4) float32 on cpu; rank 1 has 'c' (2, 4)"),
        ("name", "ValueError", "tensor 2: rank 0 has 'c' (2, 4) float32 on cpu; rank 1 has 'd' (2, 4)"),
        ("options", "ValueError", "average=False"),
        ("meta", "ValueError", "on rank 1: 'c' is on the meta device, without data; materialise it first"),
        (
            "fp8",
            "TypeError",
            "on rank 1: 'c' is torch.float8_e4m3fn; expected one of float64, float32, float16",
        ),
        ("sparse", "TypeError", "on rank 1: 'c' is torch.sparse_coo; expected a dense tensor"),
        (
            "expanded",
            "ValueError",
            "on rank 1: 'c' has elements that share memory (expand?); expected its own",
        ),
        ("computed", "ValueError", "on rank 1: 'c' is computed from other tensors; expected a param"),
        ("twice", "ValueError", "on rank 1: 2 parameters are called 'b'; names must differ"),
        ("no pairs", "TypeError", "on rank 1: expected pairs of name and parameter, got Parameter"),
        ("no module", "TypeError", "on rank 1: expected a module or pairs of name and parameter, got int"),
        ("number", "TypeError", "on rank 1: expected a name for each parameter, got 2"),
        ("bytes", "ValueError", "bucket_bytes: expected a whole number of at least 1, got -1"),
        ("part of a byte", "ValueError", "expected a whole number of at least 1, got 1.5"),
        ("timeout", "TypeError", "timeout: expected a datetime.timedelta, got 5"),
        ("reduce", "ValueError", "reduce: expected 'all_reduce' or 'reduce_scatter', got 'gather'"),
        ("grad_dtype", "TypeError", "grad_dtype: expected one of float64, float32, float16, bfloat16, got"),
    ],
)
def test_disagreement_is_the_same_error_on_every_rank(ranks2, case, kind, words):
    first, second = ranks2.run(disagreeing, case)
    assert first == second
    assert first[0] == kind
    assert words in first[1]


def minority():
    shape = (3,) if dist.get_rank() != 2 else (4,)
    return error_of(wrap, [("w", parameter(*shape))])


def test_disagreement_names_all_ranks(ranks4):
    errors = ranks4.run(minority)
    assert len({*errors}) == 1
    assert "ranks 0, 1, 3 has 'w' (3,)" in errors[0][1]
    assert "rank 2 has 'w' (4,)" in errors[0][1]


def one_data_group_disagrees():
    """Rank 0 and 2 share a data-parallel group; 0 and 1, and 2 and 3, a tensor-parallel one."""
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    named = [("w", parameter(3 + (rank == 2)))]
    return error_of(
        GradientBuckets, named, data_groups[rank % 2], tensor_parallel_group=tensor_groups[rank // 2]
    )


def test_disagreement_in_one_data_parallel_group_reaches_the_others(ranks4):
    for kind, text in ranks4.run(one_data_group_disagrees):
        assert kind == "ValueError"
        assert "rank 0 has 'w' (3,) float32 on cpu; rank 2 has 'w' (4,) float32" in text


def without_group():
    lonely = dist.new_group([0])
    module = chain(1)
    return [
        error_of(GradientBuckets, module, None),
        error_of(GradientBuckets, module, lonely),
        error_of(GradientBuckets, module, dist.group.WORLD, tensor_parallel_group=7),
    ]


def test_none_and_non_member_groups_are_refused(ranks2):
    member, outsider = ranks2.run(without_group)
    assert member[0][0] == outsider[0][0] == outsider[1][0] == "ValueError"
    assert "group: expected a process group that rank 0 is a member of, got None" in member[0][1]
    assert "that rank 1 is a member of, got not a member's group" in outsider[1][1]
    assert member[1][0] == "nothing"
    assert "tensor_parallel_group: expected a process group" in member[2][1]


def test_default_group_is_needed():
    kind, text = error_of(bucketed_all_reduce_, [torch.ones(1)])
    assert kind == "ValueError"
    assert "call init_process_group first" in text


def die_in_a_step(how):
    module = chain()
    buckets = wrap(module, timeout=QUICK)
    for step in range(3):
        buckets.zero()
        dist.barrier()
        if step == 2 and dist.get_rank() == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "comes late":
                time.sleep(2 * QUICK.total_seconds())
            return None  # it stays away, alive: the pool lets no rank leave before the others
        loss_of(module(own_batch(step))).backward()
        started = time.monotonic()
        kind, text = error_of(buckets.finish)
        if step < 2:
            assert kind == "nothing"
            continue
        assert time.monotonic() - started < 15  # the group's own time-out is twice that
        assert kind == "RuntimeError", kind
        assert "all_reduce of bucket 0 of 4 ('3.weight' to '3.bias', " in text
        assert f"failed in process group '{dist.group.WORLD.group_name}' of 2 ranks, here on rank 0" in text
        assert "a rank died, came too late, or left the common order of calls. Cause: " in text
    return text


def test_late_rank_is_an_error_within_the_time_out(ranks2):
    text, _ = ranks2.run(die_in_a_step, "comes late")
    assert "timeout" in text.lower() or "timed out" in text.lower()


@pytest.mark.way("shared")
def test_rank_that_lets_go_is_an_error(ranks2):
    text, _ = ranks2.run(die_in_a_step, "lets go")
    assert text.endswith("Cause: rank 1 of it has let go of its GradientBuckets")


@pytest.mark.parametrize("how", WAYS)
def test_dead_rank_is_an_error(how):
    with RankPool(2) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        ranks.run(under, how, die_in_a_step, "dies")
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


def use_after_destroy():
    module = chain(2)
    buckets = wrap(module)
    for _ in range(2):
        buckets.zero()
        loss_of(module(own_batch())).backward()
        buckets.finish()
    buckets.zero()
    dist.destroy_process_group()
    return [
        error_of(lambda: loss_of(module(torch.ones(1, 8, dtype=torch.float64))).backward()),
        error_of(buckets.finish),
        error_of(buckets.zero),
    ]


def test_use_after_destroy_is_an_error(ranks2):
    for errors in ranks2.run(use_after_destroy):
        for kind, text in errors:
            assert kind == "RuntimeError"
            assert "was destroyed; make a new group and new GradientBuckets" in text


def use_after_fork():
    module = chain(2)
    buckets = wrap(module)
    errors = forked(lambda: [error_of(buckets.zero), error_of(buckets.finish)])
    buckets.zero()
    loss_of(module(own_batch())).backward()
    buckets.finish()  # the parent is well
    return errors


def test_use_after_fork_is_an_error(ranks2):
    for errors in ranks2.run(use_after_fork):
        for kind, text in errors:
            assert kind == "RuntimeError"
            assert "which was forked from it; make process groups and GradientBuckets after the fork" in text


def copies():
    module = chain(2)
    buckets = wrap(module)
    errors = [error_of(copy.deepcopy, module), error_of(copy.deepcopy, buckets)]
    assert error_of(copy.copy, buckets) == error_of(pickle.dumps, buckets) == errors[1]
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    assert len(copy.deepcopy(module.state_dict())) == 4
    free = pickle.loads(pickle.dumps(module))
    assert torch.equal(copy.deepcopy(free)[0].weight, module[0].weight)
    buckets.detach()
    copy.deepcopy(module)
    wrap(module)  # and let go at once
    copy.deepcopy(module)
    return errors


def test_deepcopy_of_a_wrapped_module_raises(ranks2):
    for (kind, text), (own_kind, own_text) in ranks2.run(copies):
        assert kind == own_kind == "RuntimeError"
        assert "a module under GradientBuckets cannot be copied" in text
        assert "GradientBuckets cannot be copied or pickled; make new ones" in own_text


def wrong_backwards():
    """Each mistake is told, and the next step is right."""
    module = chain()
    buckets = wrap(module)
    embedding = nn.Embedding(4, 2, sparse=True)
    sparse = wrap(embedding)
    errors = {"sparse": error_of(lambda: embedding(torch.tensor([1])).sum().backward())}
    sparse.detach()

    def step(times=1, create_graph=False):
        output = loss_of(module(own_batch()))
        for _ in range(times):
            output.backward(retain_graph=True, create_graph=create_graph)

    for _ in range(2):
        buckets.zero()
        step()
        buckets.finish()
    right = [p.grad.clone() for p in module.parameters()]
    buckets.zero()
    errors["second"] = error_of(step, times=2)
    buckets.zero()
    with warnings.catch_warnings(action="ignore"):
        errors["graph"] = error_of(step, create_graph=True)
    buckets.zero()
    step()
    buckets.finish()
    assert_gradients(module, right)
    return errors


def test_wrong_backwards_are_told(ranks2):
    first, second = ranks2.run(wrong_backwards)
    assert first == second
    assert first["sparse"][0] == "TypeError"
    assert "the gradient of 'weight' is sparse; expected a dense one" in first["sparse"][1]
    assert "' received gradient 2 of this step, but 1 had been expected" in first["second"][1]
    assert "run all backwards but the last under no_sync()" in first["second"][1]
    assert "backward(create_graph=True) is not supported, use torch.autograd.grad" in first["graph"][1]


def sum_is_added_to(options):
    module = chain(2)
    buckets = wrap(module, **options)
    loss_of(module(own_batch())).backward()
    buckets.finish()
    error = error_of(lambda: loss_of(module(own_batch())).backward())
    buckets.zero()
    loss_of(module(own_batch())).backward()
    buckets.finish()
    return error


@pytest.mark.parametrize("options", [{"average": False}, {"reduce": "reduce_scatter"}], ids=["sum", "shards"])
def test_nothing_is_added_to_sums_that_are_reduced(ranks2, options):
    for kind, text in ranks2.run(sum_is_added_to, options):
        assert kind == "RuntimeError"
        assert "is reduced already, and more cannot be added to it; call zero() first" in text


def choosing_an_engine(choice):
    with pytest.warns(DeprecationWarning, match=f"engine='{choice}' does nothing: leave it out"):
        wrap(chain(1), engine=choice).detach()


@pytest.mark.parametrize("choice", ["auto", "cpp", "python"])
def test_engine_cannot_be_chosen_any_more(ranks1, choice):
    ranks1.run(choosing_an_engine, choice)


def dropped_in_a_round():
    for _ in range(3):
        module = chain()
        buckets = wrap(module)
        for _ in range(2):
            buckets.zero()
            loss_of(module(own_batch())).backward()
            if not buckets.launched_in_backward:
                buckets.finish()
        del buckets  # with all its buckets in flight
        loss_of(module(own_batch())).backward()


def test_buckets_may_be_dropped_in_a_round(ranks2):
    ranks2.run(dropped_in_a_round)
