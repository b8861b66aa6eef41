"""`groups/initialize.py`: few creations, shared groups, the same order on every rank."""

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
from tests.fake_world import each_rank, fake_rank
from tests.on_ranks import on_ranks
from tests.ranks import COLLECTIVE_SECONDS
from tpkernels import parallel_state as ps
from tpkernels.groups import c10d
from tpkernels.groups.initialize import (
    GroupSettings,
    create_process_groups,
    destroy_model_parallel,
    initialize_model_parallel,
    kinds_alike,
)
from tpkernels.groups.plan import COMBINED_KINDS, KINDS, plan_groups
from tpkernels.groups.state import ParallelStateError, current_or_none


@on_ranks(2)
def test_groups_have_the_given_timeout_or_the_default_groups() -> None:
    assert c10d.default_timeout().total_seconds() == COLLECTIVE_SECONDS
    for timeout, expected in ((None, COLLECTIVE_SECONDS), (timedelta(seconds=11), 11)):
        initialize_model_parallel(2, timeout=timeout)
        backend = ps.get_tensor_model_parallel_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == expected
        destroy_model_parallel()


@on_ranks(2)
def test_nobody_goes_on_while_others_still_connect() -> None:
    """Each rank comes back no earlier than the last one has made its groups."""
    made = torch.zeros(1, dtype=torch.float64)
    original = c10d.new_group

    def slow(*args, **kwargs):
        group = original(*args, **kwargs)
        time.sleep(0.3 * dist.get_rank())
        made.fill_(time.monotonic())
        return group

    with patch.object(c10d, "new_group", slow):
        initialize_model_parallel(2, timeout=timedelta(seconds=60))
    returned = time.monotonic()
    dist.all_reduce(made, dist.ReduceOp.MAX)
    assert returned >= float(made)


@on_ranks(2)
def test_a_rank_that_cannot_make_its_groups_is_an_error_on_all() -> None:
    original = c10d.new_group
    groups = len(dist.distributed_c10d._world.pg_map)

    def failing(*args, **kwargs):
        group = original(*args, **kwargs)
        if dist.get_rank() == 1:
            c10d.destroy_group(group)
            raise RuntimeError("no more sockets")
        return group

    words = r"^rank 1 could not create the tp group \[0, 1\]: no more sockets$"
    with patch.object(c10d, "new_group", failing), pytest.raises(ParallelStateError, match=words):
        initialize_model_parallel(2, timeout=timedelta(seconds=60))
    assert current_or_none() is None
    assert len(dist.distributed_c10d._world.pg_map) == groups


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


def test_group_of_all_ranks_is_the_default_group_unless_it_is_to_differ():
    with fake_rank(3, 8):
        state = initialize_model_parallel(8)
        assert state.process_group("tp") is dist.group.WORLD
        assert state.process_group("model") is dist.group.WORLD
        destroy_model_parallel()
        assert dist.is_initialized()
        for difference in (
            {"timeout": timedelta(seconds=5)},
            {"backend": "fake"},
            {"group_options": {"tp": None}},
        ):
            state = initialize_model_parallel(8, **difference)
            assert state.process_group("tp") is not dist.group.WORLD
            assert dist.get_process_group_ranks(state.process_group("tp")) == list(range(8))
            destroy_model_parallel()


def test_unknown_kind_of_options_is_refused():
    with fake_rank(0, 2), pytest.raises(ValueError, match="unknown kind 'tensor'; known are tp, cp"):
        initialize_model_parallel(2, group_options={"tensor": None})


def test_sharing_is_right_on_every_rank():
    """Kinds are judged alike at rank 0; that must hold for all."""
    for split in (None, 0, 1, 2, 3):
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


def count_creations(monkeypatch) -> list[tuple[int, ...]]:
    created: list[tuple[int, ...]] = []
    create = dist.distributed_c10d._new_process_group_helper

    def counting(size, rank, ranks, *args, **kwargs):
        created.append(tuple(ranks))
        return create(size, rank, ranks, *args, **kwargs)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", counting)
    return created


def test_rank_of_a_large_world_creates_at_most_a_dozen_groups(monkeypatch):
    """The classic loops have every rank take part in the creation of every group of the world."""
    for rank in each_rank(2048, ranks=[1, 2047]):
        created = count_creations(monkeypatch)
        initialize_model_parallel(
            8, 8, 2, 4, context_parallel_size=2, expert_model_parallel_size=4
        )  # every kind its own group
        assert len(created) <= 12
        assert all(rank in ranks for ranks in created)
        destroy_model_parallel()
        created.clear()
        classic = [ranks for _, ranks in loop_groups(2048, 8, 8)]
        for ranks in classic:
            dist.new_group(ranks)
        assert len(created) == len(classic) > 1000
        monkeypatch.undo()


def test_group_that_cannot_be_created_is_an_error_that_names_it(monkeypatch):
    destroyed = []
    with fake_rank(1, 4):
        create = c10d.new_group

        def fail_at_dp(ranks, **options):
            if "/dp/" in options["name"]:
                raise RuntimeError("connection refused")
            return create(ranks, **options)

        monkeypatch.setattr(c10d, "new_group", fail_at_dp)
        monkeypatch.setattr(c10d, "destroy_group", destroyed.append)
        with pytest.raises(
            ParallelStateError, match=r"could not create the dp group \[1, 3\]: connection refused"
        ):
            initialize_model_parallel(2)
        assert [dist.get_process_group_ranks(group) for group in destroyed] == [[0, 1]]  # made before it
        assert current_or_none() is None


def test_all_ranks_take_part_when_groups_are_split_off_the_world(monkeypatch):
    """With a device bound to the default group NCCL splits its communicator: a collective of all ranks."""
    plan = plan_groups(world_size=16, tensor=2, pipeline=4, split_rank=2)
    took_part: list[str] = []
    monkeypatch.setattr(c10d, "splits_the_world", lambda backend: True)
    monkeypatch.setattr(c10d, "stand_aside", lambda: took_part.append("aside"))
    monkeypatch.setattr(c10d, "default_timeout", lambda: timedelta(seconds=1))
    monkeypatch.setattr(c10d, "options_beside_products", lambda backend, timeout: None)
    monkeypatch.setattr(c10d, "new_group", lambda ranks, *, name, **_: took_part.append(name.split("/")[2]))
    splits_by_rank = []
    for rank in range(16):
        took_part.clear()
        groups = create_process_groups(plan, rank, 1, GroupSettings())
        splits_by_rank.append(list(took_part))
        assert set(groups) == {kind for kind in KINDS if plan.is_member(rank, kind)}
    everything = splits_by_rank[0]
    assert everything == ["tp", "cp", "dp", "pp", "model", "embedding", "position_embedding"]
    for rank, splits in enumerate(splits_by_rank):
        expected = [kind if plan.is_member(rank, kind) else "aside" for kind in everything]
        assert splits == expected


def test_group_of_one_rank_is_made_when_it_is_asked_for(monkeypatch):
    with fake_rank(3, 8):
        created = count_creations(monkeypatch)
        state = initialize_model_parallel(2, 4)
        assert (3,) not in created
        made = len(created)
        assert "cp" in state.process_groups  # looking makes none
        assert len(state.process_groups) == len(list(state.process_groups))
        assert len(created) == made
        assert dist.get_process_group_ranks(state.process_group("cp")) == [3]
        assert created[-1] == (3,)
        made = len(created)
        assert state.process_group("dp") is state.process_group("ep") is state.process_group("cp")
        assert len(created) == made
        destroy_model_parallel()
        assert len(dist.distributed_c10d._world.pg_map) == 1


@on_ranks(2)
def test_threads_that_ask_at_once_get_one_group() -> None:
    """Eight, for a group not made yet."""
    for _ in range(10):
        initialize_model_parallel(2)
        start = threading.Barrier(8)

        def ask(_: int, start: threading.Barrier = start) -> dist.ProcessGroup:
            start.wait()
            return ps.get_data_parallel_group()

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(ask, range(8)))) == 1
        destroy_model_parallel()


def test_group_that_could_not_be_made_may_be_asked_for_again(monkeypatch):
    with fake_rank(3, 8):
        state = initialize_model_parallel(2, 4)
        create = c10d.new_group
        monkeypatch.setattr(c10d, "new_group", lambda ranks, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.process_group("cp")
        monkeypatch.setattr(c10d, "new_group", create)
        assert dist.get_process_group_ranks(state.process_group("cp")) == [3]


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
    options = {"timeout": 1}
    seen = []
    with fake_rank(0, 8):
        create = c10d.new_group

        def recorded(ranks, **settings):
            seen.append(settings["options"])
            return create(ranks, **{**settings, "options": None})

        monkeypatch.setattr(c10d, "new_group", recorded)
        state = initialize_model_parallel(8, group_options={"tp": options, "model": options})
        groups = {id(state.process_group(kind)) for kind in ("tp", "model", "dp")}
        assert len(groups) == 3
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


def test_only_nccl_groups_are_split_off(monkeypatch):
    with fake_rank(0, 2):
        monkeypatch.setattr(c10d, "_split_source", lambda: "a communicator")
        assert c10d.splits_the_world("nccl")
        assert c10d.splits_the_world("cpu:gloo,cuda:nccl")
        assert not c10d.splits_the_world("gloo")
        monkeypatch.setattr(c10d, "_split_source", lambda: None)
        assert not c10d.splits_the_world("nccl")
