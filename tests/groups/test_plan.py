"""`groups/plan.py` against a second opinion, and against the lesson's own example."""

import time
import tracemalloc
from functools import partial
from itertools import product

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.oracle import Classic, all_settings
from tpkernels.groups.plan import KINDS, ListedPlan, plan_groups
from tpkernels.groups.sizes import InvalidSizes

LESSON = plan_groups(world_size=16, tensor=2, pipeline=4)


def test_group_of_matches_the_oracle_everywhere():
    for world, tp, pp, virtual, split in all_settings((1, 2, 6, 8)):
        more = {"virtual_pipeline": virtual, "split_rank": split}
        plan = plan_groups(world_size=world, tensor=tp, pipeline=pp, **more)
        for rank in range(world):
            oracle = Classic(world, tp, pp, virtual, split, rank)
            for kind in ("tp", "dp", "pp", "model"):
                assert list(plan.group_of(rank, kind)) == oracle.group(kind), (plan, rank, kind)
            assert list(plan.members_near(rank, "embedding")) == oracle.embedding()
            assert list(plan.members_near(rank, "position_embedding")) == oracle.position_embedding()


AXES = ("tp", "cp", "ep", "dp", "pp")


@st.composite
def plans(draw):
    tp, cp, pp, ep = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(4))
    data = draw(st.sampled_from([1, 2, 4])) * ep  # data x context is then a multiple of expert
    order = draw(st.one_of(st.just(AXES), st.permutations(AXES)))
    split = draw(st.one_of(st.none(), st.integers(0, pp - 1)))
    try:
        sizes = {"tensor": tp, "context": cp, "pipeline": pp, "expert": ep, "split_rank": split}
        return plan_groups(world_size=tp * cp * pp * data, order="-".join(order), **sizes)
    except InvalidSizes:  # an order that would give experts groups of their own
        reject()


@settings(max_examples=40)
@given(plans())
def test_groups_of_a_kind_share_no_rank_and_leave_none_out(plan):
    for kind in KINDS:
        members = [rank for group in plan.groups[kind] for rank in group]
        assert len(members) == len(set(members))
        if kind not in ("embedding", "position_embedding"):
            assert sorted(members) == list(range(plan.world_size))
        for group in plan.groups[kind]:
            assert list(group) == sorted(group)
            assert all(plan.group_of(rank, kind) == group for rank in group)


@settings(max_examples=40)
@given(plans())
def test_order_says_which_axis_varies_fastest(plan):
    """Along each axis neighbours are as far apart as the sizes of the faster axes multiply to."""
    sizes = {"tp": plan.tensor, "cp": plan.context, "dp": plan.data, "pp": plan.pipeline}
    step = 1
    for axis in plan.order:
        if axis in sizes:
            assert list(plan.group_of(0, axis)) == [i * step for i in range(sizes[axis])]
            step *= sizes[axis]
    assert step == plan.world_size


@settings(max_examples=40)
@given(plans())
def test_expert_axes_split_what_data_and_context_share(plan):
    """Within one tensor position and stage, the ranks are expert x expert-data, each pair once."""
    for rank in range(plan.world_size):
        crossed = [r for peer in plan.group_of(rank, "ep") for r in plan.group_of(peer, "expert_dp")]
        assert sorted(crossed) == list(plan.group_of(rank, "dp_cp"))
        assert len(plan.group_of(rank, "ep")) == plan.expert


def test_order_may_leave_out_axes_of_size_one():
    for order, first in (("tp-dp-pp", (0, 2)), ("tp-pp-dp", (0, 4))):
        assert plan_groups(world_size=8, tensor=2, pipeline=2, order=order).groups["dp"][0] == first


BAD = [
    (dict(world_size=16, tensor=3), r"world_size \(16\) is not divisible by .*\(3\) x .* = 3"),
    (dict(world_size=4, tensor=2, pipeline=4), "is not divisible by"),
    (dict(world_size=8, context=3), r"context_parallel_size \(3\)"),
    (dict(world_size=8, tensor=2, expert=3), r"expert_model_parallel_size \(3\).* must divide 4"),
    (dict(world_size=4, tensor=0), "tensor_model_parallel_size must be a positive integer, got 0"),
    (dict(world_size=4, pipeline=-2), "must be a positive integer, got -2"),
    (dict(world_size=0), "world_size must be a positive integer"),
    (dict(world_size=4, pipeline=1, virtual_pipeline=2), "size should be greater than 1 with interleaved"),
    (dict(world_size=4, pipeline=4, virtual_pipeline=0), "virtual_pipeline must be a positive"),
    (dict(world_size=4, pipeline=4, split_rank=4), r"split_rank \(4\).* expected 0 to 3"),
    (dict(world_size=4, pipeline=4, split_rank=-1), r"split_rank \(-1\)"),
    (dict(world_size=4, order="tp-xx-pp"), "unknown axis 'xx'"),
    (dict(world_size=4, order="tp-tp-pp-dp"), "names the axis 'tp' twice"),
    (dict(world_size=4, tensor=2, order="cp-dp-pp"), "leaves out the axis 'tp', whose size is 2"),
    (dict(world_size=4, order=""), "unknown axis ''"),
    (
        dict(world_size=16, context=2, expert=4, pipeline=2, order="tp-cp-ep-pp-dp"),
        "experts other pp groups .* name 'tp' first and 'pp' last",
    ),
    (dict(world_size=16, tensor=2, context=4, expert=2, order="cp-tp-ep-dp-pp"), "experts other tp groups"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(arguments) for arguments, _ in BAD])
def test_plan_refuses_bad_sizes(arguments, message):
    with pytest.raises(InvalidSizes, match=message):
        plan_groups(**arguments)


def test_what_is_no_size_kind_or_change_is_refused():
    for value in (2.0, "2", True, None):
        with pytest.raises(TypeError, match="tensor_model_parallel_size must be a positive integer"):
            plan_groups(world_size=4, tensor=value)
    with pytest.raises(TypeError, match="split_rank must be an integer"):
        plan_groups(world_size=4, pipeline=4, split_rank=1.5)
    with pytest.raises(TypeError, match="order must be a string"):
        plan_groups(world_size=4, order=("tp", "dp"))
    for caught in (ValueError, RuntimeError, AssertionError):
        with pytest.raises(caught):
            plan_groups(world_size=4, tensor=3)
    with pytest.raises(ValueError, match="unknown kind of group 'xp'; known are tp, cp"):
        LESSON.group_of(0, "xp")
    with pytest.raises(KeyError, match="unknown kind"):
        LESSON.groups["xp"]
    with pytest.raises(AttributeError):
        LESSON.tensor = 4


def test_rank_outside_the_world_or_the_embedding_group_is_refused():
    for rank, ask in product((-1, 16), (partial(LESSON.group_of, kind="tp"), LESSON.stage_of)):
        with pytest.raises(ValueError, match=f"rank {rank} is not in this world: expected 0 to 15"):
            ask(rank)
    with pytest.raises(ValueError, match=r"rank 4 is in no embedding group: it is stage 1 of 4.*\[0, 12\]"):
        LESSON.group_of(4, "embedding")
    assert not LESSON.is_member(4, "embedding")


def test_plan_of_a_huge_world_is_quick_and_small():
    def plan_and_ask():
        plan = plan_groups(world_size=131_072, tensor=8, pipeline=16)
        return [plan.group_of(77_777, kind) for kind in KINDS if plan.is_member(77_777, kind)]

    assert [len(group) for group in plan_and_ask()] == [8, 1, 1, 1024, 16, 128, 1024, 1024]
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        plan_and_ask()
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05

    tracemalloc.start()
    plan = plan_groups(world_size=131_072, tensor=8, pipeline=16)
    plan.group_of(77_777, "tp")
    before_groups = tracemalloc.get_traced_memory()[1]
    assert len(plan.groups["tp"]) == 16_384
    after_groups = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert before_groups < 50_000 < after_groups  # bytes: nothing is listed until it is asked for


DESCRIPTION = """\
world size 16 = tensor 2 x data 2 x pipeline 4  (order tp-cp-ep-dp-pp)

8 data_parallel groups:
    [g0, g2], [g1, g3], [g4, g6], [g5, g7], [g8, g10], [g9, g11], [g12, g14], [g13, g15]
8 tensor model-parallel groups:
    [g0, g1], [g2, g3], [g4, g5], [g6, g7], [g8, g9], [g10, g11], [g12, g13], [g14, g15]
4 pipeline model-parallel groups:
    [g0, g4, g8, g12], [g1, g5, g9, g13], [g2, g6, g10, g14], [g3, g7, g11, g15]
4 embedding groups:
    [g0, g12], [g1, g13], [g2, g14], [g3, g15]

2 full models partitioned over 16 GPUs:
    model 0 is partitioned into gpus 0,1,4,5,8,9,12,13
    model 1 is partitioned into gpus 2,3,6,7,10,11,14,15"""


def test_describe_prints_the_lesson_and_shortens_a_huge_world():
    assert LESSON.describe() == DESCRIPTION
    text = plan_groups(world_size=131_072, tensor=8, pipeline=16).describe()
    assert "16384 tensor model-parallel groups:" in text
    assert "... and 16352 more" in text
    assert len(text) < 40_000
    huge = plan_groups(world_size=1_000_000, tensor=8, pipeline=4)
    huge.describe()
    assert "groups" not in vars(huge)  # all lists would take seconds


def test_counts_of_groups_are_the_lengths_of_the_lists():
    for plan in (LESSON, plan_groups(world_size=32, tensor=2, context=2, expert=4, pipeline=4, split_rank=1)):
        for kind in KINDS:
            assert plan.count_groups(kind) == len(plan.groups[kind])
            assert tuple(plan.first_groups(kind, 3)) == plan.groups[kind][:3]


def listed_plan(**lists):
    sizes = {"world_size": 4, "tensor": 2, "pipeline": 2, "context": 1, "expert": 1, "order": ()}
    return ListedPlan(virtual_pipeline=None, split_rank=None, lists=lists.__getitem__, **sizes)


def test_a_listed_plan_answers_as_the_plan_that_its_lists_are_of():
    plan = plan_groups(world_size=4, tensor=2, pipeline=2)
    kinds = ("tp", "pp", "dp", "model", "embedding", "position_embedding")
    ours = listed_plan(**{kind: [list(ranks) for ranks in plan.groups[kind]] for kind in kinds})
    for kind in kinds:
        assert ours.groups[kind] == plan.groups[kind]
        for rank in range(4):
            assert ours.is_member(rank, kind) == plan.is_member(rank, kind)
            assert ours.members_near(rank, kind) == plan.members_near(rank, kind)
            assert ours.stage_of(rank) == plan.stage_of(rank)
    assert (ours.data, ours.count_groups("tp")) == (plan.data, 2)


def test_a_listed_plan_may_be_of_some_ranks_only():
    plan = listed_plan(tp=[[3, 1]], pp=[[1, 2]], embedding=[], position_embedding=[[2]])
    assert plan.group_of(1, "tp") == (1, 3)
    assert plan.index_in(3, "tp") == 1
    assert not plan.is_member(1, "embedding")
    assert plan.members_near(1, "position_embedding") == (2,)
    with pytest.raises(ValueError, match="rank 0 is in none of the tp groups that were listed"):
        plan.group_of(0, "tp")
