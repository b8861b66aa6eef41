"""A norm that no order of elements, and no way to split them over ranks, changes in a bit."""

import math

import pytest
import torch
import torch.distributed as dist

from tpkernels.layers import exact_norm as unit
from tpkernels.layers.exact_norm import exact_norm

CPU = torch.device("cpu")
FLOAT64_MAX = torch.finfo(torch.float64).max


def norm(*tensors):
    return exact_norm(tensors, CPU, [])


def of_seed(seed, elements=4099, spread=12):
    """Magnitudes over many powers of two, some of them zero."""
    drawn = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread, (elements,), generator=drawn)
    values = torch.randn(elements, generator=drawn) * 2.0**powers
    return values * (torch.rand(elements, generator=drawn) > 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(10))
def test_no_order_and_no_cut_changes_a_bit(seed, dtype):
    values = of_seed(seed).to(dtype)
    expected = norm(values)
    exact = math.sqrt(math.fsum(value * value for value in values.tolist()))
    assert expected == pytest.approx(exact, rel=1e-14, abs=0)
    drawn = torch.Generator().manual_seed(seed)
    for parts in (1, 2, 3, 7, 64):
        shuffled = values[torch.randperm(len(values), generator=drawn)]
        assert norm(*shuffled.tensor_split(parts)) == expected
    assert norm(values.view(-1, 4099).t(), values[:0]) == expected


def test_chunks_do_not_change_a_bit(monkeypatch):
    values = of_seed(3)
    expected = norm(values)
    monkeypatch.setattr(unit, "CHUNK_ON_CPU", 100)
    assert norm(values) == expected


def test_a_sum_in_order_would_change_it():
    """What the test above is for: torch's own norm depends on the order."""
    found = {torch.linalg.vector_norm(of_seed(1)[torch.randperm(4099)]).item() for _ in range(50)}
    assert len(found) > 1


def of_this_rank(values):
    """Ranks hold unequal parts, the last rank none, of two groups in turn: all of the world, and itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bounds = [0, *(17 * 3**part for part in range(1, ranks - 1)), len(values), len(values)]
    own = values[bounds[rank] : bounds[rank + 1]]
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    return exact_norm([own[:5], own[5:]], CPU, [alone, dist.group.WORLD])


def test_no_number_of_ranks_changes_a_bit(ranks2, ranks4):
    values = of_seed(5)
    for pool in (ranks2, ranks4):
        assert pool.run(of_this_rank, values) == [norm(values)] * pool.world_size


def test_infinity_and_nan_stay():
    inf, nan = torch.tensor([math.inf]), torch.tensor([math.nan])
    assert norm(torch.ones(3), -inf) == math.inf
    assert math.isnan(norm(torch.ones(3), nan))
    assert math.isnan(norm(inf, nan))


def test_nothing_and_zeros_have_the_norm_zero():
    assert norm() == norm(torch.zeros(0)) == norm(torch.zeros(3), -torch.zeros(2)) == 0.0


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e-45, torch.float32),  # subnormal
        (3e38, torch.float32),
        (1e-310, torch.float64),
        (1e300, torch.float64),
    ],
)
def test_magnitudes_at_the_ends_are_kept(value, dtype):
    values = torch.full((4,), value, dtype=dtype)
    assert norm(values) == pytest.approx(2 * values[0].item(), rel=1e-14, abs=0)


def test_a_norm_beyond_float64_is_infinite():
    assert norm(torch.full((5,), FLOAT64_MAX, dtype=torch.float64)) == math.inf
