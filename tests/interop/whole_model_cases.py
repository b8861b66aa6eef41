"""Models of `transformers` on two ranks under torch.compile, and with tokens that ranks share."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.checks import error_of
from tests.interop.architecture_cases import GPT2, NO_IDS, SIZES, built, losses_of
from tests.interop.split_cases import loss_of
from tests.models.small import IDS
from tpkernels import check_replicas, initialize_model_parallel, parallelize
from tpkernels.interop.parallelize import sequence_trial
from tpkernels.interop.parallelize.sequence import Sharing

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def compiled_apart(kind: str, sequence_parallel: bool) -> dict[str, Any]:
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


def with_shared_tokens(kind: str, **options: Any) -> tuple[nn.Module, nn.Module, Sharing]:
    """The unsharded model and the split one, and what shares tokens."""
    import transformers

    if kind == "Mixtral":  # whose experts know no float64
        torch.manual_seed(2)
        model: nn.Module = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, **NO_IDS, **MIXTURE)
        )
    elif kind == "GPT2":
        torch.manual_seed(2)
        config = transformers.GPT2Config(**{**GPT2, **NO_IDS, **options})
        model = transformers.GPT2LMHeadModel(config).double()
    else:
        model = built(kind)[0].double()
    seen: list[Sharing] = []
    kept = sequence_trial.sharing_of
    sequence_trial.sharing_of = lambda *args: seen.append(kept(*args)) or seen[-1]
    try:
        split = parallelize(deepcopy(model), sequence_parallel=True)
    finally:
        sequence_trial.sharing_of = kept
    return model, split, seen[0]


def shared_apart(kind: str) -> dict[str, Any]:
    """By how much losses and text differ from the unsharded model's."""
    initialize_model_parallel(2)
    whole, split, sharing = with_shared_tokens(kind)
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


def dropouts() -> dict[str, Any]:
    """Where GPT-2's and OPT's dropouts are drawn."""
    import transformers

    initialize_model_parallel(2)
    _, _, sharing = with_shared_tokens("GPT2", resid_pdrop=0.5)
    config = transformers.OPTConfig(
        vocab_size=37,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        word_embed_proj_dim=16,
        dropout=0.5,
        **{**NO_IDS, "pad_token_id": 1},
    )
    opt = transformers.OPTForCausalLM(config)
    return {"GPT2": sharing.columns, "OPT": error_of(parallelize, opt, sequence_parallel=True)}
