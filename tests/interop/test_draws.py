"""In training ranks drop alike what they hold alike, and of split features what one rank would."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.checks import error_of
from tests.interop.torch_models import PLAN, toy
from tests.models.small import IDS
from tests.on_ranks import equal_on_all, on_ranks
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.interop.parallelize.hf_modules import Cut, SplitDropout
from tpkernels.layers.world import tensor_world


def dropping():
    model = nn.Sequential(nn.Embedding(37, 16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5))
    return parallelize(model, plan={"1": "column", "2": "row"}, weights="broadcast")


@on_ranks(2)
def test_split_features_are_dropped_as_one_rank_would():
    initialize_model_parallel(2)
    features = Cut.along(-1, (64,), tensor_world(None))
    dropout = SplitDropout(0.25, features)
    x = torch.ones(50, 64)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.25)
    torch.manual_seed(3)
    found = dropout(features.of(x))
    assert torch.equal(found, features.of(expected))
    assert 0.7 < float((found != 0).double().mean()) < 0.8
    equal_on_all(torch.get_rng_state().tolist())  # what comes next is drawn alike
    assert dropout.eval()(x) is x


@on_ranks(2)
def test_ranks_that_draw_apart_are_told_in_the_first_forward():
    initialize_model_parallel(2)
    rank = dist.get_rank()
    cases = [(rank, True, "RuntimeError"), (rank, False, "nothing"), (7, True, "nothing")]
    for seed, training, said in cases:
        model = dropping().train(training)
        torch.manual_seed(seed)
        kind, text = equal_on_all(error_of(model, IDS))
        assert kind == said
        assert said == "nothing" or "Seed torch alike on all ranks of a tensor group" in text[:200]
    torch.manual_seed(7)
    model = dropping()
    model(IDS)
    torch.manual_seed(rank)
    assert [error_of(model, IDS)[0] for _ in range(100)] == ["nothing"] * 99 + ["RuntimeError"]
    drawless = parallelize(toy(), plan=PLAN).train()
    drawless(IDS)


@on_ranks(2)
def test_hooks_on_output_of_a_table_stay_and_are_removable():
    initialize_model_parallel(2)
    model, seen = toy(), []
    handle = model.embed.register_forward_hook(lambda module, _, output: seen.append((module, output.shape)))
    parallelize(model, plan=PLAN)
    seen.clear()
    model(IDS)
    assert [(module is model.embed, shape[:2]) for module, shape in seen] == [(True, IDS.shape)]
    handle.remove()
    model(IDS)
    assert len(seen) == 1
