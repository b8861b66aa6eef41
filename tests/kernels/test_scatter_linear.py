"""`scatter_linear`: products whose rows go to their owners. In tests/ops the owners are other processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.checks import DTYPES, LAYOUTS, TILE, assert_accurate, normal
from tests.kernels.waiting import EPOCH, interpreted
from tests.products import once
from tpkernels.kernels import launch
from tpkernels.kernels.dgrad import dgrad
from tpkernels.kernels.linear import linear_fwd
from tpkernels.kernels.scatter_linear import scatter_linear
from tpkernels.kernels.tiles import MatmulTile
from tpkernels.kernels.waits import Departures

# (ranks, splits, rows of a chunk, out_features), around the edges of TILE
GRIDS = {
    "one_rank": (1, 1, 32, 32),
    "one_chunk_each": (2, 1, 71, 51),
    "four_chunks_each": (3, 4, 9, 40),
    "several_tiles": (2, 2, 40, 48),
    "five_ranks": (5, 3, 3, 33),
}


class Owners:
    """What is stored into, in one process: slots of R owners, NaN at first, flags at the call before."""

    def __init__(self, ranks, splits, rows, cols, dtype, device):
        self.ranks, self.splits, self.rows = ranks, splits, rows
        self.slots = [launch.empty((rows, cols), dtype, device) for _ in range(ranks)]
        self.flags = torch.full((ranks, splits), EPOCH - 1, dtype=torch.int32, device=device)
        self.departures = Departures(
            torch.tensor([slot.data_ptr() for slot in self.slots], device=device),
            torch.tensor([flags.data_ptr() for flags in self.flags], device=device),
            torch.zeros(ranks * splits, dtype=torch.int32, device=device),
            torch.tensor([EPOCH], dtype=torch.int32, device=device),
        )

    def total(self) -> Tensor:
        """All rows, in the order of owners, after a check that all flags are up and all counters at zero."""
        epoch = self.departures.awaited
        assert torch.equal(self.flags, epoch.expand_as(self.flags))
        assert not self.departures.counters.any()
        return torch.cat(self.slots)

    @contextmanager
    def watched(self) -> Iterator[list[tuple[int, int, bool]]]:
        """(owner, chunk, whether the chunk was full) of each flag that an interpreted kernel raises."""
        raised: list[tuple[int, int, bool]] = []
        parts = product(range(self.ranks), range(self.splits))
        places = {self.flags[place].data_ptr(): place for place in parts}
        upstream = InterpreterBuilder.create_atomic_rmw

        def create_atomic_rmw(builder, operation, pointer, *rest):
            if place := places.get(int(pointer.data.item())):
                size = self.rows // self.splits
                owner, part = place
                chunk = self.slots[owner][part * size : (part + 1) * size]
                raised.append((owner, part, not chunk.isnan().any().item()))
            return upstream(builder, operation, pointer, *rest)

        with patch.object(InterpreterBuilder, "create_atomic_rmw", create_atomic_rmw):
            yield raised


def operands(rows, cols, depth, dtype, device):
    return normal(rows, depth, dtype, device), normal(cols, depth, dtype, device) * depth**-0.5


def sent(pairs, grid, rank: int = 0, **options) -> Tensor:
    """What the owners have afterwards."""
    ranks, splits, rows, cols = grid
    owners = Owners(ranks, splits, splits * rows, cols, pairs[0][0].dtype, pairs[0][0].device)
    scatter_linear(pairs, departures=owners.departures, ranks=ranks, rank=rank, splits=splits, **options)
    return owners.total()


@once(grid=GRIDS, dtype=DTYPES)
def test_scatter_linear_has_the_bits_of_linear_and_dgrad(grid, dtype, device):
    ranks, splits, rows, cols = grid
    a, w = operands(ranks * splits * rows, cols, 45, dtype, device)
    y = sent(((a, w),), grid, rank=ranks - 1, tile=TILE)
    assert_accurate(y, a.double() @ w.double().t(), a @ w.t())
    assert torch.equal(y, linear_fwd(a, w, tile=TILE).y)
    lying = w.t().contiguous()
    assert torch.equal(sent(((a, lying.t()),), grid, tile=TILE), dgrad(a, lying, tile=TILE))


def test_scatter_linear_rounds_the_sum_of_two_products_once(device):
    """1 + 2⁻⁸ is 1 in bf16, and 1 + 2⁻⁸ + 2⁻⁸ is not."""
    ones = torch.ones(32, 16, dtype=torch.bfloat16, device=device)
    first, second = ones * 0, ones * 0
    first[:, 0], first[:, 1], second[:, 0] = 1, 2**-8, 2**-8
    assert (sent(((ones, first), (ones, second)), (1, 1, 32, 32)) == 1 + 2**-7).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_scatter_linear_takes_any_layout(layout, device):
    grid = (2, 1, 36, 51)
    (a, w), (a2, w2) = (operands(72, 51, 45, torch.float16, device) for _ in range(2))
    pairs = ((layout(a), layout(w)), (a2, w2.t().contiguous().t()))  # one weight of each kind
    exact = sum(a.double() @ w.double().t() for a, w in pairs)
    assert_accurate(sent(pairs, grid), exact)


@interpreted
@pytest.mark.parametrize("margin", [0, 1])  # three programs, two
def test_a_flag_is_raised_after_all_tiles_of_its_chunk(margin, device):
    ranks, splits, rows, cols = grid = GRIDS["several_tiles"]
    owners = Owners(ranks, splits, splits * rows, cols, torch.float32, device)
    pair = operands(ranks * splits * rows, cols, 45, torch.float32, device)
    with owners.watched() as raised:
        scatter_linear(
            (pair,), departures=owners.departures, ranks=2, rank=0, splits=2, margin=margin, tile=TILE
        )
    assert sorted(raised) == [(0, 0, True), (0, 1, True), (1, 0, True), (1, 1, True)]
    assert owners.total().shape == (grid[0] * grid[1] * grid[2], grid[3])


@interpreted
def test_a_flag_before_the_last_tile_shows(device):
    """A counter that starts at 1 raises its flag a tile early: what watches the flags sees it."""
    owners = Owners(1, 1, 72, 80, torch.float32, device)
    owners.departures.counters.fill_(1)
    pair = operands(72, 80, 45, torch.float32, device)
    with owners.watched() as raised:
        scatter_linear((pair,), departures=owners.departures, ranks=1, rank=0, tile=TILE)
    assert raised == [(0, 0, False)]


@interpreted
@pytest.mark.parametrize("rank", range(3))
def test_scatter_linear_sends_first_what_travels_furthest_round_the_ring(rank, device):
    owners = Owners(3, 2, 4, 16, torch.float32, device)
    pair = operands(12, 16, 16, torch.float32, device)
    with owners.watched() as raised:  # by one program
        scatter_linear((pair,), departures=owners.departures, ranks=3, rank=rank, splits=2, margin=2)
    order = [(rank + 2) % 3, (rank + 1) % 3, rank]
    assert raised == [(owner, part, True) for owner in order for part in (0, 1)]


def test_scatter_linear_counts_calls_past_2_to_the_31(device):
    owners = Owners(1, 1, 33, 16, torch.float32, device)
    a, w = operands(33, 16, 16, torch.float32, device)
    y, awaited = linear_fwd(a, w, tile=TILE).y, owners.departures.awaited
    awaited.fill_(2**31 - 3)
    for _ in range(6):  # two programs with a tile each
        owners.slots[0].fill_(float("nan"))
        scatter_linear(((a, w),), departures=owners.departures, ranks=1, rank=0, tile=TILE)
        assert torch.equal(owners.total(), y)
        awaited.add_(1)
    assert awaited.item() == -(2**31) + 3


@pytest.mark.parametrize(("rows", "cols"), [(0, 16), (4, 0)])
def test_scatter_linear_sends_nothing_of_what_is_empty(rows, cols, device):
    owners = Owners(2, 1, rows, cols, torch.float32, device)
    a, w = operands(2 * rows, cols, 16, torch.float32, device)
    scatter_linear(((a, w),), departures=owners.departures, ranks=2, rank=0)
    assert (owners.flags == EPOCH - 1).all()


def test_scatter_linear_of_no_depth_is_zero(device):
    a, w = torch.ones(8, 0, device=device), torch.ones(16, 0, device=device)
    assert (sent(((a, w),), (2, 1, 4, 16)) == 0).all()


def test_scatter_linear_refuses_what_cannot_work(device):
    owners = Owners(2, 2, 8, 16, torch.float32, device)
    pair = a, w = operands(16, 16, 24, torch.float32, device)

    def refused(error, match, pairs=(pair,), departures=owners.departures, ranks=2, rank=0, **options):
        with pytest.raises(error, match=match):
            scatter_linear(pairs, departures=departures, ranks=ranks, rank=rank, **{"splits": 2} | options)

    refused(ValueError, "one or two pairs of .a, weight., got 0", ())
    refused(ValueError, "one or two pairs of .a, weight., got 3", (pair, pair, pair))
    refused(ValueError, r"weight of shape \(16, 24\).*got \(16, 23\)", ((a, w[:, 1:]),))
    refused(ValueError, r"weight of shape \(16, 24\).*got \(15, 24\)", (pair, (a, w[1:])))
    refused(ValueError, r"a of shape \(16, 24\).*got \(15, 24\)", (pair, (a[1:], w)))
    refused(TypeError, "expected one dtype", (pair, (a.half(), w.half())))
    refused(ValueError, "tokens that 2 ranks times 2 chunks divide, got 15", ((a[1:], w),))
    refused(ValueError, "rank below the ranks.*got rank 2 of 2 ranks and 2 chunks", rank=2)
    refused(ValueError, "one chunk or more.*got rank 0 of 2 ranks and 0 chunks", splits=0)
    refused(ValueError, r"counters of \(2,\).*got \(4,\) in torch.int32", splits=1)
    refused(ValueError, r"margin of 0 to .* processors, got 9999", margin=9999)
    refused(ValueError, "flatten=False", tile=MatmulTile(32, 32, 32, 4, 1, flatten=True))
    refused(ValueError, "form='descriptor' does not fit", form="descriptor")
    fields = {name: getattr(owners.departures, name) for name in ("slots", "flags", "counters", "awaited")}
    for name, tensor in fields.items():
        for bad in (tensor.float(), tensor.repeat(2), tensor[:, None], tensor.to("meta")):
            refused(ValueError, f"expected {name} o[fn]", departures=Departures(**fields | {name: bad}))
    assert (owners.flags == EPOCH - 1).all()
