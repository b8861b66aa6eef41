"""Ranks that torchrun has restarted do not see what the attempt before left in torchrun's store."""

import pytest
import torch.distributed as dist

from tpkernels.training.launch import join_world


@pytest.fixture
def joined_store(monkeypatch):
    """A way to join in some environment, that gives the store which torch was handed."""
    shared, handed = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(shared, 1, 2)]))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, *, store, **options: handed.append((store, options))
    )

    def join(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        join_world("gloo")
        store, options = handed.pop()
        assert options == {"rank": 1, "world_size": 2, "timeout": None}
        return store

    return join


def test_attempts_on_one_machine_are_told_apart(joined_store):
    first = joined_store(TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="1")
    first.set("address of rank 0", "dead")
    second = joined_store(TORCHELASTIC_RESTART_COUNT="1")
    assert not second.check(["address of rank 0"])
    second.set("address of rank 0", "alive")
    assert joined_store().get("address of rank 0") == b"alive"  # every rank of an attempt meets the others


def test_on_several_machines_nothing_is_assumed(joined_store):
    # each counts the restarts of its own ranks
    first = joined_store(TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="2")
    first.set("from one machine", "here")
    assert joined_store(TORCHELASTIC_RESTART_COUNT="1").check(["from one machine"])
