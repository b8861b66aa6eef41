"""Models with experts, and experts on ranks of their own move to the bit, and compute the same."""

import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoints.test_reshard import over
from tests.interop.refused import refused, refused_alike
from tests.interop.test_plans import unusual
from tests.interop.torch_models import IDS
from tests.on_ranks import on_ranks
from tpkernels import parallelize, reshard
from tpkernels.checkpoints.shards import TensorShard
from tpkernels.layers.attributes import set_tensor_model_parallel_attributes

EXPERTS, WIDTH = 4, 8


def scrambled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    return model


@on_ranks(2)
def test_experts_and_packed_layers_that_parallelize_has_split_move_to_one_rank_and_back():
    """Stacked experts with packed gates, grouped and latent attention, a tied head."""
    whole, state = unusual(), over(2)
    split = parallelize(unusual(), state, verify=False)
    alone, back = scrambled(unusual()), scrambled(parallelize(unusual(), state, verify=False))
    reshard(split, to=alone, to_state=over(1))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(alone.state_dict()[name], tensor), name
    reshard(alone, to=back, state=over(1))
    for name, tensor in split.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert torch.equal(alone(IDS), whole(IDS))
    assert torch.equal(back(IDS), split(IDS))


@on_ranks(2)
def test_an_unsharded_model_needs_no_state_a_marked_one_does():
    whole, split = unusual(), parallelize(unusual(), over(2), verify=False)
    marked, alone = nn.Linear(WIDTH, WIDTH), scrambled(unusual())
    reshard(split, to=alone)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(alone.state_dict()[name], tensor), name
    set_tensor_model_parallel_attributes(marked.weight, True, 0, 1)
    lacking = "after torch.distributed.init_process_group(...); or pass {}=, as it was built with"
    refused_alike("RuntimeError", lacking.format("to_state"), reshard, whole, to=marked)
    refused_alike("RuntimeError", lacking.format("state"), reshard, marked, to=whole)


def experts_of(count, ranks, fill=None):
    """This rank's share of so many experts over so many ranks, each under its own name."""
    each = count // ranks
    first = dist.get_rank() % ranks * each
    found = {}
    for number in range(first, first + each):
        value = torch.full((WIDTH, WIDTH), float(number if fill is None else fill))
        found[f"experts.{number}.weight"] = TensorShard(value, (WIDTH, WIDTH), start=(0, 0))
    return found


@on_ranks(2)
def test_experts_on_ranks_of_their_own_move_under_their_own_names():
    held = experts_of(EXPERTS, 2)
    for ranks in (1, 2):
        other, expected = experts_of(EXPERTS, ranks, fill=-1), experts_of(EXPERTS, ranks)
        reshard(held, to=other)
        assert other.keys() == expected.keys()
        for name, shard in expected.items():
            assert torch.equal(other[name].tensor, shard.tensor), name
        held = other
    expert = nn.Linear(WIDTH, WIDTH)  # the same name on both ranks, and another expert
    expert.weight.allreduce = False
    assert refused("ValueError", "other ranks may have other experts", reshard, expert, to=held)
