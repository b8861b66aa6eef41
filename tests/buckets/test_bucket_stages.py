"""Buckets with more than one collective: marked ones, which two groups sum, and ones looked at first."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.buckets.golden import (
    SMALL,
    WIDTH,
    assert_gradients,
    chain,
    expected_gradients,
    loss_of,
    own_batch,
)
from tests.buckets.test_bucket_options import Fail
from tests.checks import error_of
from tpkernels import GradientBuckets


def collectives_so_far(group):
    return group._get_sequence_number_for_group()


def marked_in_backward():
    """How many collectives of each group backward starts, where every bucket needs one of each."""
    rank = dist.get_rank()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor_group, data_group = tensor_groups[rank // 2], data_groups[rank % 2]
    module = nn.Sequential(*[nn.LayerNorm(WIDTH).double() for _ in range(6)])
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    buckets = GradientBuckets(module, data_group, bucket_bytes=256, tensor_parallel_group=tensor_group)
    for step in range(3):
        buckets.zero()
        before = collectives_so_far(tensor_group), collectives_so_far(data_group)
        loss_of(module(own_batch(step))).backward()
        started = (
            collectives_so_far(tensor_group) - before[0],
            collectives_so_far(data_group) - before[1],
        )
        buckets.finish()
        assert_gradients(module, [gradient * 2 for gradient in expected_gradients(module, (step,))])
    return len(buckets.buckets), *started


@pytest.mark.way("c10d")
def test_marked_buckets_go_on_to_the_second_group_in_backward(ranks4):
    for count, over_tensor_group, over_data_group in ranks4.run(marked_in_backward):
        assert count > 3
        assert over_tensor_group == count
        assert over_data_group == count - 1  # the last has no launch after it, and goes on in finish()


def loss(module, step, *, fails):
    """Of a step; if it `fails`, backward does so half-way."""
    hidden = module[1](module[0](own_batch(step)))
    return loss_of(module[3](module[2](Fail.apply(hidden) if fails else hidden)))


def given_up_in_first_step():
    """Rank 1 fails in the middle of the first backward, from which the others would learn."""
    module = chain()
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL)
    for step in range(4):
        buckets.zero()
        try:
            loss(module, step, fails=step == 0 and dist.get_rank() == 1).backward()
            buckets.finish()
        except ValueError:
            continue
        if step == 0:
            assert any(parameter.grad.isnan().any() for parameter in module.parameters())
        else:
            assert_gradients(module, expected_gradients(module, (step,)))
    return buckets.launched_in_backward


def test_half_a_first_step_teaches_nothing(ranks2):
    assert ranks2.run(given_up_in_first_step) == [4, 4]


def given_up_under_check(when):
    """Rank 1 fails in the middle of backward, while the other looks for NaN in what both should send."""
    module = chain()
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL, check_nan=True)
    message = ""
    for step in range(4):
        buckets.zero()
        try:
            loss(module, step, fails=step == when and dist.get_rank() == 1).backward()
            buckets.finish()
        except ValueError:
            continue
        except RuntimeError as error:
            message = str(error)
            if step:  # told in backward, so the step is still open
                assert error_of(buckets.finish)[1].endswith("this step has been refused; call zero()")
            continue
        assert_gradients(module, expected_gradients(module, (step,)))
    GradientBuckets(chain(1), dist.group.WORLD).detach()  # the next call has one number on all ranks
    return message


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
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL, check_nan=True)
    spoilt = own_batch() * (float("nan") if dist.get_rank() == 1 else 1.0)
    loss_of(module(spoilt)).backward()
    errors = [error_of(buckets.finish), error_of(buckets.finish)]
    errors.append(error_of(lambda: loss_of(module(own_batch())).backward()))
    buckets.zero()
    loss_of(module(own_batch())).backward()
    buckets.finish()
    assert_gradients(module, expected_gradients(module))
    return [text for _, text in errors]


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
    for step in range(3):
        buckets.zero()
        fails = step == 1 and dist.get_rank() == 0
        for weight in weights[: 1 if fails else 2]:
            (weight * 10.0 ** (2 * step)).sum().backward()
        if fails:
            weights[1].data = weights[1].grad = torch.ones(4)
        told.append(error_of(buckets.finish)[1])
        weights[1].data = torch.zeros(8)
        found.append([{*view.tolist()} for view in buckets.buckets])
    return told[1], found[0], found[1], found[2]


def test_step_that_failed_on_one_rank_is_not_mixed_with_its_next(ranks2):
    (told, *first), (_, *second) = ranks2.run(failed_alone)
    assert "'1' is of shape [4]; expected [8]" in told
    assert first[0] == second[0] == [{2.0, 0.0}] * 2  # and what lies between gradients
    assert any(math.isnan(value) for values in second[1] for value in values)  # what did not come
    assert first[2] == second[2] == [{20000.0, 0.0}] * 2


def given_up_once():
    """Whether NaN lies in the buckets some steps after a rank has given one up."""
    module = chain()
    buckets = GradientBuckets(module, dist.group.WORLD, bucket_bytes=SMALL)
    for step in range(4):
        buckets.zero()
        try:
            loss(module, step, fails=step == 1 and dist.get_rank() == 1).backward()
            buckets.finish()
        except ValueError:
            continue
    return any(bucket.isnan().any().item() for bucket in buckets.buckets)


def test_nan_of_a_step_that_was_given_up_does_not_stay(ranks2):
    assert ranks2.run(given_up_once) == [False, False]
