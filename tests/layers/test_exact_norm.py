"""A norm that no order of elements, and no way to split them over ranks, changes in a bit."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.on_ranks import on_ranks
from tests.products import once
from tests.segments import tp_invariance
from tpkernels import clip_grad_norm_
from tpkernels.layers import clip as unit
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.clip import exact_norm

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


@once(dtype=[torch.float32, torch.bfloat16, torch.float64], seed=range(10))
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


@pytest.mark.parametrize("world", ["ranks2", "ranks4"])
@on_ranks()
def test_no_number_of_ranks_changes_a_bit():
    """Ranks hold unequal parts, the last rank none, of two groups in turn: all of the world, and itself."""
    values, rank, ranks = of_seed(5), dist.get_rank(), dist.get_world_size()
    bounds = [0, *(17 * 3**part for part in range(1, ranks - 1)), len(values), len(values)]
    own = values[bounds[rank] : bounds[rank + 1]]
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    assert exact_norm([own[:5], own[5:]], CPU, [alone, dist.group.WORLD]) == norm(values)


def test_norms_of_infinity_nan_and_nothing():
    inf, nan = torch.tensor([math.inf]), torch.tensor([math.nan])
    assert norm(torch.ones(3), -inf) == math.inf
    assert math.isnan(norm(torch.ones(3), nan))
    assert math.isnan(norm(inf, nan))
    assert norm() == norm(torch.zeros(0)) == norm(torch.zeros(3), -torch.zeros(2)) == 0.0


@pytest.mark.parametrize("value", [1e-310, 1e-45, 3e38, 1e300, FLOAT64_MAX])  # also subnormal ones
def test_magnitudes_at_the_ends_are_kept_or_infinite(value):
    for dtype in (torch.float64, torch.float32) if 1e-50 < value < 1e50 else (torch.float64,):
        values = torch.full((4,), value, dtype=dtype)
        expected = math.inf if value == FLOAT64_MAX else 2 * values[0].item()
        assert norm(values) == pytest.approx(expected, rel=1e-14, abs=0)


def clipped(values, segments):
    """The norm, and full gradients after clipping: of a parameter that is split, and of a replicated one."""
    own = values.tensor_split(dist.get_world_size())[dist.get_rank()]
    split, copy = (torch.nn.Parameter(torch.zeros_like(each)) for each in (own, values))
    Attributes(True, 0, 1).put_on(split)
    split.grad = own.clone()
    copy.grad = values.flip(0)
    with tp_invariance(segments):
        norm = clip_grad_norm_([split, copy], 1.0, state=dist.group.WORLD)
    parts = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, split.grad)
    return norm.item(), torch.cat(parts).tolist(), copy.grad.tolist()


def test_clipping_does_not_depend_on_the_ranks(ranks1, ranks2, ranks4):
    values = of_seed(2, elements=1001)
    expected = ranks1.run(clipped, values, 4)[0]
    assert expected[0] == pytest.approx(math.sqrt(2) * norm(values), rel=1e-7)
    for pool in (ranks2, ranks4):
        assert pool.run(clipped, values, 4) == [expected] * pool.world_size


def clipped_norms(segments):
    return [clipped(of_seed(seed, elements=1001), segments)[0] for seed in range(8)]


def test_clipping_otherwise_does(ranks1, ranks4):
    """Of some seed at least: each norm is added in the order of the ranks."""
    assert ranks1.run(clipped_norms, 0)[0] != ranks4.run(clipped_norms, 0)[0]
