"""Ranks that part ways: calls that end half-way, calls that differ, groups that nobody may use any more."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.on_ranks import on_ranks
from tests.ops.parallel_behaviour import meet
from tests.ops.test_second_derivatives import OPS
from tests.ops.transport_cases import using
from tests.patience import patient
from tests.products import once, pairwise
from tests.programs import forked
from tpkernels import Recipe
from tpkernels.buckets import collectives as bucketed
from tpkernels.comm import calls
from tpkernels.comm.calls import EAGER_BYTES, Call, Calls, calls_of
from tpkernels.ops import (
    column_linear,
    linear_cross_entropy,
    parallel_mlp,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)
from tpkernels.ops.tensor_parallel import mappings, parallel

TOKENS, WIDTH = 8, 12

# Looking at a flag. How often depends on the other rank.
LOOKS = (torch.ops.aten.select.int, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class Planted(TorchDispatchMode):
    """Counts torch's operators, and fails in the one with a given number."""

    def __init__(self, point: int | None) -> None:
        super().__init__()
        self.point, self.seen = point, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += function not in LOOKS
        if self.seen == self.point and function not in LOOKS:
            raise MemoryError("planted")
        return function(*args, **(kwargs or {}))


class PlantedLine:
    """Counts lines of ours, and fails in the one with a given number; but those that look at flags."""

    def __init__(self, point: int | None) -> None:
        self.point, self.seen = point, 0

    def __enter__(self) -> PlantedLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not re.search("/tpkernels/(comm|ops)/", file) or file.endswith("/host.py"):
            return None
        self.seen += event == "line"
        if self.seen == self.point:
            sys.settrace(None)
            raise MemoryError("planted")
        return self._trace


PLANTED = {"operators": Planted, "lines": PlantedLine}
Step = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]  # of a group and tensors; shapes of these
X, W = (TOKENS, WIDTH), (8, WIDTH)
RECIPE = Recipe.rowwise()
STEPS: dict[str, Step] = {
    name: OPS[name] for name in ("column_gelu", "row", "row_sequence", "cross_entropy")
} | {
    "column of shards": (lambda g, x, w: column_linear(x, w, None, g, sequence_parallel=True), (X, W)),
    "row in turn": (lambda g, x, w: row_linear(x, w, None, g, overlap=False), (X, W)),
    "mlp": (lambda g, x, u, d: parallel_mlp(x, u, None, d, None, g, sequence_parallel=True), (X, W, (4, 8))),
    "mlp in fp8": (
        lambda g, x, u, d: parallel_mlp(x, u, None, d, None, g, sequence_parallel=True, quantize=RECIPE),
        (X, W, (4, 8)),
    ),
    "embedding": (lambda g, w: vocab_embedding(torch.arange(TOKENS), w, g, sequence_parallel=True), (W,)),
    "head": OPS["head_mean"],
    "region": (lambda g, x: mappings.gather_from_sequence_region(x, g), (X,)),
}


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _run(step: Step, group: dist.ProcessGroup, seed: int) -> Tensor:
    torch.manual_seed(seed + dist.get_rank())
    op, shapes = step
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    y = op(group, *leaves)
    y.sum().backward()
    return torch.cat([y.detach().flatten(), *(leaf.grad.flatten() for leaf in leaves)])


def called(step: Step, group: dist.ProcessGroup) -> Tensor:
    op, shapes = step
    return op(group, *map(torch.ones, shapes))


def interrupted(
    name: str, transport: str, failing: int, count: int, among: str = "operators"
) -> list[tuple[int, str, str]]:
    """(point, what this rank says of the step in which one rank fails there, of the next one)

    What is said is "no error" where all calls had ended already, and the next step has the right numbers.

    count: of points, spread over all that lie behind the begin of the step's first call
    """
    rank, step, planted = dist.get_rank(), STEPS[name], PLANTED[among]
    with using(transport):
        first, last = _points(step, among)
        span = [torch.tensor([first, last]) for _ in range(dist.get_world_size())]
        dist.all_gather(span, torch.tensor([first, last]))
        first, last = span[failing].tolist()
        points = range(first, last + 1, max(1, (last + 1 - first) // count))
        found = []
        for point in points:
            group, wrong = dist.new_group(), list[bool]()
            expected = _run(step, group, 2)  # now exchanges are open, too
            with planted(point) if rank == failing else nullcontext():
                during = said_by(lambda: _run(step, group, 1))  # noqa: B023
            after = said_by(lambda: wrong.append(not _run(step, group, 2).equal(expected)))  # noqa: B023
            found.append((point, during, f"{after}, wrong numbers" if any(wrong) else after))
            dist.barrier()
            dist.destroy_process_group(group)
        return found


def _points(step: Step, among: str = "operators") -> tuple[int, int]:
    """Operators, or lines, behind the begin of the step's first call: numbers of the first and the last."""
    group, begins = dist.new_group(), []
    _run(step, group, 0)
    with PLANTED[among](None) as mode:
        original = Calls.begin

        def noting(self: Calls, *arguments: Any, moves: bool = True) -> Call:
            if moves:
                begins.append(mode.seen)
            return original(self, *arguments, moves=moves)

        with patch.object(Calls, "begin", noting):
            _run(step, group, 0)
    dist.barrier()
    return begins[0] + 1, mode.seen


def asked(how: str, group: dist.ProcessGroup) -> Callable[[], object]:
    """A call whose second rank asks for something else than the first."""
    odd = dist.get_rank() == 1
    x, ids = torch.randn(TOKENS, WIDTH), torch.arange(TOKENS) % WIDTH
    w, narrow = torch.ones(WIDTH, WIDTH, requires_grad=True), torch.ones(4, WIDTH)

    def column(x_grad: bool = True, w_grad: bool = True, **options: Any) -> None:
        # more than a message holds: of fewer, ranks keep x and send the same
        shard = x.repeat(EAGER_BYTES // x.nbytes + 1, 1).requires_grad_(x_grad)
        weight = w.detach().clone().requires_grad_(w_grad)
        column_linear(shard, weight, None, group, sequence_parallel=True, **options).sum().backward()

    def backward() -> None:
        with patch.object(parallel, "debug", False):  # which would have told
            y = column_linear(x.requires_grad_(), w.detach() if odd else w, None, group)
        y.sum().backward()

    def in_region() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
            row_linear(x, w, None, group)

    dtype = torch.float64 if odd else torch.float32
    ways: dict[str, Callable[[], object]] = {
        "x needs a gradient": lambda: (column(x_grad=not odd), column()),
        "the weight needs a gradient": lambda: (column(w_grad=not odd), column()),
        "save_gathered": lambda: (column(save_gathered=odd), column()),
        "rows": lambda: row_linear(torch.randn(TOKENS + 2 * odd, WIDTH), narrow, None, group),
        "dtype": lambda: row_linear(x.to(dtype), narrow.to(dtype), None, group),
        "ops": lambda: called(STEPS["column of shards" if odd else "row"], group),
        "label_smoothing": lambda: vocab_cross_entropy(x, ids, group, label_smoothing=0.1 * odd),
        "ignore_index": lambda: vocab_cross_entropy(x, ids, group, ignore_index=-1 if odd else -100),
        "vocab_size": lambda: vocab_cross_entropy(x, ids, group, vocab_size=2 * WIDTH - odd),
        "requires_grad": lambda: column_linear(x.requires_grad_(odd), w, None, group),
        "activation": lambda: column_linear(x, w, None, group, activation="gelu" if odd else "relu"),
        "sequence_parallel": lambda: row_linear(x, w, None, group, sequence_parallel=odd),
        "autocast": in_region,
        "backward": backward,
        "vocab_size of ids": lambda: vocab_embedding(ids, w, group, vocab_size=2 * WIDTH - odd),
        "chunk_tokens": lambda: linear_cross_entropy(x, w, ids, group, chunk_tokens=2 + odd),
    }
    return ways[how]


def said_of_differences(how: str, transport: str, seconds: float = 30.0) -> str:
    """What a rank says whose peer asks for something else."""
    with using(transport):
        message = said_by(asked(how, dist.new_group(timeout=timedelta(seconds=seconds))))
        dist.barrier()  # no rank was aborted
        return message


COMPARED = ["requires_grad", "activation", "sequence_parallel", "autocast", "backward", "ignore_index"]
COMPARED += ["label_smoothing", "vocab_size of ids", "chunk_tokens", "rows"]


@pytest.mark.parametrize("how", COMPARED)
@on_ranks(2)
def test_debug_mode_compares_all_that_ranks_ask_for(how):
    with patch.object(parallel, "debug", True):
        message = said_by(asked(how, dist.new_group()))
    assert "ranks disagree on tensor" in message
    if how == "rows":
        assert "(8, 4)" in message
        assert "(10, 4)" in message


@pytest.mark.parametrize("transport", ["c10d", "shared"])
@on_ranks(2)
def test_ranks_that_are_slow_are_left_alone(transport):
    """They come late by more than others are patient, and get their numbers."""
    group = dist.new_group()
    with using(transport):
        for seed in range(2):
            time.sleep(0.8 * ((seed + dist.get_rank()) % 2))
            assert _run(STEPS["mlp"], group, seed).isfinite().all()


@on_ranks(2)
def test_a_group_that_was_destroyed_is_refused_by_all_that_take_one():
    group, x = dist.new_group(), torch.randn(TOKENS, WIDTH)
    y = column_linear(x.requires_grad_(), torch.ones(4, WIDTH, requires_grad=True), None, group)
    dist.barrier()
    dist.destroy_process_group(group)
    refused: list[Callable[[], object]] = [partial(called, step, group) for step in STEPS.values()]
    refused += [partial(bucketed.bucketed_all_reduce_, [x.detach()], group), lambda: y.sum().backward()]
    for call in refused:
        assert "was destroyed" in said_by(call)


@on_ranks(2)
def test_a_forked_child_may_not_use_the_groups_of_its_parent():
    """One that was used before the fork, and one that was not."""
    used, unused = dist.new_group(), dist.new_group()
    called(STEPS["row"], used)
    said = forked(lambda: [said_by(lambda: called(STEPS["row"], group)) for group in (used, unused)])  # noqa: B023
    called(STEPS["row"], used)  # the parent goes on
    assert ["make process groups after the fork" in message for message in said] == [True, True], said


@on_ranks(2)
def test_other_groups_go_on_after_one_has_failed():
    for transport in ("c10d", "shared"):
        broken, sound = dist.new_group(), dist.new_group()
        with using(transport):
            first, _ = _points(STEPS["row"])
            _run(STEPS["row"], broken, 0)
            with Planted(first) if dist.get_rank() == 0 else nullcontext():
                said_by(lambda: _run(STEPS["row"], broken, 1))  # noqa: B023
            assert _run(STEPS["row"], sound, 2).isfinite().all()
            assert calls_of(broken).failure
            assert not calls_of(sound).failure
        dist.barrier()


@on_ranks(2)
def test_an_interruption_while_ranks_compare_ends_the_group():
    group, is_interrupted = dist.new_group(), dist.get_rank() == 0
    x, w = torch.randn(TOKENS, WIDTH), torch.ones(4, WIDTH)
    broken = patch.object(Call, "confirm", side_effect=KeyboardInterrupt)
    told = pytest.raises(KeyboardInterrupt if is_interrupted else RuntimeError)
    with broken if is_interrupted else nullcontext(), told:
        row_linear(x, w, None, group)
    words = "has failed and cannot be used any more: rank 0: KeyboardInterrupt"
    with pytest.raises(RuntimeError, match=words):
        row_linear(x, w, None, group)
    dist.barrier()


@on_ranks(4)
def test_a_group_that_fails_wakes_ranks_also_where_others_have_failed_before():
    """Rank 0 waits for rank 2, which fails after rank 3, its own neighbour, has closed all."""
    rank, group = dist.get_rank(), dist.new_group()
    started = time.monotonic()
    if rank == 3:
        calls_of(group).fail("planted")
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)
        calls_of(group).fail("planted later")
    if rank == 0:
        with pytest.raises(RuntimeError):
            group.recv([torch.empty(1)], 2, 5).wait()
    assert time.monotonic() - started < patient(15)
    dist.barrier()


@on_ranks(4)
def test_headers_that_differ_are_told_to_all_ranks_at_once():
    """Three ranks are in one call, the last is in another."""
    rank, group = dist.get_rank(), dist.new_group()
    called(STEPS["row"], group)
    dist.barrier()
    started = time.monotonic()
    said = said_by(lambda: called(STEPS["column of shards" if rank == 3 else "row_sequence"], group))
    assert time.monotonic() - started < patient(15)
    assert "ranks have left the common order of calls: call " in said
    assert "'row_linear: shards of the sum (4, 4) torch.float32' on rank " in said
    assert "'column_linear: gather of x (8, 12) torch.float32' on rank 3" in said
    dist.barrier()


ROWS, COLUMNS = torch.ones(256, 128), torch.ones(4, 128)  # as much as ranks share memory for
ACTIONS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "large": lambda group: column_linear(ROWS, COLUMNS, None, group, sequence_parallel=True),
    "wide": lambda group: row_linear(
        torch.ones(512, 4), COLUMNS.T.contiguous(), None, group, sequence_parallel=True
    ),
    "small": lambda group: called(STEPS["column of shards"], group),
    "refused": lambda group: column_linear(ROWS, COLUMNS[:, :3], None, group, sequence_parallel=True),
    "ids": lambda group: vocab_embedding(torch.arange(512) % 4, COLUMNS, group, sequence_parallel=True),
    "other ids": lambda group: vocab_embedding(torch.arange(512) % 3, COLUMNS, group, sequence_parallel=True),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["so", "swapped"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("large", "wide"),
        ("large", "small"),
        ("large", "refused wide"),
        ("large", "refused large"),
        ("large", "refused small"),
        ("large", "refused refused small"),
        ("large", "ids"),
        ("large small", "small large"),
        ("large wide", "wide wide"),
        ("ids", "other ids"),
        ("ids", "refused large"),
    ],
)
@on_ranks(2)
def test_ranks_that_part_ways_in_memory_that_they_share_are_told(ours, theirs, swapped):
    """No header tells them, where one of them waits for a flag."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    for action in ("large", "wide", "small", *["ids"] * 4):  # others of these are not compared, but noted
        ACTIONS[action](group)
    dist.barrier()
    started, said = time.monotonic(), "no error"
    for action in re.findall("other ids|[a-z]+", theirs if dist.get_rank() != swapped else ours):
        said = said_by(lambda: ACTIONS[action](group))  # noqa: B023
        if action != "refused" and said != "no error":
            break
    assert "ranks have left the common order of calls: " in said, said
    assert time.monotonic() - started < patient(4)
    dist.barrier()


@on_ranks(2)
def test_ranks_that_wait_long_and_make_notes_go_on_together():
    """For more calls than pages have headers of; pages go with their group."""

    def pages() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:tpkernels calls")

    group, others = dist.new_group(), pages()
    with patch.object(calls, "_LATEST", 4):
        for turn in range(6):
            ACTIONS["large"](group)
            time.sleep(0.5 * (turn % 2 == dist.get_rank()))
            for _ in range(turn):
                said_by(partial(ACTIONS["refused"], group))
            ACTIONS["ids"](group)
            time.sleep(0.5 * (turn % 2 != dist.get_rank()))
    assert calls_of(group)._number > 3 * 4
    assert pages() == others + 2
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert pages() == others


@pytest.mark.parametrize("transport", ["c10d", "chunks"])
@on_ranks(2)
def test_a_rank_may_leave_after_its_last_call(transport):
    """Receives for its next messages are posted: an error only of a call that it does not make."""
    rank, group = dist.get_rank(), dist.new_group()
    with using(transport):
        for _ in range(2):
            called(STEPS["mlp"], group)
        meet("all have called")
        if rank == 1:
            dist.destroy_process_group(group)
            del group
            gc.collect()
        meet("one has left")
        if rank == 0:
            time.sleep(0.2)
            said = said_by(lambda: called(STEPS["mlp"], group))
            assert said.startswith("RuntimeError: parallel_mlp: r")
            assert "rank 1" in said
    dist.barrier()


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="failures are planted among operators of the CPU"
)

FIRST_CAUSE = "MemoryError: planted"


def assert_all_are_told(answers: list[list[tuple[int, str, str]]], failing: int) -> None:
    """Of the first cause, in the step after; or all are right, as the failure came behind the last call."""
    told = 0
    for points in zip(*answers, strict=True):
        assert points[failing][1] == FIRST_CAUSE
        after = [said for _, _, said in points]
        if after != ["no error"] * len(points):
            assert all(FIRST_CAUSE in said or "left the common order of calls" in said for said in after), (
                points
            )
            told += 1
    assert told >= len(answers[0]) // 2, answers


@once(name=list(STEPS), transport=["c10d", "chunks", "shared"])
def test_a_call_that_ends_half_way_is_an_error_of_every_later_call_on_every_rank(ranks2, name, transport):
    assert_all_are_told(ranks2.run(interrupted, name, transport, 0, 3), 0)


@pairwise(name=["row", "column of shards", "mlp"], transport=["c10d", "chunks", "shared"])
def test_an_error_in_any_line_of_ours_is_told_to_all(ranks2, name, transport):
    assert_all_are_told(ranks2.run(interrupted, name, transport, 0, 12, "lines"), 0)


@pytest.mark.parametrize("transport", ["c10d", "chunks", "shared"])
def test_a_call_that_ends_half_way_is_told_to_four_ranks(ranks4, transport):
    assert_all_are_told(ranks4.run(interrupted, "mlp", transport, 2, 2), 2)


@once(
    how=[
        "x needs a gradient",
        "the weight needs a gradient",
        "save_gathered",
        "rows",
        "dtype",
        "ops",
        "label_smoothing",
        "ignore_index",
        "vocab_size",
    ],
    transport=["c10d", "chunks", "shared"],
)
@on_ranks(2)
def test_ranks_that_ask_for_different_things_are_told_and_live_on(transport, how):
    started = time.monotonic()
    assert "Error: " in said_of_differences(how, transport)
    assert time.monotonic() - started < patient(30)


@on_ranks(2)
def test_a_backend_without_tags_compares_calls_that_are_new():
    with patch.object(Calls, "has_tags", lambda self, device: False):
        for how in ("rows", "sequence_parallel", "label_smoothing"):
            assert "ranks disagree" in said_by(asked(how, dist.new_group())), how
