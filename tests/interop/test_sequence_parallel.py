"""Models of torch's own layers whose ranks share tokens between modules compute what they do unsharded."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.interop.partial_cases import ODD, data_parallel, trained_alike
from tests.interop.refused import refused_alike
from tests.interop.torch_models import STACK_PLAN, assert_alike, loss_of, sharings, stack
from tests.models.small import IDS, TARGETS
from tests.on_ranks import on_ranks
from tests.planning.test_work import wire
from tpkernels import initialize_model_parallel, parallelize
from tpkernels.comm import calls, schedule
from tpkernels.interop.parallelize import sequence, tokens
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region


def shared(kind="gpt", **options):
    return parallelize(stack(kind), **{"plan": STACK_PLAN, "sequence_parallel": True, **options})


def cost(model):
    """Bytes saved for backward, parameters not counted, and bytes a rank sends in forward and backward."""
    kept = []

    def keep(x):
        kept.append(x.untyped_storage())
        return x

    # ranks live longer than a case, and others leave transfers cut
    with wire() as sent, patch.object(schedule, "LEAST_BYTES", 2**17):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = loss_of(model, IDS.repeat(8, 1), TARGETS.repeat(8, 1))
        loss.backward()
    saved = {storage.data_ptr(): storage.nbytes() for storage in kept}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for at, size in saved.items() if at not in weights), sent.sent.total()


@on_ranks(2)
def test_modules_with_more_than_columns_and_rows_compute_as_before():
    initialize_model_parallel(2)
    attention = {f"layers.{i}.attention": tuple(f"layers.{i}.attention.{n}" for n in "qkv") for i in (0, 1)}
    mlp = {f"layers.{i}.mlp": (f"layers.{i}.mlp.up",) for i in (0, 1)}
    with sharings() as seen:
        for kind in ("gpt", "mixture", "dropout inside"):
            shared(kind)
    assert [dict(each.columns) for each in seen] == [attention | mlp, attention, attention]
    assert [each.whole for each in seen] == [(), tuple(mlp), tuple(mlp)]


@on_ranks(2)
def test_an_attention_that_is_not_split_gets_all_tokens():
    initialize_model_parallel(2)
    with sharings() as seen:
        split = shared(plan={name: said for name, said in STACK_PLAN.items() if ".attention" not in name})
    assert seen[0].whole == ("layers.0.attention", "layers.1.attention")
    assert_alike(split, stack())


@on_ranks(2)
def test_what_cannot_share_tokens_is_refused_on_all_ranks():
    initialize_model_parallel(2)
    of_flat, of_up = {"0": "column", "1": "row"}, {"layers.*.mlp.up": "column"}
    split, asked = shared(), dist.get_rank() == 0
    flat = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    each_once = "expected one call of each of the layers 'layers.0' to 'layers.1', in this order"
    random = "'layers.0.between' draws random numbers for hidden states"
    beside = "'layers.0.between.conv.weight' is in a layer, but not next to columns and rows"
    odd = "a number of tokens that 2 ranks divide, for sequence_parallel, got 5 in 'layers.0'"
    no_list = "expected all columns and rows in layers of an nn.ModuleList, got '0'"
    refused_alike("ValueError", random, shared, "dropout")
    refused_alike("ValueError", beside, shared, "convolution")
    refused_alike("ValueError", "split model computes something else than the unsharded", shared, "mean")
    refused_alike("ValueError", each_once, shared, "backward")
    refused_alike("ValueError", "expected distinct layers in 'layers', got one twice", shared, "twice")
    refused_alike("ValueError", "expected a verify that is not False", shared, verify=False)
    refused_alike("ValueError", odd, shared, verify=(ODD[0],))
    refused_alike("ValueError", no_list, parallelize, flat, plan=of_flat, sequence_parallel=True)
    refused_alike("ValueError", "in one nn.ModuleList of layers, got none", shared, plan={"head": "head"})
    refused_alike("ValueError", "", shared, plan=of_up)
    refused_alike("ValueError", "ranks disagree", shared, sequence_parallel=asked)
    refused_alike("ValueError", "tokens that the 2 ranks divide, got 5 in (2, 5, 16); pad", split, ODD[0])
    assert_alike(split, stack())


@on_ranks(2)
def test_the_comparison_finds_gradients_that_are_not_summed():
    initialize_model_parallel(2)
    with patch.object(sequence, "sum_gradients", lambda *_: None):
        norms = refused_alike("ValueError", "sequence_parallel: the split model computes", shared, "mixture")
    assert ".weight' is off by" in norms
    with patch.object(tokens, "_gather_replicated", gather_from_sequence_region):
        refused_alike("ValueError", "off by", shared, "mixture")


WAYS = [(how, "gpt") for how in ("reentrant", "pickled")]
WAYS += [("plain", kind) for kind in ("direct", "mixture")]
ALSO = [
    pytest.param(how, "gpt", marks=pytest.mark.sweep)
    for how in ("plain", "compiled", "checkpointed", "copied")
]


@pytest.mark.parametrize(("how", "kind"), WAYS + ALSO)
def test_it_trains_as_the_unsharded_model_does(how, kind, ranks2):
    ranks2.run(trained_alike, how, kind, True)


def test_it_has_the_same_gradients_on_four_ranks(ranks4):
    ranks4.run(trained_alike, "untrained", "gpt", True)


def test_it_does_so_under_fsdp(ranks4):
    ranks4.run(data_parallel, "fsdp", True)


@on_ranks(2)
def test_it_saves_memory_and_transfers():
    initialize_model_parallel(2)
    with patch.object(calls, "EAGER_BYTES", 0):  # what travels with descriptions is not counted
        (saved, sent), (shared_saved, shared_sent) = (
            cost(model) for model in (parallelize(stack().float(), plan=STACK_PLAN), shared().float())
        )
    assert shared_saved < 0.85 * saved
    assert shared_sent < 0.95 * sent
