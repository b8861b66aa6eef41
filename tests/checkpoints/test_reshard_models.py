"""Models with experts, with LoRA, and experts on ranks of their own move to the bit, and compute the same."""

import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoints.test_reshard import over
from tests.interop.refused import refused
from tests.interop.test_plans import unusual
from tests.interop.torch_models import IDS
from tests.on_ranks import on_ranks
from tpkernels import ColumnParallelLinear, RowParallelLinear, parallelize, reshard
from tpkernels.checkpoints.shards import TensorShard

EXPERTS, WIDTH, RANK = 4, 8, 2


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


class Lora(nn.Module):
    """Two layers with factors as `interop.peft` splits them: A with a row layer, B with a column layer."""

    def __init__(self, state):
        super().__init__()
        split = {"bias": False, "state": state}
        self.up = ColumnParallelLinear(WIDTH, 2 * 16, gather_output=False, stride=2, **split)
        self.up_a = nn.Linear(WIDTH, RANK, bias=False)
        self.up_b = ColumnParallelLinear(RANK, 2 * 16, gather_output=False, stride=2, **split)
        self.down = RowParallelLinear(16, WIDTH, input_is_parallel=True, **split)
        self.down_a = RowParallelLinear(16, RANK, input_is_parallel=True, **split)
        self.down_b = nn.Linear(RANK, WIDTH, bias=False)
        for layer in (self.up, self.down):
            layer.weight.requires_grad_(False)

    def forward(self, x):
        gate, up = (self.up(x)[0] + self.up_b(self.up_a(x))[0]).chunk(2, dim=-1)
        y = gate.sigmoid() * up
        return self.down(y)[0] + self.down_b(self.down_a(y)[0])


def numbered(model, state):
    """Numbers that say which row and column of the full tensor they are of."""
    shards = dict(model.named_parameters())
    torch.manual_seed(5)
    full = {name: torch.randn(parameter.shape) for name, parameter in Lora(over(1)).named_parameters()}
    with torch.no_grad():
        for name, parameter in shards.items():
            parts = full[name]
            if name.startswith(("up.", "up_b")):
                size, rank = state.size("tp"), state.rank_in("tp")
                parts = torch.cat([half.chunk(size)[rank] for half in parts.chunk(2)])
            elif name.startswith(("down.", "down_a")):
                parts = parts.chunk(state.size("tp"), dim=1)[state.rank_in("tp")]
            parameter.copy_(parts)
    return model


@on_ranks(2)
def test_factors_of_lora_move_with_the_layers_that_they_are_of():
    states = {tensor: over(tensor) for tensor in (1, 2)}
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    model = numbered(Lora(states[2]), states[2])
    for tensor in (1, 2):
        other, expected = Lora(states[tensor]), numbered(Lora(states[tensor]), states[tensor])
        reshard(model, to=scrambled(other))
        for name, parameter in expected.named_parameters():
            assert torch.equal(other.get_parameter(name), parameter), name
        assert torch.equal(other(x), expected(x))
        model = other


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
