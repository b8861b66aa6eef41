"""Models of torch's own layers whose ranks share tokens between modules compute what they do unsharded."""

import pickle
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.interop.partial_cases import data_parallel
from tests.interop.refused import refused
from tests.interop.torch_models import PLAN as TOY_PLAN
from tests.interop.torch_models import STACK_PLAN, differences, loss_of, losses_of, stack, toy
from tests.models.small import IDS, TARGETS
from tests.planning.test_work import Wire
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.comm import schedule
from tpkernels.interop.parallelize import sequence, sequence_trial, tokens
from tpkernels.ops.tensor_parallel.mappings import gather_from_sequence_region

ODD = IDS[:, :5]


def shared(kind="gpt", **options):
    return parallelize(stack(kind), **{"plan": STACK_PLAN, "sequence_parallel": True, **options})


def trained_alike(kind="gpt", how="plain"):
    """What differs from the unsharded model: logits, gradients, and losses of five steps of AdamW."""
    initialize_model_parallel(dist.get_world_size())
    if kind == "direct":  # columns and rows are children of layers
        whole, split = toy(), parallelize(toy(), plan=TOY_PLAN, sequence_parallel=True)
    else:
        whole, split = stack(kind), shared(kind)
    if how in ("checkpointed", "reentrant"):
        split.checkpointing = how == "reentrant"
    elif how == "copied":
        split = deepcopy(split)
    elif how == "pickled":
        split = pickle.loads(pickle.dumps(split))
    model = split
    if how == "compiled":
        torch._dynamo.reset()
        model = torch.compile(split, fullgraph=True, backend="aot_eager")
    wrong = differences(split, whole)
    for each in (split.eval(), whole.eval()):
        each.zero_grad()
    if not torch.allclose(split(ODD), whole(ODD), rtol=0, atol=1e-12):
        wrong.append("logits of tokens that ranks do not divide")
    wrong += [f"{name} of these" for name in differences(split, whole)]
    pairs = zip(losses_of(model.train()), losses_of(whole.train()), strict=True)
    wrong += [f"loss {step}" for step, (ours, loss) in enumerate(pairs) if abs(ours - loss) > 1e-10]
    check_replicas(split)
    return wrong


def odd_gradients():
    """In eval mode, of tokens that ranks do not divide, and before and after them of others."""
    initialize_model_parallel(2)
    whole, split = stack().eval(), shared().eval()
    wrong = []
    for ids, targets in ((IDS, TARGETS), (ODD, TARGETS[:, :5]), (IDS, TARGETS)):
        for model in (split, whole):
            model.zero_grad()
            loss_of(model, ids, targets).backward()
        for name in ("norm", "layers.0.norm1", "layers.1.mlp.down", "positions"):
            for ours, expected in zip(
                split.get_submodule(name).parameters(), whole.get_submodule(name).parameters(), strict=True
            ):
                if ours.shape == expected.shape and not torch.allclose(
                    ours.grad, expected.grad, rtol=0, atol=1e-12
                ):
                    wrong.append(f"{name} of {ids.shape[1]}")
    return wrong


def costs():
    """Without sequence parallelism, and with it."""
    initialize_model_parallel(dist.get_world_size())
    models = {"plain": parallelize(stack().float(), plan=STACK_PLAN), "shared": shared().float()}
    return {name: cost(model) for name, model in models.items()}


def cost(model):
    """Bytes saved for backward, parameters not counted, and bytes a rank sends in forward and backward."""
    kept = []

    def keep(x):
        kept.append(x.untyped_storage())
        return x

    # ranks live longer than a case, and others leave transfers cut
    with Wire() as wire, patch.object(schedule, "LEAST_BYTES", 2**17):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = loss_of(model, IDS.repeat(8, 1), TARGETS.repeat(8, 1))
        loss.backward()
    saved = {storage.data_ptr(): storage.nbytes() for storage in kept}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for at, size in saved.items() if at not in weights), wire.sent


def forms():
    """Which modules gather for their columns, and which are computed as without sequence parallelism."""
    initialize_model_parallel(2)
    kept, seen = sequence_trial.sharing_of, []
    with patch.object(sequence_trial, "sharing_of", lambda *args: seen.append(kept(*args)) or seen[-1]):
        for kind in ("gpt", "mixture", "dropout inside"):
            shared(kind)
    return {"columns": [dict(each.columns) for each in seen], "whole": [each.whole for each in seen]}


def refusals():
    initialize_model_parallel(2)
    of_flat, of_up = {"0": "column", "1": "row"}, {"layers.*.mlp.up": "column"}
    split, asked = shared(), dist.get_rank() == 0
    flat = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    each_once = "expected one call of each of the layers 'layers.0' to 'layers.1', in this order"
    random = "'layers.0.between' draws random numbers for hidden states"
    beside = "'layers.0.between.conv.weight' is in a layer, but not beside columns and rows"
    odd = "a number of tokens that 2 ranks divide, for sequence_parallel, got 5 in 'layers.0'"
    no_list = "expected all columns and rows in layers of an nn.ModuleList, got '0'"
    said = [
        refused("ValueError", random, shared, "dropout"),
        refused("ValueError", beside, shared, "convolution"),
        refused("ValueError", "the split model does not do what the unsharded one does", shared, "mean"),
        refused("ValueError", each_once, shared, "backward"),
        refused("ValueError", "expected layers of their own in 'layers', got one twice", shared, "twice"),
        refused("ValueError", "expected a verify that is not False", shared, verify=False),
        refused("ValueError", odd, shared, verify=(ODD,)),
        refused("ValueError", no_list, parallelize, flat, plan=of_flat, sequence_parallel=True),
        refused("ValueError", "in one nn.ModuleList of layers, got none", shared, plan={"head": "head"}),
        refused("ValueError", "", shared, plan=of_up),
        refused("ValueError", "ranks disagree", shared, sequence_parallel=asked),
        refused("ValueError", "tokens that the 2 ranks divide, got 5 in (2, 5, 16); pad", split, ODD),
    ]
    assert differences(split, stack()) == []
    return said


def faults_seen():
    """The comparison refuses what would be wrong."""
    initialize_model_parallel(2)
    with patch.object(sequence, "sum_gradients", lambda *_: None):
        norms = refused("ValueError", "sequence_parallel: the split model does not", shared, "mixture")
    assert ".weight' is off by" in norms
    with patch.object(tokens, "_gather_replicated", gather_from_sequence_region):
        return [norms, refused("ValueError", "off by", shared, "mixture")]


HOW = ["plain", "checkpointed", "reentrant", "compiled", "copied", "pickled"]


@pytest.mark.parametrize(
    ("kind", "how"), [*(("gpt", how) for how in HOW), ("direct", "plain"), ("mixture", "plain")]
)
def test_it_trains_as_the_unsharded_model_does(kind, how, ranks2):
    assert ranks2.run(trained_alike, kind, how) == [[], []]


def test_it_does_so_on_four_ranks(ranks4):
    assert ranks4.run(trained_alike) == [[]] * 4


def test_it_does_so_under_fsdp(ranks4):
    assert ranks4.run(data_parallel, "fsdp", True) == [[]] * 4


def test_gradients_in_eval_mode_of_any_number_of_tokens(ranks2):
    assert ranks2.run(odd_gradients) == [[], []]


def test_modules_with_more_than_columns_and_rows_compute_as_before(ranks2):
    attention = {f"layers.{i}.attention": tuple(f"layers.{i}.attention.{n}" for n in "qkv") for i in (0, 1)}
    mlp = {f"layers.{i}.mlp": (f"layers.{i}.mlp.up",) for i in (0, 1)}
    columns, whole = [attention | mlp, attention, attention], [(), tuple(mlp), tuple(mlp)]
    assert ranks2.run(forms) == [{"columns": columns, "whole": whole}] * 2


def test_it_saves_memory_and_transfers(ranks2):
    for found in ranks2.run(costs):
        (saved, sent), (shared_saved, shared_sent) = found["plain"], found["shared"]
        assert shared_saved < 0.85 * saved
        assert shared_sent < 0.95 * sent


@pytest.mark.parametrize("refusals", [refusals, faults_seen])
def test_what_cannot_share_tokens_is_refused_on_all_ranks_alike(refusals, ranks2):
    first, second = ranks2.run(refusals)
    assert first == second
