"""`layers/parallel_module.py`: one seed gives one weight, however many ranks share it."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.worlds import posing
from tests.products import once
from tpkernels import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tpkernels.groups.random import get_rng_tracker
from tpkernels.groups.sizes import ranges_of
from tpkernels.layers.initial import fill_shard

SHAPE = (12, 24)


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    get_rng_tracker().reset()


def shards(ranks: int, dim: int, dtype=torch.float32, init=nn.init.xavier_normal_):
    """Each rank's part, all from the same seed."""
    made = []
    for rank in range(ranks):
        torch.manual_seed(5)
        shape = [size // (ranks if d == dim else 1) for d, size in enumerate(SHAPE)]
        shard = torch.full(shape, torch.nan, dtype=dtype)
        ranges = ranges_of(rank, size=SHAPE[dim], ranks=ranks)
        fill_shard(shard, init, full=SHAPE, dim=dim, ranges=ranges)
        made.append(shard)
    return made


def whole(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(5)
    return nn.init.xavier_normal_(torch.empty(SHAPE)).to(dtype)


@once(ranks=[1, 2, 4], dim=[0, 1], dtype=[torch.float32, torch.bfloat16, torch.float64])
def test_shards_are_parts_of_one_weight(ranks, dim, dtype):
    assert torch.equal(torch.cat(shards(ranks, dim, dtype=dtype), dim), whole(dtype))


def test_draws_come_from_the_default_stream():
    tracker = get_rng_tracker()
    torch.manual_seed(5)
    tracker.add("model-parallel-rng", 99)
    shard = torch.empty(SHAPE)
    with tracker.fork():  # ranks would draw apart from this one
        before = torch.get_rng_state()
        fill_shard(shard, nn.init.xavier_normal_, full=SHAPE, dim=0, ranges=[range(12)])
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(shard, whole())


def test_the_whole_weight_comes_back_in_fp32_but_of_meta():
    shard = torch.empty(6, 24, dtype=torch.bfloat16)
    torch.manual_seed(5)
    filled = fill_shard(shard, nn.init.xavier_normal_, full=SHAPE, dim=0, ranges=[range(6)])
    assert torch.equal(filled, whole())
    before = torch.get_rng_state()
    assert fill_shard(shard.to("meta"), nn.init.normal_, full=SHAPE, dim=0, ranges=[range(6)]) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_init_method_may_return_another_tensor():
    for shard in shards(2, 0, init=lambda w: torch.full_like(w, 3)):
        assert shard.eq(3).all()


@pytest.mark.parametrize(
    ("init", "error", "words"),
    [
        (lambda w: w.flatten(), ValueError, r"shape \(12, 24\).*, got \(288,\)"),
        (lambda w: w.t(), ValueError, r"shape \(12, 24\).*, got \(24, 12\)"),
        (lambda w: w[None], ValueError, r"got \(1, 12, 24\)"),
        (lambda w: w.resize_(3), ValueError, r"got \(3,\)"),
        (lambda w: "xavier", TypeError, "got str back"),
    ],
)
def test_init_method_of_another_shape_is_refused(init, error, words):
    with pytest.raises(error, match=words):
        shards(2, 0, init=init)


class Allocations(TorchDispatchMode):
    """Bytes of the storages that live at once, at most; those of before are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.live.values()))
        return result


LAYERS = {
    "column": lambda **options: ColumnParallelLinear(64, 128, gather_output=False, **options),
    "row": lambda **options: RowParallelLinear(64, 128, input_is_parallel=True, **options),
    "embedding": lambda **options: VocabParallelEmbedding(250, 32, **options),
    "mlp": lambda **options: ParallelMLP(32, 128, activation="swiglu", **options),
    "attention": lambda **options: ParallelAttention(64, 8, **options),
}


@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_without_initialization_nothing_is_drawn_or_allocated_but_shards(build):
    with posing(1, 8):
        with Allocations() as drawn:
            shards = sum(p.nbytes for p in build().parameters())
        before = torch.get_rng_state()
        with Allocations() as peak:
            layer = build(perform_initialization=False)
        assert torch.equal(torch.get_rng_state(), before)
    assert peak.peak == shards
    assert drawn.peak > 2 * shards  # what is counted sees a weight that is drawn whole
    assert all(parameter.isnan().all() for parameter in layer.parameters())


def test_without_initialization_padding_is_zero_all_the_same():
    with posing(1, 2):
        weight = VocabParallelEmbedding(7, 3, perform_initialization=False).weight
    assert weight.isnan().all(1).tolist() == [True, True, True, False]
    assert not weight[3].any()
