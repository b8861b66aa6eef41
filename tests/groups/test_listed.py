"""A plan of groups that somebody else has listed."""

import pytest

from tpkernels.groups.plan import ListedPlan, plan_groups


def listed(**lists: list[list[int]]) -> ListedPlan:
    return ListedPlan(
        world_size=4,
        tensor=2,
        pipeline=2,
        context=1,
        expert=1,
        virtual_pipeline=None,
        split_rank=None,
        order=(),
        lists=lists.__getitem__,
    )


def test_it_answers_as_the_plan_that_its_lists_are_of():
    plan = plan_groups(world_size=4, tensor=2, pipeline=2)
    kinds = ("tp", "pp", "dp", "model", "embedding", "position_embedding")
    ours = listed(**{kind: [list(ranks) for ranks in plan.groups[kind]] for kind in kinds})
    for kind in kinds:
        assert ours.groups[kind] == plan.groups[kind]
        for rank in range(4):
            assert ours.is_member(rank, kind) == plan.is_member(rank, kind)
            assert ours.members_near(rank, kind) == plan.members_near(rank, kind)
            assert ours.stage_of(rank) == plan.stage_of(rank)
    assert (ours.data, ours.count_groups("tp")) == (plan.data, 2)


def test_ranks_are_in_order_and_groups_may_be_those_of_some_ranks_only():
    plan = listed(tp=[[3, 1]], pp=[[1, 2]], embedding=[], position_embedding=[[2]])
    assert plan.group_of(1, "tp") == (1, 3)
    assert plan.index_in(3, "tp") == 1
    assert not plan.is_member(1, "embedding")
    assert plan.members_near(1, "position_embedding") == (2,)
    with pytest.raises(ValueError, match="rank 0 is in none of the tp groups that were listed"):
        plan.group_of(0, "tp")
