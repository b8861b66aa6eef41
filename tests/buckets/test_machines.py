"""Ranks of several machines: those of one share memory, the owners of a shard reduce it between machines."""

import itertools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    assert_gradients,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
    step,
    two_by_two,
    wrap,
)
from tests.buckets.test_shared_memory import choice
from tests.buckets.ways import on_machine
from tests.checks import error_of
from tests.products import once
from tests.ranks import RankFailure, RankPool
from tests.segments import tp_invariance
from tpkernels import GradientBuckets
from tpkernels.buckets.memory import Machines, machines_of

IN_TURN, IN_A_ROW, UNEVEN = ["a", "b", "a", "b"], ["a", "a", "b", "b"], ["a", "a", "a", "b"]


@pytest.fixture
def four(ranks4):
    return ranks4.pool


def on(ranks, places, function, *args):
    return ranks.run_each(on_machine, [(place, function, *args) for place in places])


@pytest.mark.parametrize("places", [IN_TURN, IN_A_ROW, list("abcabc"), ["x"] * 3], ids="".join)
def test_each_rank_is_an_owner_with_one_of_each_machine(places):
    machines = [machines_of(places, rank)[1] for rank in range(len(places))]
    for rank, (members, owners) in enumerate(machines):
        assert {places[member] for member in members} == {places[rank]}
        assert sorted(places[owner] for owner in owners) == (sorted({*places}) if owners else [])
        assert all(machines[owner].owners == owners for owner in owners)


def test_machines_with_one_rank_or_uneven_ones_share_nothing():
    assert machines_of(["a", "b"], 0) == ("ranks are on 2 machines, one on each", Machines([0], []))
    assert machines_of(UNEVEN, 3)[0] == "ranks are on 2 machines, not as many on each"


def gradients_between_machines(reduce, average):
    """What each step leaves, and how many collectives the whole group was asked for in it."""
    module = chain()
    buckets = wrap(module, reduce=reduce, average=average)
    assert buckets._memory._neighbours is not None
    asked = set()
    for number in range(4):
        before = dist.group.WORLD._get_sequence_number_for_group()
        step(module, buckets, number)
        if number:  # the first one teaches
            asked.add(dist.group.WORLD._get_sequence_number_for_group() - before)
        expected = expected_gradients(module, (number,), average=average)
        if reduce == "all_reduce":
            assert_gradients(module, expected)
        else:
            for shard, right in zip(buckets.gradient_shards(), buckets.shard(expected), strict=True):
                torch.testing.assert_close(shard, right)
    return asked


@once(
    places={"in_turn": IN_TURN, "in_a_row": IN_A_ROW},
    reduce=["all_reduce", "reduce_scatter"],
    average={"average": True, "sum": False},
)
def test_gradients_between_machines_equal_those_of_one_process(four, places, reduce, average):
    assert on(four, places, gradients_between_machines, reduce, average) == [{0}] * 4


def halves_between_machines(wire_dtype):
    """257 is 256 in bfloat16: added in float32 on a machine and, if not asked otherwise, between them."""
    weight = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    buckets = GradientBuckets([("weight", weight)], dist.group.WORLD, average=False, wire_dtype=wire_dtype)
    (weight * (256.0 if dist.get_rank() == 0 else 1.0)).sum().backward()
    buckets.finish()
    return {*weight.grad.float().tolist()}


def test_what_travels_between_machines_is_of_the_wire_dtype(four):
    # 256 + 1 on machine a, 1 + 1 on b: 259, of which bfloat16 has 260 (even); sent as bfloat16, 256 + 2 = 258
    assert on(four, IN_A_ROW, halves_between_machines, None) == [{260.0}] * 4
    assert on(four, IN_A_ROW, halves_between_machines, torch.bfloat16) == [{258.0}] * 4


def said_of_choice():
    (line,), _ = choice()
    return line.partition(" of 4 ranks: ")[2]


def test_log_says_who_shares(four):
    assert on(four, IN_A_ROW, said_of_choice) == ["shared (2 ranks are on each of 2 machines)"] * 4
    assert on(four, UNEVEN, said_of_choice) == ["apart (ranks are on 2 machines, not as many on each)"] * 4


def marked():
    """Tensor-parallel ranks next to each other, data-parallel ones across."""
    tensor_group, data_group = two_by_two()
    module = chain()
    for parameter in itertools.islice(module.parameters(), 2, 5):
        parameter.sequence_parallel = True
    buckets = GradientBuckets(module, data_group, bucket_bytes=600, tensor_parallel_group=tensor_group)
    for number in range(3):
        step(module, buckets, number)
    for parameter, expected in zip(module.parameters(), expected_gradients(module, (2,)), strict=True):
        if hasattr(parameter, "sequence_parallel"):
            torch.testing.assert_close(parameter.grad, 2 * expected)
    return buckets._memory._neighbours is not None


@pytest.mark.parametrize(
    ("places", "share"), [("aaaa", True), ("aabb", False), ("abab", False)], ids=["one", "data", "tensor"]
)
def test_marked_gradients_wherever_ranks_are(four, places, share):
    assert on(four, places, marked) == [share] * 4


def two_at_once():
    """Two models whose steps overlap; a rank of one machine is late."""
    models = [chain(1), chain(1)]
    both = [wrap(model) for model in models]
    for number in range(4):
        for buckets in both:
            buckets.zero()
        losses = [loss_of(model(own_batch(number + 10 * n))) for n, model in enumerate(models)]
        losses[dist.get_rank() % 2].backward()
        time.sleep(0.05 * (dist.get_rank() == 1))
        losses[1 - dist.get_rank() % 2].backward()
        for buckets in both:
            buckets.finish()
        for n, model in enumerate(models):
            assert_gradients(model, expected_gradients(model, (number + 10 * n,)))


def test_buckets_of_two_models_do_not_meet_between_machines(four):
    on(four, IN_TURN, two_at_once)


def tp_invariant():
    with tp_invariance(4):
        return error_of(wrap, [("weight", nn.Parameter(torch.zeros(8)))])


def test_more_machines_add_in_no_order_that_tp_invariance_knows(four):
    assert on(four, "aaaa", tp_invariant) == [("nothing", "")] * 4
    for kind, text in on(four, IN_A_ROW, tp_invariant):
        assert kind == "ValueError"
        assert "got 4 (they are on several machines)" in text


def owner_dies():
    module = chain()
    buckets = wrap(module)
    for number in range(2):
        step(module, buckets, number)
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, text = error_of(step, module, buckets, 2)
    assert kind == "RuntimeError"
    assert "all_reduce of bucket 0 of 4" in text
    assert "Cause: " in text


def test_rank_that_dies_is_noticed_on_all_machines():
    with RankPool(4) as ranks, pytest.raises(RankFailure, match="killed by signal 9") as caught:
        on(ranks, IN_A_ROW, owner_dies)
    assert [*caught.value.exceptions] == [3], caught.value
