"""What `qualify` says of gradient buckets, here and with a stand-in for NCCL, and with one thing wrong."""

import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.nccl_stand_in import left_held, standing_in
from tpkernels.buckets import registered
from tpkernels.buckets.build import problem_with_extension
from tpkernels.cli import qualify_checks
from tpkernels.cli.qualify_world import QualifyWorld
from tpkernels.comm.groups import LiveGroup

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    if problem := problem_with_extension():
        pytest.skip(problem[1])


def this_rank():
    return QualifyWorld(dist.get_rank(), dist.get_world_size(), CPU, 1, 60.0, True)


def checked(planted):
    number = qualify_checks.numbers

    def off_by_one(world, elements, step, factor):
        right = number(world, elements, step, factor)
        if planted == "rank 1 is off" and world.rank == 1 and step == 2 and factor == 2:
            right[7] += 1
        if planted == "rank 0 expects else" and world.rank == 0 and step == 2 and factor == 3:
            right[7] += 1
        return right

    def destroyed(group):
        raise RuntimeError("planted: gone")

    with (
        patch.object(qualify_checks, "numbers", off_by_one),
        patch.object(LiveGroup, "get", destroyed if planted == "it raises" else LiveGroup.get),
    ):
        return [(c.part, c.name, c.status, c.text, sorted(c.numbers)) for c in
                qualify_checks.check_buckets(this_rank())]  # fmt: skip


def test_buckets_over_each_way_have_exact_sums_and_times(ranks2):
    for (part, name, status, text, numbers), *others in ranks2.run(checked, ""):
        assert (part, name, status) == ("buckets", "gradients", "right")
        assert text.startswith("exact sums; backward: c10d ")
        assert numbers == ["auto", "c10d"]
        assert not others  # of registered memory a CPU says nothing


WRONG = "rank 0: ArithmeticError: step 2 over c10d: the sum of gradient 0 is wrong"
PLANTED = {  # fault -> what is said of it, a regular expression
    "rank 1 is off": WRONG,
    "rank 0 expects else": f"^{WRONG}$",  # and the other rank does not wait for it
    "it raises": "rank 1: RuntimeError: planted: gone",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_wrong_is_named_with_rank_step_and_way(planted, ranks2):
    for (_, _, status, text, _), *_ in ranks2.run(checked, planted):
        assert status == "wrong"
        assert re.search(PLANTED[planted], text)


def test_a_rank_alone_sends_nothing(ranks1):
    assert ranks1.run(checked, "") == [
        [("buckets", "gradients", "left out", "a rank alone sends nothing", [])]
    ]


def in_registered_memory(planted):
    """With few numbers, as a CPU has."""
    group, rank = dist.group.WORLD, dist.get_rank()

    def reduce(group, flat, reduction):
        plain(group, flat, reduction)
        if planted == "sums" and rank == 0 and reduction == "reduce_scatter":
            flat[3] += 1

    plain = registered.reduce
    fails_at = planted if rank == 1 and planted == "register" else ""
    with (
        patch.object(qualify_checks, "GPU_ELEMENTS", 100),
        patch.object(registered, "reduce", reduce),
        standing_in(group, fails_at=fails_at, times=(1.0 + rank, 3.0)) as world,
    ):
        rank_here = this_rank()
        step = partial(qualify_checks._in_registered_memory, rank_here, group)
        line = rank_here.check("buckets", "registered", step)
        left = left_held(int(fails_at != ""))  # a segment that may be registered keeps its address
        assert not world.broken, world.broken
        return (line.status, line.text), left


def test_registered_memory_is_tried_whatever_is_faster(ranks2):
    times = "registered 2 ms, plain 3 ms"
    said = f"exact sums of 0.00458 MiB; all_reduce: {times}; reduce_scatter: {times}"
    assert ranks2.run(in_registered_memory, "") == [(("right", said), 0)] * 2


def test_registered_memory_that_a_rank_lacks_is_left_out(ranks2):
    for rank, ((status, text), left) in enumerate(ranks2.run(in_registered_memory, "register")):
        assert status == "left out"
        assert text.endswith("rank 1 cannot take part: RuntimeError: planted: cannot register")
        assert left == rank


def test_wrong_sums_in_registered_memory_are_an_error(ranks2):
    said = "rank 0: ArithmeticError: reduce_scatter of 1200 numbers: the sums are wrong"  # no other rank's
    assert ranks2.run(in_registered_memory, "sums") == [(("wrong", said), 0)] * 2
