"""No call of what the C++ extension registers crashes, whatever it is given; what it refuses, it names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.hostile import GOOD, LAYOUT, PROGRAMS, Calling, parameters, run_programs
from tests.buckets.hostile_memory import buckets, memory_of
from tests.checks import error_of
from tests.ranks import RankFailure, RankPool
from tpkernels.comm._ext import ExtensionState, extension

PROGRAMS_OF = {"engine": 150, "threads": 30, "end": 30}
METHODS = {"arrange", "meet", "expect", "zero", "finish", "settle", "set_synchronizing"}
BOTH_WAYS = {  # which calls are accepted, and which refused, at least
    "engine": {"BucketEngine", "backward", *METHODS},
    "threads": {"backward", *METHODS},
    "end": {"end_backends"},
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_no_call_crashes(kind, tmp_path):
    log = tmp_path / "calls.txt"
    with RankPool(1) as own:
        try:
            (outcome,) = own.run(run_programs, kind, range(PROGRAMS_OF[kind]), str(log), timeout=120)
        except RankFailure as failure:
            pytest.fail(f"the last call was {log.read_text().splitlines()[-1]}\n{failure}")
    assert outcome.problems == []
    assert {*outcome.accepted} >= BOTH_WAYS[kind]
    assert {*outcome.refused} >= BOTH_WAYS[kind]


def crashing():
    os.abort()


def test_crash_would_be_seen():
    with RankPool(1) as own, pytest.raises(RankFailure, match="killed by signal 6"):
        own.run(crashing)


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


def with_first(parameter: Any) -> dict[str, Any]:
    return {"parameters": [parameter, *parameters()[1:]]}


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
    tensors[0].data = torch.ones(1)
    tensors[0].grad = torch.ones(1)
    made.finish()


def after_detach(method: str, *args: Any) -> Callable[[], object]:
    def call() -> None:
        made = arranged()
        made.detach()
        getattr(made, method)(*args)

    return call


def end(group: str, seconds: float) -> Callable[[], object]:
    def call() -> None:
        assert extension().state is ExtensionState.LOADED
        made = dist.new_group([0])
        if group == "destroyed":
            dist.destroy_process_group(made)
        torch.ops.tpkernels.end_backends(made.boxed(), seconds)

    return call


CASES: dict[str, tuple[Callable[[], object], str, str]] = {
    "no parameters": (
        lambda: engine(parameters=[], names=[], marked=[]),
        "ValueError",
        "expected at least one parameter, got none",
    ),
    "names": (
        lambda: engine(names=["a"]),
        "ValueError",
        "expected a name and a mark for each of 3 parameters, got 1 names and 3 marks",
    ),
    "marks": (lambda: engine(marked=[True] * 4), "ValueError", "3 parameters, got 3 names and 4 marks"),
    "no gradient": (
        lambda: engine(**with_first(torch.ones(4, 3))),
        "ValueError",
        "'a': expected a leaf that requires a gradient, got one that requires none",
    ),
    "computed": (
        lambda: engine(**with_first(nn.Parameter(torch.ones(4, 3)) * 2)),
        "ValueError",
        "'a': expected a leaf that requires a gradient, got one that is computed from others",
    ),
    "sparse": (
        lambda: engine(**with_first(torch.ones(4, 3).to_sparse().requires_grad_())),
        "TypeError",
        "'a': expected a dense tensor, got a sparse one",
    ),
    "meta": (
        lambda: engine(**with_first(nn.Parameter(torch.ones(4, 3, device="meta")))),
        "ValueError",
        "'a': expected a tensor with data, got one on the meta device",
    ),
    "complex": (
        lambda: engine(**with_first(nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)))),
        "TypeError",
        "'a': expected float64, float32, float16 or bfloat16, got ComplexFloat",
    ),
    "twice": (
        lambda: engine(parameters=[parameters()[0]] * 3),
        "ValueError",
        "'b': expected each parameter once, got one again under another name",
    ),
    "dtype": (
        lambda: engine(grad_dtype=torch.int32),
        "TypeError",
        "grad_dtype: expected float64, float32, float16 or bfloat16, got Int",
    ),
    "dtype number": (lambda: engine(wire_dtype=99), "TypeError", "expected a dtype, got number 99"),
    "rank": (
        lambda: engine(rank=2**31),
        "ValueError",
        "expected a rank from 0 that fits 31 bits, got 2147483648",
    ),
    "time-out": (
        lambda: engine(timeout_ms=2**63 - 1),
        "ValueError",
        "expected a time-out of 1 ms to a year, got 9223372036854775807",
    ),
    "group": (lambda: engine(group="nobody's"), "RuntimeError", "registered under the name nobody's"),
    "marked without a group": (
        lambda: engine(marked=[True] * 3),
        "ValueError",
        "expected a tensor-parallel group for the parameters that are marked, got none",
    ),
    "too few": (
        lambda: arranged([0, 0], LAYOUT[1], buckets()),
        "ValueError",
        "expected a bucket and an offset for each of 3 parameters, got 2 and 3",
    ),
    "bucket": (
        lambda: arranged([0, 0, 2], LAYOUT[1], buckets()),
        "IndexError",
        "'c': expected a bucket from 0 below 2, got 2",
    ),
    "negative bucket": (
        lambda: arranged([-1, 0, 1], LAYOUT[1], buckets()),
        "IndexError",
        "from 0 below 2, got -1",
    ),
    "empty bucket": (
        lambda: arranged([0, 0, 0], [0, 16, 24], buckets()),
        "ValueError",
        "expected parameters in each of 2 buckets, but bucket 1 has none",
    ),
    "offset": (
        lambda: arranged([0, 0, 1], [0, 28, 0], buckets()),
        "IndexError",
        "'b': expected an offset from 0 that leaves room for 5 of the 32 elements of bucket 0, got 28",
    ),
    "not flat": (
        lambda: arranged(*LAYOUT, [torch.zeros(4, 8), torch.zeros(16)]),
        "ValueError",
        "expected bucket 0 to be a flat tensor that needs no gradient",
    ),
    "bucket of another dtype": (
        lambda: arranged(*LAYOUT, [torch.zeros(32), torch.zeros(16).double()]),
        "TypeError",
        "'c': expected a bucket of Float on cpu, got Double on cpu",
    ),
    "buckets overlap": (
        lambda: arranged(*LAYOUT, [flat := torch.zeros(40), flat[24:]]),
        "ValueError",
        "expected memory of its own for each bucket, but 0 and 1 overlap",
    ),
    "doorbells": (
        lambda: meeting(1, lambda bells: bells * 2),
        "ValueError",
        "expected memory of each of 1 ranks, got 2 doorbells, 1 words and 2 buckets for 2",
    ),
    "words": (
        lambda: meeting(2, lambda _: [torch.zeros(3, dtype=torch.int64)]),
        "ValueError",
        "expected 2 words as a doorbell and 2 for each of 2 buckets, of int64 on the CPU",
    ),
    "others' buckets": (
        lambda: meeting(3, lambda flats: flats[::-1]),
        "ValueError",
        "expected flat tensors on the CPU like this rank's buckets",
    ),
    "members": (
        lambda: meeting(0, lambda _: [1]),
        "ValueError",
        "expected the ranks of this machine, and one of each machine, of 1 in their order, got [1] and []",
    ),
    "own buckets": (
        lambda: meeting(3, lambda flats: [flat.clone() for flat in flats]),
        "ValueError",
        "expected this rank's own buckets at its place",
    ),
    "wait": (lambda: meeting(6, lambda _: 0), "ValueError", "expected a time-out of 1 ms to a year, got 0"),
    "meeting nobody": (
        lambda: meeting(1, lambda bells: bells, tensor_parallel=True),
        "ValueError",
        "expected to meet ranks of `group`, for there is no tensor-parallel one",
    ),
    "settling": (lambda: arranged().settle(-1), "ValueError", "expected 0 to 3600 seconds, got -1"),
    "overlap": (
        lambda: arranged([0, 0, 1], [0, 11, 0], buckets()),
        "ValueError",
        "expected memory of its own for each parameter, but 'a' and 'b' overlap in bucket 0",
    ),
    "two dtypes in a bucket": (
        lambda: arranged(grad_dtype=torch.float32, **with_first(nn.Parameter(torch.ones(4, 3).double()))),
        "ValueError",
        "expected one dtype in bucket 0, and all marked or none, but 'a' and 'b' differ",
    ),
    "too few counts": (
        lambda: engine().expect([1]),
        "ValueError",
        "expected a count for each of 3 parameters, got 1",
    ),
    "count": (
        lambda: engine().expect([1, 1, 0]),
        "ValueError",
        "'c': expected at least one gradient in a step, got 0",
    ),
    "backward first": (
        backward_before_arrange,
        "RuntimeError",
        "expected arrange() before the first gradient",
    ),
    "finish first": (
        lambda: engine().finish(),
        "RuntimeError",
        "expected arrange() before the first gradient",
    ),
    "arrange midway": (
        arrange_midway,
        "RuntimeError",
        "got a change within one; call finish() or zero() first",
    ),
    "from within": (call_from_within, "RuntimeError", "called from within a call of their own"),
    "failed construction": (
        backward_after_a_failed_construction,
        "RuntimeError",
        "gradients [12.0, 5.0, 1.0]",
    ),
    "replaced": (replaced_parameter, "RuntimeError", "the gradient of 'a' is of shape [1]; expected [4, 3]"),
    "zero after detach": (after_detach("zero"), "RuntimeError", "expected a call before detach()"),
    "finish after detach": (after_detach("finish"), "RuntimeError", "expected a call before detach()"),
    "arrange after detach": (
        after_detach("arrange", *LAYOUT, []),
        "RuntimeError",
        "expected a call before detach()",
    ),
    "live group": (end("live", 1.0), "ValueError", "end_backends: expected a destroyed process group, but"),
    "seconds": (end("destroyed", float("nan")), "ValueError", "expected 0 to 86400 seconds, got nan"),
}


def error_in(case: str) -> tuple[str, str]:
    return error_of(CASES[case][0])


@pytest.mark.parametrize("case", CASES)
def test_refusal_says_what_was_expected(ranks1, case):
    _, kind, words = CASES[case]
    ((raised, text),) = ranks1.run(error_in, case)
    assert raised == kind, text
    assert words in text


def ended_at_once() -> list[bool]:
    """A destroyed group, ended by several threads."""
    assert extension().state is ExtensionState.LOADED
    group = dist.new_group([0])
    group.allreduce([torch.ones(1)]).wait()
    dist.destroy_process_group(group)
    boxed = group.boxed()
    return [torch.ops.tpkernels.end_backends(boxed, seconds) for seconds in (0.0, 0.0, 0.0, 5.0, 5.0)][3:]


def test_group_is_ended_once(ranks1):
    for _ in range(20):
        assert ranks1.run(ended_at_once) == [[True, True]]


def gone_before_backward() -> list[float]:
    tensors = parameters()
    made = arranged(parameters=tensors)
    loss = torch.stack([tensor.sum() for tensor in tensors]).sum()
    del made
    loss.backward()
    return [tensor.grad.sum().item() for tensor in tensors]


def test_backward_outlives_its_engine(ranks1):
    assert ranks1.run(gone_before_backward) == [[12.0, 5.0, 1.0]]


def dropped_in_flight() -> None:
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


def test_engine_dropped_in_flight_waits_for_nobody(ranks1):
    ranks1.run(dropped_in_flight, timeout=60)


def test_every_entry_point_is_tried():
    """A new operator or method belongs into tests/buckets/hostile.py."""
    source = (Path(__file__).parents[2] / "csrc/module.cpp").read_text()
    defined = {
        part.split('"')[1].split("(")[0] for part in source.split("def(") if part.strip().startswith('"')
    }
    tried = (Path(__file__).parent / "hostile.py").read_text()
    assert len(defined) == 20
    takes_nothing = {"built_with_torch"}
    assert {name for name in defined if f'"{name}"' not in tried} <= takes_nothing
