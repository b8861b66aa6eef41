"""`groups/initialize.py` and `state.py`: groups that work, few creations, states, nothing left behind."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bench.test_groups import loop_groups
from tests.checks import error_of, open_files
from tests.fake_world import each_rank, fake_rank
from tests.on_ranks import on_ranks
from tests.ranks import COLLECTIVE_SECONDS
from tpkernels import parallel_state as ps
from tpkernels.groups import c10d
from tpkernels.groups.initialize import (
    GroupSettings,
    create_parallel_state,
    create_process_groups,
    destroy_model_parallel,
    destroy_parallel_state,
    initialize_model_parallel,
    kinds_alike,
)
from tpkernels.groups.plan import COMBINED_KINDS, KINDS, plan_groups
from tpkernels.groups.sizes import InvalidSizes
from tpkernels.groups.state import ParallelStateError, current, current_or_none, use

SECONDS = timedelta(seconds=60)


def groups_alive():
    return len(dist.distributed_c10d._world.pg_map)


OF_FOUR = ((1, 1), (2, 2), (4, 1), (1, 4, None, 2), (2, 1))


@pytest.mark.parametrize(("world", "sizes"), [("ranks1", (1, 1)), *(("ranks4", each) for each in OF_FOUR)])
@on_ranks()
def test_every_group_communicates_among_its_members(sizes):
    """An all-reduce of global ranks in each group gives what the plan says it should."""
    state = initialize_model_parallel(*sizes)
    kinds = [kind for kind in KINDS if state.is_member(kind)]
    assert len(kinds) >= (8 if dist.get_world_size() > 1 else len(KINDS))
    for kind in kinds:
        total = torch.tensor(state.rank)
        dist.all_reduce(total, group=state.process_group(kind))
        assert int(total) == sum(state.ranks(kind)), kind


@pytest.mark.parametrize(
    ("sizes", "options", "name", "words"),
    [
        ((3,), {}, "InvalidSizes", "world_size (2) is not divisible by"),
        ((2, 1, 2), {}, "InvalidSizes", "greater than 1 with interleaved schedule"),
        ((1, 2, None, 2), {}, "InvalidSizes", "split_rank (2) is not a pipeline stage"),
        ((1.0,), {}, "TypeError", "must be a positive integer, got 1.0"),
        ((2,), {"timeout": 30}, "TypeError", "timeout must be a datetime.timedelta, got 30"),
        ((2,), {"group_options": {"tensor": None}}, "ValueError", "unknown kind 'tensor'; known are tp, cp"),
    ],
)
@on_ranks(2)
def test_bad_arguments_are_refused_on_every_rank_alike(sizes, options, name, words):
    kind, text = error_of(initialize_model_parallel, *sizes, **options)
    assert kind == name
    assert words in text
    assert current_or_none() is None


@on_ranks(2)
def test_initializing_twice_is_an_error_on_all_ranks_that_says_what_to_do():
    """On all ranks, then on rank 0 alone."""
    state = initialize_model_parallel(2)
    words = r"already initialized: call destroy_model_parallel\(\) first"
    with pytest.raises(ParallelStateError, match=words):
        initialize_model_parallel(2)
    assert current() is state
    if dist.get_rank() == 1:
        destroy_model_parallel()
    with pytest.raises(ParallelStateError, match="already initialized"):
        initialize_model_parallel(2)


def test_before_initialization_it_is_said_what_to_do():
    with pytest.raises(ParallelStateError, match=r"call torch.distributed.init_process_group\(...\) first"):
        initialize_model_parallel(1)
    with pytest.raises(ParallelStateError, match=r"call tpkernels.initialize_model_parallel"):
        current()


@on_ranks(2)
def test_groups_have_the_given_timeout_or_the_default_groups():
    assert c10d.default_timeout().total_seconds() == COLLECTIVE_SECONDS
    for timeout, expected in ((None, COLLECTIVE_SECONDS), (timedelta(seconds=77), 77)):
        initialize_model_parallel(2, timeout=timeout)
        backend = ps.get_tensor_model_parallel_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == expected
        destroy_model_parallel()


@on_ranks(2)
def test_nobody_goes_on_while_others_still_connect():
    """Each rank comes back no earlier than the last one has made its groups."""
    made = torch.zeros(1, dtype=torch.float64)
    original = c10d.new_group

    def slow(*args, **kwargs):
        group = original(*args, **kwargs)
        time.sleep(0.3 * dist.get_rank())
        made.fill_(time.monotonic())
        return group

    with patch.object(c10d, "new_group", slow):
        initialize_model_parallel(2, timeout=SECONDS)
    returned = time.monotonic()
    dist.all_reduce(made, dist.ReduceOp.MAX)
    assert returned >= float(made)


@on_ranks(2)
def test_a_rank_that_cannot_make_its_groups_is_an_error_on_all():
    """Its second group; the first ones are destroyed."""
    original, groups = c10d.new_group, groups_alive()

    def failing(ranks, *, name, **kwargs):
        if "/model/" in name:
            if dist.get_rank() == 1:
                raise RuntimeError("no more sockets")
            kwargs["timeout"] = timedelta(seconds=1)  # it waits for rank 1 in vain
        return original(ranks, name=name, **kwargs)

    words = r"^rank 1 could not create the model group \[0, 1\]: no more sockets$"
    with patch.object(c10d, "new_group", failing), pytest.raises(ParallelStateError, match=words):
        initialize_model_parallel(2, timeout=SECONDS, group_options={"model": None})
    assert current_or_none() is None
    assert groups_alive() == groups


@on_ranks(4)
def test_destroy_leaves_nothing_behind_however_often():
    initialize_model_parallel(2, 2)
    destroy_model_parallel()
    assert groups_alive() == 1  # the default group
    files, group = open_files(), None
    for i in range(12):
        # the same groups time and again, alternating with others
        initialize_model_parallel(*((2, 2), (4, 1), (1, 2))[i % 3])
        group = ps.get_pipeline_model_parallel_group()
        total = torch.ones(1)
        dist.all_reduce(total, group=ps.get_tensor_model_parallel_group())
        assert total.item() == ps.get_tensor_model_parallel_world_size()
        destroy_model_parallel()
    dist.barrier()
    assert error_of(dist.get_rank, group)[0] == "ValueError"
    del group  # it holds its sockets as long as somebody holds it
    assert (open_files() - files).total() <= 2  # sockets of 12 rounds would be fifty and more
    assert groups_alive() == 1


@on_ranks(4)
def test_ranks_may_have_made_other_groups_before():
    """Ranks with different histories: torch's own local synchronization would wait for ever here."""
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    state = initialize_model_parallel(2, timeout=SECONDS)
    total = torch.tensor(state.rank)
    dist.all_reduce(total, group=state.process_group("tp"))
    assert int(total) == (1 if state.rank < 2 else 5)


@on_ranks(2)
def test_destroy_after_the_default_group_is_harmless():
    initialize_model_parallel(2)
    dist.destroy_process_group()
    destroy_model_parallel()
    destroy_model_parallel()  # without a state, too
    assert not ps.model_parallel_is_initialized()


# States.


def test_states_that_are_none_are_refused_and_states_are_frozen():
    with fake_rank(0, 4):
        with pytest.raises(ValueError, match="the plan is for 8 ranks, but this world has 4"):
            create_parallel_state(plan_groups(world_size=8))
        with pytest.raises(TypeError, match="plan: expected a GroupPlan, as plan_groups"):
            create_parallel_state(4)
        with pytest.raises(InvalidSizes):
            initialize_model_parallel(3)
        assert current_or_none() is None
        state = initialize_model_parallel(2)
        with pytest.raises(TypeError, match="state: expected a ParallelState, got None"), use(None):
            pass
        assert current() is state
        with pytest.raises(AttributeError):
            state.rank = 1


@on_ranks(2)
def test_two_states_live_in_one_process():
    first = initialize_model_parallel(2)
    second = create_parallel_state(plan_groups(world_size=2))
    total = torch.ones(1)
    with use(second):
        assert ps.get_tensor_model_parallel_world_size() == 1
        dist.all_reduce(total, group=ps.get_data_parallel_group())
        assert total == 2
    assert ps.get_tensor_model_parallel_world_size() == 2
    destroy_parallel_state(second)
    dist.all_reduce(total, group=first.process_group("tp"))
    assert total == 4


def test_use_restores_state_and_changes_on_exceptions():
    with fake_rank(0, 4):
        outer = initialize_model_parallel(2)
        inner = create_parallel_state(plan_groups(world_size=4, pipeline=4, virtual_pipeline=2))
        ps.set_tensor_model_parallel_rank(1)
        with use(inner):
            assert current() is inner
            assert ps.get_tensor_model_parallel_rank() == 0
            assert ps.get_virtual_pipeline_model_parallel_rank() == 0
        with pytest.raises(KeyError), use(inner):
            raise KeyError
        assert current() is outer
        assert ps.get_tensor_model_parallel_rank() == 1
        assert ps.get_virtual_pipeline_model_parallel_rank() is None


# Which groups are made, and when.


def test_equal_rank_lists_share_one_group_and_options_part_them():
    with fake_rank(3, 8):
        state = initialize_model_parallel(2, 2)
        assert state.process_group("pp") is state.process_group("embedding")
        assert state.process_group("dp") is state.process_group("dp_cp")
        assert state.process_group("tp") is not state.process_group("dp")
        assert len(set(state.process_groups.values())) == 5  # tp, dp, pp, model, and this rank alone
        assert set(state.process_groups) == set(KINDS)
        destroy_model_parallel()
        state = initialize_model_parallel(2, 2, group_options={"embedding": None})
        assert state.process_group("pp") is not state.process_group("embedding")


@pytest.mark.parametrize(
    "difference", [{}, {"timeout": SECONDS}, {"backend": "fake"}, {"group_options": {"tp": None}}], ids=list
)
def test_group_of_all_ranks_is_the_default_group_unless_it_is_to_differ(difference):
    with fake_rank(3, 8):
        group = initialize_model_parallel(8, **difference).process_group("tp")
        assert (group is dist.group.WORLD) == (not difference)
        assert dist.get_process_group_ranks(group) == list(range(8))
        destroy_model_parallel()
        assert dist.is_initialized()


@pytest.mark.parametrize("split", [None, 0, 1, 2, 3])
def test_sharing_is_right_on_every_rank(split):
    """Kinds are judged alike at rank 0; that must hold for all."""
    for sizes in [
        dict(tensor=2, pipeline=4),
        dict(pipeline=4, context=2, expert=2),
        dict(pipeline=4),
        dict(pipeline=4, tensor=2, context=2, expert=2),
    ]:
        plan = plan_groups(world_size=16, split_rank=split, **sizes)
        for kind, alike in kinds_alike(plan, {}, (*KINDS, *COMBINED_KINDS)).items():
            for rank in range(16):
                if plan.is_member(rank, kind):
                    assert plan.group_of(rank, kind) == plan.group_of(rank, alike)


@pytest.fixture
def created(monkeypatch):
    """The ranks of each group that is made."""
    found = []
    create = dist.distributed_c10d._new_process_group_helper

    def counting(size, rank, ranks, *args, **kwargs):
        found.append(tuple(ranks))
        return create(size, rank, ranks, *args, **kwargs)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", counting)
    return found


def test_rank_of_a_large_world_creates_at_most_a_dozen_groups(created):
    """The classic loops have every rank take part in the creation of every group of the world."""
    for rank in each_rank(2048, ranks=[1, 2047]):
        created.clear()  # of the default group
        # every kind is its own group
        initialize_model_parallel(8, 8, 2, 4, context_parallel_size=2, expert_model_parallel_size=4)
        assert len(created) <= 12
        assert all(rank in ranks for ranks in created)
        destroy_model_parallel()
        created.clear()
        classic = [ranks for _, ranks in loop_groups(2048, 8, 8)]
        for ranks in classic:
            dist.new_group(ranks)
        assert len(created) == len(classic) > 1000


def test_all_ranks_take_part_when_groups_are_split_off_the_world(monkeypatch):
    """With a device bound to the default group NCCL splits its communicator: a collective of all ranks."""
    plan = plan_groups(world_size=16, tensor=2, pipeline=4, split_rank=2)
    took_part = []
    monkeypatch.setattr(c10d, "splits_the_world", lambda backend: True)
    monkeypatch.setattr(c10d, "stand_aside", lambda: took_part.append("aside"))
    monkeypatch.setattr(c10d, "default_timeout", lambda: SECONDS)
    monkeypatch.setattr(c10d, "options_beside_products", lambda backend, timeout: None)
    monkeypatch.setattr(c10d, "new_group", lambda ranks, *, name, **_: took_part.append(name.split("/")[2]))
    everything = ["tp", "cp", "dp", "pp", "model", "embedding", "position_embedding"]
    for rank in range(16):
        took_part.clear()
        groups = create_process_groups(plan, rank, 1, GroupSettings())
        assert took_part == [kind if plan.is_member(rank, kind) else "aside" for kind in everything]
        assert set(groups) == {kind for kind in KINDS if plan.is_member(rank, kind)}


def test_only_nccl_groups_are_split_off(monkeypatch):
    with fake_rank(0, 2):
        monkeypatch.setattr(c10d, "_split_source", lambda: "a communicator")
        for backend, splits in {"nccl": True, "cpu:gloo,cuda:nccl": True, "gloo": False}.items():
            assert c10d.splits_the_world(backend) is splits, backend
        monkeypatch.setattr(c10d, "_split_source", lambda: None)
        assert not c10d.splits_the_world("nccl")


def test_group_of_one_rank_is_made_when_it_is_asked_for(created):
    with fake_rank(3, 8):
        state = initialize_model_parallel(2, 4)
        made = len(created)
        assert (3,) not in created
        assert "cp" in state.process_groups  # looking makes none
        assert len(state.process_groups) == len(list(state.process_groups))
        with patch.object(c10d, "new_group", lambda ranks, **_: 1 / 0), pytest.raises(ZeroDivisionError):
            state.process_group("cp")  # may be asked for again
        assert dist.get_process_group_ranks(state.process_group("cp")) == [3]
        assert state.process_group("dp") is state.process_group("ep") is state.process_group("cp")
        assert created[made:] == [(3,)]
        destroy_model_parallel()
        assert groups_alive() == 1


@on_ranks(2)
def test_threads_that_ask_at_once_get_one_group():
    """Eight, for a group not made yet."""
    for _ in range(10):
        initialize_model_parallel(2)
        start = threading.Barrier(8)

        def ask(_, start=start):
            start.wait()
            return ps.get_data_parallel_group()

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(ask, range(8)))) == 1
        destroy_model_parallel()


def test_group_of_a_forked_child_or_of_a_destroyed_state_is_a_clear_error(monkeypatch):
    with fake_rank(0, 4):
        state = initialize_model_parallel(2)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ParallelStateError, match="a forked child cannot use it"):
            state.process_group("tp")
        monkeypatch.undo()
        state.process_group("tp")
        destroy_model_parallel()
        with pytest.raises(ParallelStateError, match="the tp group was destroyed with its parallel state"):
            state.process_group("tp")


def test_kinds_named_in_options_share_with_nobody_and_options_are_not_written_to(monkeypatch):
    options, seen, create = {"timeout": 1}, [], c10d.new_group

    def recorded(ranks, **settings):
        seen.append(settings["options"])
        return create(ranks, **{**settings, "options": None})

    monkeypatch.setattr(c10d, "new_group", recorded)
    with fake_rank(0, 8):
        state = initialize_model_parallel(8, group_options={"tp": options, "model": options})
        assert len({id(state.process_group(kind)) for kind in ("tp", "model", "dp")}) == 3
        assert seen[0] == options
        assert seen[0] is not options


def test_groups_are_destroyed_in_reverse_order(monkeypatch):
    destroyed = []
    with fake_rank(0, 8):
        state = initialize_model_parallel(2, 2)
        made = list(state.process_groups.made.values())
        monkeypatch.setattr(c10d, "destroy_group", destroyed.append)
        destroy_model_parallel()
        assert destroyed == made[::-1]
        assert len(made) == 4
