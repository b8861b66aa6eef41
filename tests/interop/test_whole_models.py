"""Models of `transformers` are one graph under torch.compile, and train with tokens that ranks share."""

from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

from tests.interop.test_architectures import built
from tests.interop.torch_models import loss_of, losses_of, sharings
from tests.models.small import IDS
from tests.on_ranks import on_ranks
from tpkernels import check_replicas, initialize_model_parallel, parallelize

pytest.importorskip("transformers", reason="transformers is not installed")

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("Llama", False), ("Qwen3", True), ("GPT2", False)])
@on_ranks(2)
def test_a_compiled_model_is_one_graph(kind, sequence_parallel):
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
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    torch.testing.assert_close(*losses, rtol=0, atol=1e-7)
    for ours, expected in zip(split.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=0, atol=1e-7)


def with_shared_tokens(kind, **options):
    """The unsharded model and the split one, and what shares tokens."""
    model, _ = built(kind, **options)
    if kind != "Mixtral":  # whose experts know no float64
        model = model.double()
    with sharings() as seen:
        split = parallelize(deepcopy(model), sequence_parallel=True)
    return model, split, seen[0]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Mixtral"])
@on_ranks(2)
def test_adamw_and_text_are_those_of_the_unsharded_model(kind):
    initialize_model_parallel(2)
    mixture = kind == "Mixtral"
    whole, split, sharing = with_shared_tokens(kind, **MIXTURE if mixture else {})
    text = [m.eval().generate(IDS[:, :4], max_new_tokens=3, do_sample=False) for m in (split, whole)]
    assert torch.equal(*text)
    with pytest.raises(ValueError, match="expected output_hidden_states=False"):
        split(IDS, output_hidden_states=True)
    bound = 1e-5 if mixture else 1e-6
    assert losses_of(split.train()) == pytest.approx(losses_of(whole.train()), rel=0, abs=bound)
    check_replicas(split)
    attention, mlp = ("attn", "mlp") if kind == "GPT2" else ("self_attn", "mlp")
    columns = {name.rpartition(".")[2] for name, _ in sharing.columns}
    assert columns == ({attention} if mixture else {attention, mlp})
    assert {name.rpartition(".")[2] for name in sharing.whole} == ({mlp} if mixture else set())


@on_ranks(2)
def test_dropouts_are_drawn_alike_or_refused():
    initialize_model_parallel(2)
    _, _, sharing = with_shared_tokens("GPT2", resid_pdrop=0.5)
    assert sharing.columns == ()
    opt, _ = built("OPT", dropout=0.5)
    with pytest.raises(ValueError, match=r"layers\.0' draws random numbers for hidden states"):
        parallelize(opt, sequence_parallel=True)
