"""Buckets in NCCL's registered memory, with stand-ins for NCCL: who gets it, by what, until when."""

import gc
import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.buckets.nccl_stand_in import standing_in
from tests.buckets.ways import on_ranks
from tests.ops.transport_cases import heard
from tpkernels.buckets import nccl_memory, registered
from tpkernels.buckets.registered import give_back_unused, registered_zeros
from tpkernels.comm.calls import calls_of
from tpkernels.comm.groups import start_all_reduce
from tpkernels.comm.transports import select

pytestmark = pytest.mark.way("auto")

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16]


def zeros(group, elements=(1000, 3000), reduction="all_reduce"):
    return registered_zeros(group, elements, FLOATS[: len(elements)], CPU, reduction)


def outcome(world, flats):
    """What this rank has, and whether it is good."""
    assert not world.broken, world.broken
    if flats is None:
        return "plain"
    assert [(flat.numel(), flat.dtype) for flat in flats] == [(1000, FLOATS[0]), (3000, FLOATS[1])]
    assert not any(flat.any() for flat in flats)
    assert len(world.pools) >= 1
    return "registered"


def choose(times_of_rank):
    group = dist.group.WORLD
    with (
        standing_in(group, times=times_of_rank[dist.get_rank()]) as world,
        heard("tpkernels.choices") as lines,
    ):
        flats = zeros(group)
        said = world.said.copy()
        return outcome(world, flats), lines, said, len(world.pools)


@pytest.mark.parametrize(
    ("times", "chosen", "told"),
    [
        ([(1.0, 2.0), (1.5, 1.6)], "registered", "registered 1.5 ms, plain 2 ms"),
        ([(2.0, 2.0), (1.0, 1.0)], "registered", "registered 2 ms, plain 2 ms"),
        ([(1.0, 2.0), (2.5, 1.0)], "plain", "registered 2.5 ms, plain 2 ms"),  # not so for rank 0 alone
    ],
    ids=["faster", "as_fast", "slower_on_one_rank"],
)
def test_the_slowest_rank_of_each_memory_decides(ranks2, times, chosen, told):
    for found, lines, said, left in ranks2.run(choose, times):
        assert found == chosen
        (line,) = lines
        assert line.startswith("gradient buckets of up to 0.00781 MiB bfloat16, all_reduce, process group '")
        assert line.endswith(f"' of 2 ranks: {chosen} memory ({told})")
        assert said.count("time all_reduce") == 1
        assert left == (1 if chosen == "registered" else 0)


def choose_again(times):
    group = dist.group.WORLD
    with standing_in(group, times=times) as world, heard("tpkernels.choices") as lines:
        found = []
        for elements, reduction in [
            ((1000, 3000), "all_reduce"),
            ((1000, 3333), "all_reduce"),  # of the same size class
            ((1000, 3000), "reduce_scatter"),
            ((1000, 9000), "all_reduce"),
        ]:
            said, calls = len(world.said), calls_of(group)._number
            is_registered = zeros(group, elements, reduction) is not None
            timed = [word for word in world.said[said:] if word.startswith("time")]
            found.append((is_registered, timed, calls_of(group)._number - calls))
        assert not world.broken, world.broken
        return found, len(lines)


def test_each_class_and_reduction_is_timed_once(ranks2):
    (found, lines), other = ranks2.run(choose_again, (1.0, 2.0))
    assert (found, lines) == other
    assert found == [
        (True, ["time all_reduce"], 4),  # who wants it, a small pool, the buckets, times
        (True, [], 1),
        (True, ["time reduce_scatter"], 2),
        (True, ["time all_reduce"], 2),
    ]
    assert lines == 3


def test_what_was_slower_is_not_asked_for_again(ranks2):
    (found, lines), other = ranks2.run(choose_again, (2.0, 1.0))
    assert (found, lines) == other
    assert [(kept, numbers) for kept, _, numbers in found] == [(False, 4), (False, 0), (False, 2), (False, 2)]


def lack_on_one(planted, transport):
    group, rank = dist.group.WORLD, dist.get_rank()
    with (
        standing_in(group, **(planted if rank == 1 else {})) as world,
        patch.object(select, "requested_transport", transport if rank == 1 else "auto"),
        heard("tpkernels.choices") as lines,
    ):
        found = outcome(world, zeros(group)), outcome(world, zeros(group))
        timed = [word for word in world.said if word.startswith("time")]
        give_back_unused()
        left = len(world.pools), len(registered._held)
    total = torch.ones(1)
    start_all_reduce(group, total, ReduceOp.SUM, None).wait()
    return found, lines, timed, left, total.item()


@pytest.mark.parametrize(
    ("planted", "transport", "why", "stays"),
    [
        ({}, "c10d", "TPKERNELS_TRANSPORT=c10d", 0),
        ({"backend": "gloo"}, "auto", "the backend for cpu is gloo", 0),
        ({"fails_at": "register"}, "auto", "RuntimeError: planted: cannot register", 1),
        ({"fails_at": "register the buckets"}, "auto", "RuntimeError: planted: cannot register", 1),
        ({"fails_at": "zeros"}, "auto", "OutOfMemoryError: planted: no memory", 0),
    ],
    ids=["unwanted", "other_backend", "refused", "refused_later", "out_of_memory"],
)
def test_if_one_rank_lacks_it_none_has_it_and_none_hangs(ranks2, planted, transport, why, stays):
    results = ranks2.run(lack_on_one, planted, transport)
    for rank, (found, (line,), timed, left, total) in enumerate(results):
        assert found == ("plain", "plain")
        assert line.endswith(f"rank 1 cannot take part: {why})")
        assert not timed
        assert left == (0, stays if rank == 1 else 0)  # segments that may be registered keep their addresses
        assert total == 2.0


@on_ranks(2)
def test_after_a_failure_it_is_plain_memory_for_good():
    group = dist.group.WORLD
    with standing_in(group) as world:
        first = zeros(group) is not None
        world.fails_at = "zeros" if dist.get_rank() == 1 else ""
        second = zeros(group) is not None
        world.fails_at = ""
        before = calls_of(group)._number
        third = zeros(group) is not None
        assert not world.broken, world.broken
        assert (first, second, third, calls_of(group)._number - before) == (True, False, False, 0)


@on_ranks(2)
def test_buckets_at_other_offsets_are_not_sent_from_registered_memory():
    group = dist.group.WORLD
    with standing_in(group, offset=16 * dist.get_rank()) as world, heard("tpkernels.choices") as lines:
        assert outcome(world, zeros(group)) == "plain"
    assert "buckets of rank 1 lie elsewhere in segments than rank 0's" in lines[0]


@on_ranks(2)
def test_other_sizes_on_a_rank_are_an_error_of_all():
    words = "expected equal arguments on all ranks, got 2 buckets of 400"
    with standing_in(dist.group.WORLD), pytest.raises(ValueError, match=words):
        zeros(dist.group.WORLD, (1000, 3000 + dist.get_rank()))


def outlive(order):
    """Events after the buckets have been made, by step."""
    group = dist.new_group(list(range(dist.get_world_size())))  # which may be destroyed
    with standing_in(group) as world:
        flats = zeros(group)
        steps = []

        def step():
            give_back_unused()
            gc.collect()
            steps.append(world.said.copy())
            world.said.clear()

        def destroy():
            dist.destroy_process_group(group)

        world.said.clear()
        view = flats[1][5:7]
        if order == "memory_first":
            del flats
            step()
            del view
            step()
            destroy()
        elif order == "group_first":
            destroy()
            step()
            view.fill_(1)
            del flats, view
        elif order == "refused":
            world.fails_at = "deregister"
            del flats, view
            step()
            destroy()
        else:
            del flats, view
            with patch.object(*MEANWHILE[order]):
                step()
        step()
        assert not world.broken, world.broken
        return steps


MEANWHILE = {
    "forked": (os, "getpid", lambda: -1),
    "capturing": (nccl_memory, "is_capturing", lambda device: True),
}
GIVEN_BACK = ["synchronize", "deregister", "freed"]


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("memory_first", [[], GIVEN_BACK, []]),
        ("group_first", [[], ["freed"]]),
        ("refused", [["synchronize", "deregister"], ["freed"]]),
        ("forked", [[], GIVEN_BACK]),
        ("capturing", [[], GIVEN_BACK]),
    ],
)
def test_memory_ends_once_in_every_order(ranks2, order, steps):
    assert ranks2.run(outlive, order) == [steps, steps]


@on_ranks(2)
def test_on_a_cpu_and_under_capture_nothing_is_asked():
    group = dist.group.WORLD
    before = calls_of(group)._number
    for device, capturing in (("cpu", False), ("cuda", True)):
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing):
            assert registered_zeros(group, [1000], FLOATS[:1], torch.device(device), "all_reduce") is None
    assert calls_of(group)._number == before


@on_ranks(1)
def test_a_rank_alone_registers_nothing():
    with standing_in(dist.group.WORLD) as world:
        assert (zeros(dist.group.WORLD), world.said) == (None, [])


class _OldBackend:
    def name(self):
        return "nccl"


class _Backend(_OldBackend):
    mem_allocator = register_mem_pool = deregister_mem_pool = None


@pytest.mark.parametrize(
    ("backend", "environment", "deterministic", "why"),
    [
        (_Backend, {}, False, ""),
        (_Backend, {"NCCL_LOCAL_REGISTER": "1"}, False, ""),
        (_Backend, {"NCCL_LOCAL_REGISTER": "0"}, False, "NCCL_LOCAL_REGISTER=0"),
        (_Backend, {}, True, "a choice by time could change the bits of sums from run to run"),
        (_OldBackend, {}, False, f"_OldBackend of torch {torch.__version__} has no mem_allocator"),
    ],
)
def test_who_wants_it_and_who_can_have_it(backend, environment, deterministic, why, monkeypatch):
    monkeypatch.delenv("NCCL_LOCAL_REGISTER", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nccl_memory, "backend_of", lambda group, device: backend())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert nccl_memory.why_not(None, CPU) == why
    monkeypatch.setattr(nccl_memory.mode, "segments", 8)
    assert nccl_memory.why_not(None, CPU).startswith("a choice by time")
