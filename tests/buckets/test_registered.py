"""Buckets in NCCL's registered memory: who gets it, by what, until when; with stand-ins, and on a GPU."""

import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.buckets.nccl_stand_in import left_held, standing_in
from tests.buckets.ways import on_ranks
from tests.ops.transport_cases import heard
from tpkernels import GradientBuckets, bucketed_all_reduce_
from tpkernels.buckets import registered
from tpkernels.buckets.memory import BucketMemory
from tpkernels.buckets.registered import ROUNDS, WARM_UPS, give_back_unused, milliseconds, registered_zeros
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


@pytest.mark.parametrize(
    ("times", "chosen", "told"),
    [
        ([(1.0, 2.0), (1.5, 1.6)], "registered", "registered 1.5 ms, plain 2 ms"),
        ([(2.0, 2.0), (1.0, 1.0)], "registered", "registered 2 ms, plain 2 ms"),
        ([(1.0, 2.0), (2.5, 1.0)], "plain", "registered 2.5 ms, plain 2 ms"),  # not so for rank 0 alone
    ],
    ids=["faster", "as_fast", "slower_on_one_rank"],
)
@on_ranks(2)
def test_the_slowest_rank_of_each_memory_decides(times, chosen, told):
    group = dist.group.WORLD
    with standing_in(group, times=times[dist.get_rank()]) as world, heard("tpkernels.choices") as lines:
        flats = zeros(group)
        assert world.said.count("time all_reduce") == 1
        assert outcome(world, flats) == chosen
        assert len(world.pools) == (1 if chosen == "registered" else 0)
    (line,) = lines
    assert line.startswith("gradient buckets of up to 0.00781 MiB bfloat16, all_reduce, process group '")
    assert line.endswith(f"' of 2 ranks: {chosen} memory ({told})")


CLASSES = [  # elements, reduction, how often it is timed, and how many calls a registered memory takes
    ((1000, 3000), "all_reduce", 1, 4),  # who wants it, a small pool, the buckets, times
    ((1000, 3333), "all_reduce", 0, 1),  # of the same size class
    ((1000, 3000), "reduce_scatter", 1, 2),
    ((1000, 9000), "all_reduce", 1, 2),
]


@pytest.mark.parametrize("faster", [True, False])
@on_ranks(2)
def test_each_class_and_reduction_is_timed_once_and_what_was_slower_is_not_asked_for_again(faster):
    group = dist.group.WORLD
    times = (1.0, 2.0) if faster else (2.0, 1.0)
    with standing_in(group, times=times) as world, heard("tpkernels.choices") as lines:
        for elements, reduction, timed, calls in CLASSES:
            said, before = len(world.said), calls_of(group)._number
            assert (zeros(group, elements, reduction) is not None) == faster
            assert world.said[said:].count(f"time {reduction}") == timed
            assert calls_of(group)._number - before == (calls if faster or timed else 0)
        assert not world.broken, world.broken
    assert len(lines) == 3


LACKS = {  # of rank 1: what is planted, its transport, what is said, and what stays
    "unwanted": ({}, "c10d", "TPKERNELS_TRANSPORT=c10d", 0),
    "other_backend": ({"backend": "gloo"}, "auto", "the backend for cpu is gloo", 0),
    "refused": ({"fails_at": "register"}, "auto", "RuntimeError: planted: cannot register", 1),
    "refused_later": (
        {"fails_at": "register the buckets"},
        "auto",
        "RuntimeError: planted: cannot register",
        1,
    ),
    "out_of_memory": ({"fails_at": "zeros"}, "auto", "OutOfMemoryError: planted: no memory", 0),
}


@pytest.mark.parametrize(("planted", "transport", "why", "stays"), LACKS.values(), ids=LACKS)
@on_ranks(2)
def test_if_one_rank_lacks_it_none_has_it_and_none_hangs(planted, transport, why, stays):
    group, rank = dist.group.WORLD, dist.get_rank()
    with (
        standing_in(group, **(planted if rank == 1 else {})) as world,
        patch.object(select, "requested_transport", transport if rank == 1 else "auto"),
        heard("tpkernels.choices") as lines,
    ):
        for _ in range(2):
            assert outcome(world, zeros(group)) == "plain"
        assert not any(word.startswith("time") for word in world.said)
        give_back_unused()
        # segments that may be registered keep their addresses
        assert (len(world.pools), len(registered._held)) == (0, stays if rank == 1 else 0)
    (line,) = lines
    assert line.endswith(f"rank 1 cannot take part: {why})")
    total = torch.ones(1)
    start_all_reduce(group, total, ReduceOp.SUM, None).wait()
    assert total == 2


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
    assert "buckets of rank 1 have other offsets in segments than rank 0's" in lines[0]


@on_ranks(2)
def test_other_sizes_on_a_rank_are_an_error_of_all():
    words = "expected equal arguments on all ranks, got 2 buckets of 400"
    with standing_in(dist.group.WORLD), pytest.raises(ValueError, match=words):
        zeros(dist.group.WORLD, (1000, 3000 + dist.get_rank()))


MEANWHILE = {
    "forked": (os, "getpid", lambda: -1),
    "capturing": (registered, "is_capturing", lambda device: True),
}


GIVEN_BACK = ["synchronize", "deregister", "freed"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("memory_first", [[], GIVEN_BACK, []]),
        ("group_first", [[], ["freed"]]),
        ("refused", [["synchronize", "deregister"], ["freed"]]),
        ("forked", [[], GIVEN_BACK]),
        ("capturing", [[], GIVEN_BACK]),
    ],
)
@on_ranks(2)
def test_memory_ends_once_in_every_order(order, expected):
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

        world.said.clear()
        view = flats[1][5:7]
        if order == "memory_first":
            del flats
            step()
            del view
            step()
            dist.destroy_process_group(group)
        elif order == "group_first":
            dist.destroy_process_group(group)
            step()
            view.fill_(1)
            del flats, view
        elif order == "refused":
            world.fails_at = "deregister"
            del flats, view
            step()
            dist.destroy_process_group(group)
        else:
            del flats, view
            with patch.object(*MEANWHILE[order]):
                step()
        step()
        assert not world.broken, world.broken
        assert steps == expected


@on_ranks(1, 2)
def test_on_a_cpu_and_under_capture_and_of_a_rank_alone_nothing_is_asked():
    group = dist.group.WORLD
    before = calls_of(group)._number
    for device, capturing in (("cpu", False), ("cuda", True)):
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing):
            assert registered_zeros(group, [1000], FLOATS[:1], torch.device(device), "all_reduce") is None
    if group.size() == 1:
        with standing_in(group) as world:
            assert (zeros(group), world.said) == (None, [])
    assert calls_of(group)._number == before


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
    monkeypatch.setattr(registered, "backend_of", lambda group, device: backend())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert registered.why_not(None, CPU) == why
    monkeypatch.setattr(registered.mode, "segments", 8)
    assert registered.why_not(None, CPU).startswith("a choice by time")


HAD = ["pool", "register"]
TRIED = [*HAD, "synchronize", "deregister", "freed"]  # one byte


def train(reduce, wire_dtype, wanted):
    """Registered at the end, what happened, registered after the model's gradients have gone."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    used = [3, 0, 1, 2]  # so that the first guess of the order is wrong
    with (
        standing_in(group) as world,
        patch.object(BucketMemory, "_why_apart", lambda memory: "they are on cuda"),
    ):
        buckets = GradientBuckets(
            layers, group, reduce=reduce, bucket_bytes=2**15, average=False, wire_dtype=wire_dtype
        )
        for _ in range(3):
            x = torch.randn(2, 64)
            expected = [torch.zeros_like(parameter) for parameter in layers.parameters()]
            for rank in range(2):
                parts = torch.autograd.grad(loss(layers, used, x, rank), list(layers.parameters()))
                expected = [total + part for total, part in zip(expected, parts, strict=True)]
            buckets.zero()
            loss(layers, used, x, dist.get_rank()).backward()
            buckets.finish()
            if reduce == "all_reduce":
                grads = [parameter.grad for parameter in layers.parameters()]
                torch.testing.assert_close(grads, expected, rtol=2e-2, atol=2e-2)
        held, said = left_held(wanted), world.said.copy()
        buckets.detach()
        grads = None
        del buckets
        layers.zero_grad()
        left = left_held(0)
        assert not world.broken, world.broken
        return held, said, left


def loss(layers, used, x, rank):
    for index in used:
        x = layers[index](x)
    return (x * (rank + 1)).sum()


@pytest.mark.parametrize(
    ("reduce", "wire_dtype", "held", "said"),
    [
        # laid out anew after the first step, in memory of its own; the first is given back
        ("all_reduce", None, 1, [*TRIED, *HAD, "time all_reduce", *HAD, *TRIED[2:]]),
        ("all_reduce", torch.bfloat16, 0, []),  # copies are sent
        ("reduce_scatter", None, 1, [*TRIED, *HAD, "time reduce_scatter"]),
    ],
    ids=["all_reduce", "copies", "reduce_scatter"],
)
def test_gradient_buckets_hold_registered_memory_while_they_need_it(ranks2, reduce, wire_dtype, held, said):
    assert ranks2.run(train, reduce, wire_dtype, held) == [(held, said, 0)] * 2


class _Clock:
    """Each reduction takes what the test says."""

    def __init__(self, durations):
        self.now, self.durations, self.reduced = 0.0, durations, []

    def event(self, enable_timing):
        assert enable_timing
        return _Event(self)

    def reduce(self, group, flat, reduction):
        if not torch.equal(flat, torch.zeros_like(flat)):
            raise AssertionError("a tensor of zeros was to be reduced")
        self.reduced.append(flat.dtype)
        self.now += self.durations[flat.dtype][self.reduced.count(flat.dtype) - 1]
        _reduce(group, flat, reduction)


class _Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = self.clock.now

    def elapsed_time(self, end):
        return end.at - self.at


_reduce = registered.reduce


@pytest.mark.parametrize("reduction", ["all_reduce", "reduce_scatter"])
@on_ranks(2)
def test_the_lower_quartile_of_rounds_without_the_first(reduction):
    not_counted = [0.5] * WARM_UPS
    durations = {
        torch.float32: [*not_counted, 9.0, 1.0, 50.0, 2.0, 3.0, 70.0, 80.0, 90.0],
        torch.float64: [*not_counted, *[5.0] * ROUNDS],
    }
    clock = _Clock(durations)
    flats = [torch.zeros(64), torch.zeros(64, dtype=torch.float64)]
    with (
        patch.object(torch.cuda, "Event", clock.event),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda: None),
        patch.object(registered, "reduce", clock.reduce),
    ):
        assert milliseconds(dist.group.WORLD, flats, reduction) == [3.0, 5.0]
    assert clock.reduced == [torch.float32, torch.float64] * (WARM_UPS + ROUNDS)  # in turn
    assert not any(flat.any() for flat in flats)


@on_ranks(2)
def test_buckets_are_reduced_in_place():
    own = [slice(0, 2), slice(2, 4)][dist.get_rank()]
    for reduction, received in (("all_reduce", slice(None)), ("reduce_scatter", own)):
        flat = torch.arange(4.0) * (dist.get_rank() + 1)
        _reduce(dist.group.WORLD, flat, reduction)
        assert flat[received].tolist() == [0.0, 3.0, 6.0, 9.0][received]


def trains(device):
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).to(device)
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=2**15)
    for _ in range(4):  # from the second on buckets leave during backward
        x = torch.randn(8, 64, device=device)
        expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        buckets.zero()
        module(x).square().sum().backward()
        buckets.finish()
        torch.testing.assert_close([parameter.grad for parameter in module.parameters()], list(expected))
    assert buckets.launched_in_backward
    tensors = [torch.full((n,), float(n), device=device) for n in (1, 1000, 7)]
    bucketed_all_reduce_(tensors, dist.group.WORLD)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [1000.0], [7.0]]


TRAINS = """
import torch.distributed as dist
from tests.buckets.test_registered import trains

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
trains("cuda")
dist.destroy_process_group()
"""

REGISTERS = """
import torch
import torch.distributed as dist
from tpkernels.buckets import registered
from tpkernels.buckets.registered import milliseconds, reduce

device = torch.device("cuda", 0)
torch.cuda.set_device(device)

def allocated():
    group = dist.new_group([0])
    registered.connected_by_all(group, device)
    dtypes = [torch.bfloat16, torch.float32]
    flats, plain = registered.registered_by_all(group, [1000, 2**22], dtypes, device, 1)
    times = milliseconds(group, [flats[1], *plain], "all_reduce")
    assert min(times) > 0, times
    for flat in flats:
        flat.fill_(3)
        reduce(group, flat, "all_reduce")
        reduce(group, flat, "reduce_scatter")
        assert flat.eq(3).all()
    return group, flats, plain

def left():
    registered.give_back_unused()
    return len(registered._held)

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert registered.why_not(dist.group.WORLD, device) == ""
for _ in range(3):  # an address that comes again is registered anew
    group, flats, plain = allocated()
    before = torch.cuda.memory_reserved()
    assert left() == 1
    view = flats[1][5:7]
    del flats, plain
    assert left() == 1
    assert view.eq(3).all()
    del view
    assert left() == 0
    assert torch.cuda.memory_reserved() < before
    dist.destroy_process_group(group)
group, flats, plain = allocated()
dist.destroy_process_group(group)
assert left() == 1
assert flats[1].eq(3).all()
del flats
assert left() == 0
group, flats, plain = allocated()  # and the process ends with both
dist.destroy_process_group()
print("all given back")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("program", "said"), [(TRAINS, ""), (REGISTERS, "all given back\n")], ids=["trains", "registers"]
)
def test_a_rank_alone_on_a_gpu(program, said):
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout == said
