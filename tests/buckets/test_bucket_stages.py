"""Buckets with more than one collective: marked ones, which two groups sum, and ones looked at first."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    WIDTH,
    assert_gradients,
    backward,
    chain,
    expected_gradients,
    failing,
    loss_of,
    own_batch,
    step,
    two_by_two,
    wrap,
)
from tests.buckets.ways import both_ways
from tests.checks import error_of
from tpkernels import GradientBuckets


def marked_in_backward():
    """How many collectives of each group backward starts, where every bucket needs one of each."""
    tensor_group, data_group = two_by_two()
    module = nn.Sequential(*[nn.LayerNorm(WIDTH).double() for _ in range(6)])
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    buckets = GradientBuckets(module, data_group, bucket_bytes=256, tensor_parallel_group=tensor_group)
    for number in range(3):
        buckets.zero()
        before = [group._get_sequence_number_for_group() for group in (tensor_group, data_group)]
        backward(module, number)
        after = [group._get_sequence_number_for_group() for group in (tensor_group, data_group)]
        buckets.finish()
        assert_gradients(module, [gradient * 2 for gradient in expected_gradients(module, (number,))])
    return len(buckets.buckets), after[0] - before[0], after[1] - before[1]


@pytest.mark.way("c10d")
def test_marked_buckets_go_on_to_the_second_group_in_backward(ranks4):
    for count, over_tensor_group, over_data_group in ranks4.run(marked_in_backward):
        assert count > 3
        assert over_tensor_group == count
        assert over_data_group == count - 1  # the last has no launch after it, and goes on in finish()


def given_up_under_check(when):
    """Rank 1 fails in the middle of backward, while the other looks for NaN in what both should send."""
    module = chain()
    buckets = wrap(module, check_nan=True)
    message = ""
    for number in range(4):
        if number == when and dist.get_rank() == 1:
            buckets.zero()
            assert error_of(failing(module, number).backward)[0] == "ValueError"
        elif number == when:
            _, message = error_of(step, module, buckets, number)
            if number:  # told in backward, so the step is still open
                assert error_of(buckets.finish)[1].endswith("this step has been refused; call zero()")
        else:
            step(module, buckets, number)
            assert_gradients(module, expected_gradients(module, (number,)))
    GradientBuckets(chain(1), dist.group.WORLD).detach()  # the next call has one number on all ranks
    return message


@both_ways
@pytest.mark.parametrize("when", [0, 1], ids=["first_step", "later"])
def test_rank_that_gave_up_is_named_where_all_look_for_nan(ranks2, when):
    other, failed = ranks2.run(given_up_under_check, when)
    assert failed == ""
    assert other.startswith(
        "GradientBuckets: rank 1 has given up this step, by an exception in backward, say; bucket"
    )
    assert other.endswith("was not sent")


def refused_in_finish():
    """What a step says after a finish() that reduced nothing, and whether the next one is right."""
    module = chain()
    buckets = wrap(module, check_nan=True)
    spoilt = own_batch() * (float("nan") if dist.get_rank() == 1 else 1.0)
    loss_of(module(spoilt)).backward()
    errors = [error_of(buckets.finish), error_of(buckets.finish)]
    errors.append(error_of(backward, module))
    step(module, buckets)
    assert_gradients(module, expected_gradients(module))
    return [text for _, text in errors]


@both_ways
def test_step_that_failed_passes_for_no_other(ranks2):
    for first, again, more in ranks2.run(refused_in_finish):
        assert "holds NaN" in first
        assert again == more
        assert again.endswith("this step has failed, and part of it is not reduced; call zero()")


def failed_alone():
    """Rank 0's finish() is refused, so it gives the step up; its next one is not taken for this one."""
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    named = [(str(number), weight) for number, weight in enumerate(weights)]
    buckets = GradientBuckets(named, dist.group.WORLD, average=False, bucket_bytes=1)
    told, found = [], []
    for number in range(3):
        buckets.zero()
        fails = number == 1 and dist.get_rank() == 0
        for weight in weights[: 1 if fails else 2]:
            (weight * 10.0 ** (2 * number)).sum().backward()
        if fails:
            weights[1].data = weights[1].grad = torch.ones(4)
        told.append(error_of(buckets.finish)[1])
        weights[1].data = torch.zeros(8)
        found.append([{*view.tolist()} for view in buckets.buckets])
    return told[1], found[0], found[1], found[2]


@both_ways
def test_step_that_failed_on_one_rank_is_not_mixed_with_its_next(ranks2):
    (told, *first), (_, *second) = ranks2.run(failed_alone)
    assert "'1' is of shape [4]; expected [8]" in told
    assert first[0] == second[0] == [{2.0, 0.0}] * 2  # and what lies between gradients
    assert any(math.isnan(value) for values in second[1] for value in values)  # what did not come
    assert first[2] == second[2] == [{20000.0, 0.0}] * 2
