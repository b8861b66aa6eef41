"""Ctrl-C anywhere in a step, and a caller that goes on: averages are right, or every rank raises."""

import sys
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.buckets.golden import SMALL, backward, chain, expected_gradients
from tests.buckets.ways import both_ways, on_ranks
from tests.on_ranks import of_all
from tpkernels import GradientBuckets
from tpkernels.buckets import neighbours
from tpkernels.buckets.step import BucketStep

STEPS = 3


class Interrupted:
    """Collects lines of ours that run, and is interrupted where `line` runs first."""

    def __init__(self, line=None):
        self.line, self.seen = line, {}

    def __enter__(self):
        sys.settrace(self._called)

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, _):
        if "/tpkernels/" not in frame.f_code.co_filename:
            return None
        # up to its `try` a call has not begun
        return self._skips_one if frame.f_code.co_name == "part" else self._ran

    def _skips_one(self, frame, event, _):
        return self._ran if event == "line" else self._skips_one

    def _ran(self, frame, event, _):
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in self.seen:
            self.seen[line] = None
            if line == self.line:
                raise KeyboardInterrupt
        return self._ran


def one_step(module, buckets, number):
    """What a step says on this rank, whose caller goes on."""
    try:
        buckets.zero()
        with buckets.no_sync():
            pass
        backward(module, number)
        buckets.finish()
    except (KeyboardInterrupt, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(first, line=None, **options):
    """Steps of which rank 0 is interrupted in number `first`; lines that run there, and what steps give."""
    group, module, told, lines = dist.new_group(), chain(), [], []
    buckets = GradientBuckets(module, group, bucket_bytes=SMALL, **options)
    for number in range(STEPS):
        planted = Interrupted(line)
        if number == first and dist.get_rank() == 0:
            with planted:
                said = one_step(module, buckets, number)
            lines = [*planted.seen]
        else:
            said = one_step(module, buckets, number)
        if not said:
            pairs = zip(module.parameters(), expected_gradients(module, (number,)), strict=True)
            grads = [(p.main_grad if options.get("main_grad") else p.grad, right) for p, right in pairs]
            told.append("right" if all(torch.allclose(*pair) for pair in grads) else "wrong")
        else:
            told.append(said)
    with suppress(RuntimeError):
        buckets.detach()
    return lines, told


@pytest.mark.parametrize(
    ("first", "options"), [(0, {}), (1, {}), (1, {"main_grad": True})], ids=["learning", "later", "main_grad"]
)
@both_ways
@on_ranks(2)
def test_at_any_line_of_a_step_all_ranks_raise(first, options):
    lines = of_all(steps(first, **options)[0])[0]
    lines = [line for place, line in enumerate(lines) if "/buckets/" in line[0] or place % 3 == 0]
    assert len(lines) > 30
    with patch.object(neighbours, "LOOK_SECONDS", 0.01):
        for line in lines:
            for rank, told in enumerate(of_all(steps(first, line, **options)[1])):
                assert "wrong" not in told, (line, rank, told)
                assert told[first].startswith("KeyboardInterrupt") or rank > 0, (line, told)
                assert "rank 0: KeyboardInterrupt" in told[-1], (line, rank, told)


@on_ranks(2)
def test_unguarded_steps_would_be_a_batch_apart():
    """Planted: steps that nobody fails, one interrupted as `zero` begins."""
    with patch.object(BucketStep, "fail", lambda *_: None):
        lines = of_all(steps(1)[0])[0]
        line = next(line for line in lines if line[0].endswith("gradients.py"))
        assert "wrong" in of_all(steps(1, line)[1])[1]
