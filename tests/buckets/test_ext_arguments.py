"""No call of what the C++ extension registers crashes, whatever it is given; what it refuses, it names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.hostile import (
    GOOD,
    LAYOUT,
    PROGRAMS,
    Calling,
    buckets,
    memory_of,
    parameters,
    run_programs,
)
from tests.buckets.ways import on_ranks
from tests.checks import error_of
from tests.patience import patient
from tests.ranks import RankFailure, RankPool
from tpkernels.extension import ExtensionState, extension

PROGRAMS_OF = {"engine": 150, "threads": 30, "end": 30, "reserve": 30, "handover": 30}
METHODS = {"arrange", "meet", "expect", "zero", "finish", "settle", "set_synchronizing"}
BOTH_WAYS = {  # which calls are accepted, and which refused, at least
    "engine": {"BucketEngine", "backward", *METHODS},
    "threads": {"backward", *METHODS},
    "end": {"end_backends"},
    "reserve": {"reserve_sms"},
    "handover": {"Handover", "end"},
}
V, T, X, R = "ValueError", "TypeError", "IndexError", "RuntimeError"
Changes = Callable[[], dict[str, Any]]  # of an engine's arguments, made anew for each
FLOAT, FLAT, DOUBLE = torch.float32, torch.zeros(32), nn.Parameter(torch.ones(4, 3).double())


@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_call_crashes(kind, tmp_path):
    log, count, wanted = tmp_path / "calls.txt", PROGRAMS_OF[kind], BOTH_WAYS[kind]
    accepted, refused = set[str](), set[str]()
    with RankPool(1) as own:
        for start in range(0, 10 * count, count):  # what threads come to do is chance
            programs = range(start, start + count)
            try:
                (outcome,) = own.run(run_programs, kind, programs, str(log), timeout=patient(120))
            except RankFailure as failure:
                pytest.fail(f"the last call was {log.read_text().splitlines()[-1]}\n{failure}")
            assert outcome.problems == []
            accepted |= {*outcome.accepted}
            refused |= {*outcome.refused}
            if accepted & refused >= wanted:
                break
    assert accepted >= wanted
    assert refused >= wanted


def test_crash_would_be_seen():
    with RankPool(1) as own, pytest.raises(RankFailure, match="killed by signal 6"):
        own.run(os.abort)


def engine(**changes: Any) -> Any:
    assert extension().state is ExtensionState.LOADED
    values = {**GOOD, "parameters": parameters(), "group": dist.group.WORLD.group_name, **changes}
    return torch.classes.tpkernels.BucketEngine(*values.values())


def arranged(*layout: Any, **changes: Any) -> Any:
    made = engine(**changes)
    made.arrange(*(layout or (*LAYOUT, buckets())))
    return made


def meeting(part: int, spoilt: Callable[[Any], Any], *, tensor_parallel: bool = False) -> None:
    """With one of what a rank gives of its memory spoilt."""
    made = arranged()
    memory = memory_of(made)
    memory[part] = spoilt(memory[part])
    made.meet(tensor_parallel, *memory)


def backward_of(tensors: list[torch.Tensor]) -> None:
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()


def backward_before_arrange() -> None:
    tensors = parameters()
    kept = engine(parameters=tensors)
    backward_of(tensors)
    kept.detach()


def backward_after_a_failed_construction() -> None:
    """Hooks of an engine that never was."""
    tensors = parameters()
    loss = torch.stack([tensor.sum() for tensor in tensors]).sum()  # keeps autograd's nodes
    with pytest.raises(ValueError, match="requires none"):
        engine(parameters=[*tensors[:2], torch.ones(())])
    loss.backward()
    raise RuntimeError(f"gradients {[tensor.grad.sum().item() for tensor in tensors]}")


def call_from_within() -> None:
    made = arranged()
    with Calling(made.views):
        made.finish()


def arrange_midway() -> None:
    tensors = parameters()
    made = arranged(parameters=tensors)
    backward_of(tensors)
    made.arrange(*LAYOUT, buckets())


def replaced_parameter() -> None:
    tensors = parameters()
    made = arranged(parameters=tensors)
    tensors[0].data = tensors[0].grad = torch.ones(1)
    made.finish()


def end(group: str, seconds: float) -> None:
    made = dist.new_group([0])
    if group == "destroyed":
        dist.destroy_process_group(made)
    torch.ops.tpkernels.end_backends(made.boxed(), seconds)


def first(parameter: Any, **changes: Any) -> Changes:
    return lambda: {"parameters": [parameter, *parameters()[1:]], **changes}


def ones(**options: Any) -> torch.Tensor:
    return torch.ones(4, 3, **options)


AT = LAYOUT[1]
# of each call, what is wrong in it: by the error's type and words
CONSTRUCTIONS: dict[tuple[str, str], Changes] = {
    (V, "expected at least one parameter, got none"): lambda: {"parameters": [], "names": [], "marked": []},
    (V, "a name and a mark for each of 3 parameters, got 1 names and 3 marks"): lambda: {"names": ["a"]},
    (V, "3 parameters, got 3 names and 4 marks"): lambda: {"marked": [True] * 4},
    (V, "'a': expected a leaf that requires a gradient, got one that requires none"): first(ones()),
    (V, "a leaf that requires a gradient, got one that is computed"): first(nn.Parameter(ones()) * 2),
    (T, "'a': expected a dense tensor, got a sparse one"): first(ones().to_sparse().requires_grad_()),
    (V, "a tensor with data, got one on the meta device"): first(nn.Parameter(ones(device="meta"))),
    (T, "float16 or bfloat16, got ComplexFloat"): first(nn.Parameter(ones(dtype=torch.complex64))),
    (V, "'b': expected each parameter once, got one again"): lambda: {"parameters": [parameters()[0]] * 3},
    (T, "grad_dtype: expected float64, float32, float16 or b"): lambda: {"grad_dtype": torch.int32},
    (T, "expected a dtype, got number 99"): lambda: {"wire_dtype": 99},
    (V, "expected a rank from 0 that fits 31 bits, got 2147483648"): lambda: {"rank": 2**31},
    (V, "expected a time-out of 1 ms to a year, got 9223372036"): lambda: {"timeout_ms": 2**63 - 1},
    (R, "registered under the name nobody's"): lambda: {"group": "nobody's"},
    (V, "reserve 0 to 32768 SMs, of at most as many in all, got 1 of -1"): lambda: {"sms": 1, "most_sms": -1},
    (V, "a tensor-parallel group for the parameters that are marked, got"): lambda: {"marked": [True] * 3},
}
ARRANGEMENTS: dict[tuple[str, str], tuple[list[int], list[int], list[torch.Tensor]]] = {
    (V, "a bucket and an offset for each of 3 parameters, got 2 and 3"): ([0, 0], AT, buckets()),
    (X, "'c': expected a bucket from 0 below 2, got 2"): ([0, 0, 2], AT, buckets()),
    (X, "from 0 below 2, got -1"): ([-1, 0, 1], AT, buckets()),
    (V, "in each of 2 buckets, but bucket 1 has none"): ([0, 0, 0], [0, 16, 24], buckets()),
    (X, "leaves room for 5 of the 32 elements of bucket 0, got 28"): ([0, 0, 1], [0, 28, 0], buckets()),
    (V, "bucket 0 to be a flat tensor that needs no gradient"): (*LAYOUT, [FLAT.view(4, 8), FLAT[:16]]),
    (T, "'c': expected a bucket of Float on cpu, got Double"): (*LAYOUT, [FLAT, FLAT[:16].double()]),
    (V, "memory of its own for each bucket, but 0 and 1 overlap"): (*LAYOUT, [FLAT, FLAT[16:]]),
    (V, "each parameter, but 'a' and 'b' overlap in bucket 0"): ([0, 0, 1], [0, 11, 0], buckets()),
}
MEETINGS: dict[tuple[str, str], tuple[int, Callable[[Any], Any]]] = {
    (V, "each of 1 ranks, got 2 doorbells, 1 words and 2 buckets for 2"): (1, lambda bells: bells * 2),
    (V, "expected 2 words as a doorbell and 2 for each of 2 buckets"): (2, lambda all_: [all_[0][:3]]),
    (V, "flat tensors on the CPU like this rank's buckets"): (3, lambda flats: flats[::-1]),
    (V, "one of each machine, of 1 in their order, got [1] and []"): (0, lambda _: [1]),
    (V, "own buckets at its place"): (3, lambda flats: [flat.clone() for flat in flats]),
    (V, "expected a time-out of 1 ms to a year, got 0"): (6, lambda _: 0),
}
CALLS: dict[tuple[str, str], Callable[[], object]] = {
    (V, "to meet ranks of `group`, for there is no"): lambda: meeting(1, list, tensor_parallel=True),
    (V, "expected 0 to 3600 seconds, got -1"): lambda: arranged().settle(-1),
    (V, "marked or none, but 'a' and 'b' differ"): lambda: arranged(**first(DOUBLE, grad_dtype=FLOAT)()),
    (V, "expected a count for each of 3 parameters, got 1"): lambda: engine().expect([1]),
    (V, "'c': expected at least one gradient in a step, got 0"): lambda: engine().expect([1, 1, 0]),
    (R, "expected arrange() before the first gradient"): backward_before_arrange,
    (R, "got a change within one; call finish() or zero() first"): arrange_midway,
    (R, "called from within a call of their own"): call_from_within,
    (R, "gradients [12.0, 5.0, 1.0]"): backward_after_a_failed_construction,
    (R, "the gradient of 'a' is of shape [1]; expected [4, 3]"): replaced_parameter,
    (V, "end_backends: expected a destroyed process group, but"): lambda: end("live", 1.0),
    (V, "expected 0 to 86400 seconds, got nan"): lambda: end("destroyed", float("nan")),
}


@on_ranks(1)
def test_refusal_says_what_was_expected():
    for (kind, words), (found, text) in (
        *((said, error_of(engine, **changes())) for said, changes in CONSTRUCTIONS.items()),
        *((said, error_of(arranged, *layout)) for said, layout in ARRANGEMENTS.items()),
        *((said, error_of(meeting, *memory)) for said, memory in MEETINGS.items()),
        *((said, error_of(call)) for said, call in CALLS.items()),
    ):
        assert (found, words in text) == (kind, True), f"expected {words}, got {text}"


@on_ranks(1)
def test_calls_before_arrange_and_after_detach_are_refused():
    with pytest.raises(RuntimeError, match=r"expected arrange\(\) before the first gradient"):
        engine().finish()
    made = arranged()
    made.detach()
    for call in (made.zero, made.finish, lambda: made.arrange(*LAYOUT, [])):
        with pytest.raises(RuntimeError, match=r"expected a call before detach\(\)"):
            call()


@on_ranks(1)
def test_group_is_ended_once():
    """A destroyed group, ended by several threads."""
    assert extension().state is ExtensionState.LOADED
    for _ in range(5):
        group = dist.new_group([0])
        group.allreduce([torch.ones(1)]).wait()
        dist.destroy_process_group(group)
        boxed = group.boxed()
        ended = [torch.ops.tpkernels.end_backends(boxed, seconds) for seconds in (0.0, 0.0, 0.0, 5.0, 5.0)]
        assert ended[3:] == [True, True]


@on_ranks(1)
def test_backward_outlives_its_engine():
    tensors = parameters()
    made = arranged(parameters=tensors)
    loss = torch.stack([tensor.sum() for tensor in tensors]).sum()
    del made
    loss.backward()
    assert [tensor.grad.sum().item() for tensor in tensors] == [12.0, 5.0, 1.0]


@on_ranks(1)
def test_engine_dropped_in_flight_waits_for_nobody():
    """By who has Python's lock, which gloo's threads take to let go of what they have sent."""
    group = dist.group.WORLD
    for _ in range(100):
        tensors = parameters()
        made = arranged(parameters=tensors)
        made.expect([1, 1, 1])
        loss = torch.stack([tensor.sum() for tensor in tensors]).sum()
        for _ in range(4):
            group.allreduce([torch.ones(1)])
        loss.backward()
        del made


def test_every_entry_point_is_tried():
    """A new operator or method belongs into tests/buckets/hostile.py."""
    source = (Path(__file__).parents[2] / "csrc/module.cpp").read_text()
    defined = {*re.findall(r'def\(\s*"(\w+)', source)}
    tried = (Path(__file__).parent / "hostile.py").read_text()
    assert len(defined) == 23
    assert not {name for name in defined if f'"{name}"' not in tried}
