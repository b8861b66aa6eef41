"""GPT with a recipe: blocks compute in fp8, the head and the embedding only if asked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.layers.small import joined_world
from tests.layers.worlds import posing
from tests.models.small import CONFIGS, IDS, TARGETS
from tests.products import once
from tpkernels import GPT, Recipe

RECIPES = [Recipe.rowwise(), Recipe.blockwise(), Recipe.rowwise(head=True)]


def built(shape, recipe, **options):
    torch.manual_seed(4)
    return GPT(CONFIGS[shape], quantize=recipe, **options)


@pytest.fixture(autouse=True)
def alone(request):
    if "ranks2" in request.fixturenames:
        yield
        return
    with posing(0, 1):
        yield


@once(recipe=RECIPES, shape=[*CONFIGS])
def test_loss_is_near_that_in_bf16(shape, recipe):
    ours, plain = (built(shape, each, dtype=torch.bfloat16) for each in (recipe, None))
    loss, expected = ours(IDS, TARGETS), plain(IDS, TARGETS)
    assert 1e-6 < abs(loss.item() - expected.item()) < 2e-3 * expected.item()
    loss.backward()
    expected.backward()
    for (name, own), (_, other) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        difference = (own.grad - other.grad).float().norm() / other.grad.float().norm()
        assert difference < 0.25 or other.grad.norm() < 1e-4, name


@pytest.mark.parametrize("shape", CONFIGS)
def test_head_and_embedding_are_as_without(shape):
    ours, plain = built(shape, Recipe.rowwise()), built(shape, None)
    hidden = torch.randn(8, 2, 16)
    assert torch.equal(ours.logits(hidden), plain.logits(hidden))
    assert torch.equal(ours.embedding(IDS), plain.embedding(IDS))
    with_head = built(shape, Recipe.rowwise(head=True)).logits(hidden)
    difference = (with_head - plain.logits(hidden)).norm() / with_head.norm()
    assert 1e-3 < difference < 0.1


@once(recipe=RECIPES, shape=[*CONFIGS])
def test_its_loss_and_what_it_writes_are_of_the_logits_that_it_has(shape, recipe):
    model, targets = built(shape, recipe), TARGETS.clone()
    targets[0, :3] = -100
    logits = model(IDS)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(IDS, targets), expected)
    assert model(IDS, torch.full_like(IDS, -100)).item() == 0
    greedy = model.generate(IDS[:, :3], 1, top_k=1)
    assert greedy[:, 3].tolist() == model(IDS[:, :3])[:, -1].argmax(-1).tolist()


def loss_of_ranks(recipe):
    joined_world()
    return float(built("gpt2", recipe, sequence_parallel=True)(IDS, TARGETS))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_two_ranks_are_as_close_as_one(recipe, ranks2):
    expected, _ = ranks2.run(loss_of_ranks, None)
    first, second = ranks2.run(loss_of_ranks, recipe)
    assert first == second
    assert 1e-7 < abs(first - expected) < 2e-3 * expected


def test_another_dtype_than_fp8_knows_is_refused():
    model = built("llama", Recipe.rowwise(), dtype=torch.float64)
    with pytest.raises(TypeError, match="expected x in bfloat16, float16 or float32 with quantize"):
        model(IDS)
