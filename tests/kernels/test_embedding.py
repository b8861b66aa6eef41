"""Vocabulary-parallel lookup and its gradient, against float64; the oracles against torch's autograd."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.checks import DTYPES, LAYOUTS, assert_accurate, normal
from tests.products import pairwise
from tpkernels.kernels.embedding import embedding_bwd, embedding_fwd
from tpkernels.kernels.reference import embedding_bwd_ref, embedding_ref
from tpkernels.kernels.tiles import INTERPRETED_EMBEDDING, BlockTile

# (tokens, ids of the whole table, features)
SHAPES = {"one_block": (4, 8, 32), "ragged": (71, 23, 45), "one_token": (1, 5, 70), "one_feature": (9, 6, 1)}


@pairwise(shape=SHAPES, id_dtype=[torch.int64, torch.int32], dtype=DTYPES)
def test_shards_add_up_to_the_whole_table(shape, id_dtype, dtype, device):
    tokens, table, features = shape
    weight, ids = normal(table, features, dtype, device), torch.randint(table, (tokens,), device=device)
    dy = normal(tokens, features, dtype, device)
    looked_up, gradients, rows = [], [], -(-table // 3)
    padded = functional.pad(weight, (0, 0, 0, 3 * rows - table))  # the last rows are no ids
    for first, shard in zip(range(0, 3 * rows, rows), padded.split(rows), strict=True):
        looked_up.append(embedding_fwd(ids.to(id_dtype), shard, first_id=first))
        gradients.append(embedding_bwd(dy, ids.to(id_dtype), rows=rows, first_id=first))
        assert torch.equal(looked_up[-1], embedding_ref(ids, shard, first))
    assert torch.equal(sum(looked_up), weight[ids])
    exact = torch.zeros(table, features, dtype=torch.float64, device=device).index_add_(0, ids, dy.double())
    whole = torch.cat(gradients)
    assert_accurate(whole[:table], exact)
    assert not whole[table:].any()


def test_gradient_of_a_frequent_id_is_summed_in_fp32(device):
    dy = normal(3000, 40, torch.bfloat16, device)
    ids = torch.full((3000,), 2, device=device)
    exact = dy.double().sum(0)
    for gradient in (
        embedding_bwd(dy, ids, rows=3, dtype=torch.float32),
        embedding_bwd_ref(dy, ids, 3, dtype=torch.float32),
    ):
        assert gradient.dtype == torch.float32
        assert float((gradient[2] - exact).norm() / exact.norm()) < 1e-6
        assert not gradient[:2].any()


@pytest.mark.parametrize("split", [4, 8])
def test_a_frequent_row_is_the_sum_of_its_splits_and_of_what_is_left(split, device):
    """Rows of a token less than some splits, of as many and of more, wherever they start among the others."""
    tile = BlockTile(block_rows=4, block_cols=32, num_warps=4, chunk=split)
    counts = [3, split - 1, split, 0, split + 1, 5 * split - 1, 1, 5 * split, 70]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    ids = ids[torch.randperm(len(ids), device=device)]
    dy = normal(len(ids), 40, torch.bfloat16, device)
    gradient = embedding_bwd(dy, ids, rows=7, first_id=2, dtype=torch.float32, tile=tile)
    exact = torch.zeros(9, 40, dtype=torch.float64, device=device).index_add_(0, ids, dy.double())[2:]
    assert_accurate(gradient, exact)


def test_gradient_of_a_frequent_row_has_the_same_bits_whatever_other_ids_there_are(device):
    dy = normal(200, 40, torch.float32, device)
    ids = torch.where(torch.arange(200, device=device) % 3 > 0, 7, 9)
    alone = embedding_bwd(dy[ids == 7], ids[ids == 7], rows=1, first_id=7)
    assert len(dy[ids == 7]) > 16 * INTERPRETED_EMBEDDING.chunk
    for others in (0, 3, 6, 8, 10):  # in front of its tokens come 0 or 67 of others
        found = embedding_bwd(dy, torch.where(ids == 7, 7, others), rows=1, first_id=7)
        assert torch.equal(found, alone), others


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_embedding_takes_any_layout(layout, device):
    weight, dy = (layout(normal(20, 48, torch.float16, device)) for _ in range(2))
    ids = torch.randint(30, (20,), device=device)
    assert torch.equal(embedding_fwd(ids, weight, first_id=5), embedding_ref(ids, weight, 5))
    assert_accurate(embedding_bwd(dy, ids, rows=20, first_id=5), embedding_bwd_ref(dy.double(), ids, 20, 5))


def test_embedding_takes_no_tokens(device):
    weight, none = normal(4, 8, torch.float32, device), torch.empty(0, dtype=torch.int64, device=device)
    assert embedding_fwd(none, weight).shape == (0, 8)
    assert torch.equal(embedding_bwd(weight[:0], none, rows=4), torch.zeros(4, 8, device=device))


def test_embedding_oracles_match_autograd(device):
    weight = torch.randn(11, 6, dtype=torch.float64, device=device, requires_grad=True)
    ids, dy = torch.randint(11, (40,), device=device), torch.randn(40, 6, dtype=torch.float64, device=device)
    y = functional.embedding(ids, weight)
    (exact,) = torch.autograd.grad(y, weight, dy)
    torch.testing.assert_close(embedding_ref(ids, weight), y)
    torch.testing.assert_close(embedding_bwd_ref(dy, ids, 11), exact)


def test_oracle_gives_zeros_for_rows_of_others_whatever_ours_hold(device):
    weight = torch.full((3, 2), float("nan"), device=device)
    weight[1] = 7
    ids = torch.tensor([4, 6, 9, 0], device=device)  # ours are 5, 6, 7
    assert torch.equal(
        embedding_ref(ids, weight, 5), torch.tensor([[0.0], [7], [0], [0]], device=device).expand(4, 2)
    )
    gradient = embedding_bwd_ref(torch.ones(4, 2, device=device), ids, 3, 5)
    assert torch.equal(gradient, torch.tensor([[0.0], [1], [0]], device=device).expand(3, 2))
