"""AdamW's step of which no element depends on where it lies."""

import pytest
import torch
import torch.nn.functional as F

from tpkernels.training.trainer import exact_step

LENGTHS = [1, 3, 7, 9, 15, 17, 31, 33, 63, 65, 129, 1001]  # with tails behind vectors of 4, 8 and 16
MANY_THREADS = 2 * 32768 + 4097  # elements: kernels are split over threads, and each thread's part has a tail


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def adam_of(values):
    return torch.optim.AdamW([torch.nn.Parameter(values)], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def stepped(step, values, gradients):
    """A parameter after a step by each gradient."""
    adam = adam_of(values.clone())
    (parameter,) = adam.param_groups[0]["params"]
    for gradient in gradients:
        parameter.grad = gradient.clone()
        step(adam)
    return parameter.detach()


def where_it_matters(compute, tensors):
    """Elements that become something else if the tensors are cut behind their first elements."""
    whole, found = compute(*tensors), 0
    for first in (1, 5):
        cuts = [[tensor[:first] for tensor in tensors], [tensor[first:] for tensor in tensors]]
        parts = torch.cat([compute(*cut) for cut in cuts if cut[0].numel()])
        found += int((parts != whole).sum())
    return found


@pytest.mark.parametrize("length", [*LENGTHS, MANY_THREADS])
def test_no_element_depends_on_where_it_lies(length, threads):
    drawn = torch.Generator().manual_seed(length)
    values, *gradients = (torch.randn(length, generator=drawn) for _ in range(4))
    assert where_it_matters(lambda v, *g: stepped(exact_step, v, g), [values, *gradients]) == 0


def test_an_operation_that_treats_tails_otherwise_is_seen():
    """What the test above would see: vectors and what is left over are computed by other code."""
    assert where_it_matters(F.gelu, [torch.randn(1001, generator=torch.Generator().manual_seed(1))]) > 0


def test_it_is_the_step_of_torch():
    drawn = torch.Generator().manual_seed(2)
    values, *gradients = (torch.randn(1001, generator=drawn) for _ in range(6))
    ours, theirs = (stepped(step, values, gradients) for step in (exact_step, torch.optim.AdamW.step))
    truth = stepped(torch.optim.AdamW.step, values.double(), [gradient.double() for gradient in gradients])
    off = [(found.double() - truth).abs().max().item() for found in (ours, theirs)]
    assert off[0] <= 2 * off[1]
    assert off[1] > 0
