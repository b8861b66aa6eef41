"""Megatron's names of the seven regions: over the current tensor group, or one that is given."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tpkernels
from tests.on_ranks import on_ranks
from tests.ops.parallel_cases import equal
from tpkernels import initialize_model_parallel, parallel_state
from tpkernels.groups.state import ParallelStateError
from tpkernels.ops.tensor_parallel import mappings

REGIONS = {
    "copy_to_tensor_model_parallel_region": "copy_to_region",
    "reduce_from_tensor_model_parallel_region": "reduce_from_region",
    "scatter_to_tensor_model_parallel_region": "scatter_to_region",
    "gather_from_tensor_model_parallel_region": "gather_from_region",
    "scatter_to_sequence_parallel_region": "scatter_to_sequence_region",
    "gather_from_sequence_parallel_region": "gather_from_sequence_region",
    "reduce_scatter_to_sequence_parallel_region": "reduce_scatter_to_sequence_region",
}


def _results(region, *arguments: object, **options: object) -> list[Tensor]:
    x = torch.arange(16.0).view(4, 4).mul(1 + dist.get_rank()).requires_grad_()
    y = region(x, *arguments, **options)
    (dx,) = torch.autograd.grad(y, x, torch.arange(float(y.numel())).view_as(y) * (2 + dist.get_rank()))
    return [y.detach(), dx]


@on_ranks(4)
def test_regions_are_the_ops_over_the_current_group_or_another():
    initialize_model_parallel(2)
    tensor, everybody = parallel_state.get_tensor_model_parallel_group(), dist.group.WORLD
    for name, plain in REGIONS.items():
        region, op = getattr(tpkernels, name), getattr(mappings, plain)
        assert equal(_results(region), _results(op, tensor)), name
        assert equal(_results(region, group=everybody), _results(op, everybody)), name
    gather = tpkernels.gather_from_sequence_parallel_region  # with a whole gradient
    expected = _results(mappings.gather_from_sequence_region, tensor, tensor_parallel_output_grad=False)
    assert equal(_results(gather, False), expected)


@pytest.mark.parametrize("name", REGIONS)
def test_region_without_a_state_says_what_to_do(name):
    with pytest.raises(ParallelStateError, match="is not initialized: call"):
        getattr(tpkernels, name)(torch.ones(2, 2))
