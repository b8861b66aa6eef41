"""Models of `transformers` are one graph under torch.compile, and train with tokens that ranks share."""

from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.checks import error_of
from tests.interop.test_architectures import built
from tests.interop.torch_models import loss_of, losses_of, sharings
from tests.models.small import IDS
from tpkernels import check_replicas, initialize_model_parallel, parallelize

pytest.importorskip("transformers", reason="transformers is not installed")

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def compiled_apart(kind, sequence_parallel):
    """By how much loss and gradients of one graph differ from the eager model's."""
    initialize_model_parallel(2)
    model, _ = built(kind)
    split = parallelize(model.double(), sequence_parallel=sequence_parallel)
    eager = deepcopy(split)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
    losses = [loss_of(eager), loss_of(compiled)]
    for loss in losses:
        loss.backward()
    pairs = zip(eager.parameters(), split.parameters(), strict=True)
    return {
        "loss": abs(losses[0].item() - losses[1].item()),
        "gradients": max(float((a.grad - b.grad).abs().max()) for a, b in pairs),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


def with_shared_tokens(kind, **options):
    """The unsharded model and the split one, and what shares tokens."""
    model, _ = built(kind, **options)
    if kind != "Mixtral":  # whose experts know no float64
        model = model.double()
    with sharings() as seen:
        split = parallelize(deepcopy(model), sequence_parallel=True)
    return model, split, seen[0]


def shared_apart(kind):
    """By how much losses and text differ from the unsharded model's."""
    initialize_model_parallel(2)
    whole, split, sharing = with_shared_tokens(kind, **MIXTURE if kind == "Mixtral" else {})
    text = [m.eval().generate(IDS[:, :4], max_new_tokens=3, do_sample=False) for m in (split, whole)]
    hidden = error_of(split, IDS, output_hidden_states=True)
    pairs = zip(losses_of(split.train()), losses_of(whole.train()), strict=True)
    check_replicas(split)
    return {
        "losses": max(abs(ours - expected) for ours, expected in pairs),
        "text": torch.equal(*text),
        "hidden states": hidden,
        "columns": [name.rpartition(".")[2] for name, _ in sharing.columns],
        "whole": [name.rpartition(".")[2] for name in sharing.whole],
    }


def dropouts():
    """Where GPT-2's and OPT's dropouts are drawn."""
    initialize_model_parallel(2)
    _, _, sharing = with_shared_tokens("GPT2", resid_pdrop=0.5)
    opt, _ = built("OPT", dropout=0.5)
    return {"GPT2": sharing.columns, "OPT": error_of(parallelize, opt, sequence_parallel=True)}


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("Llama", False), ("Qwen3", True), ("GPT2", False)])
def test_a_compiled_model_is_one_graph(kind, sequence_parallel, ranks2):
    for found in ranks2.run(compiled_apart, kind, sequence_parallel):
        assert (found["graphs"], found["breaks"]) == (1, {})
        assert found["loss"] < 1e-7
        assert found["gradients"] < 1e-7


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Mixtral"])
def test_adamw_and_text_are_those_of_the_unsharded_model(kind, ranks2):
    attention, mlp = ("attn", "mlp") if kind == "GPT2" else ("self_attn", "mlp")
    mixture = kind == "Mixtral"
    for found in ranks2.run(shared_apart, kind):
        assert found["losses"] < (1e-5 if mixture else 1e-6)
        assert found["text"]
        assert found["hidden states"][0] == "ValueError"
        assert "expected output_hidden_states=False" in found["hidden states"][1]
        assert set(found["columns"]) == {attention} if mixture else {attention, mlp}
        assert set(found["whole"]) == ({mlp} if mixture else set())


def test_dropouts_are_drawn_alike_or_refused(ranks2):
    for found in ranks2.run(dropouts):
        assert found["GPT2"] == ()
        assert found["OPT"][0] == "ValueError"
        assert "'model.decoder.layers.0' draws random numbers for hidden states" in found["OPT"][1]
