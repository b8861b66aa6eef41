"""Records the run whose buckets a picture shows: `python -m docs.record_runs`; `make pictures` draws it.

Two ranks of this machine write docs/bucket-layout.json.
"""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import torch

from docs.pictures import LAYOUT
from tests.ranks import RankPool
from tpkernels import GPT, GPTConfig, GradientBuckets, initialize_model_parallel

CONFIG = GPTConfig(vocab_size=1024, hidden_size=512, num_layers=8, num_heads=8, max_positions=512)


def bucket_run() -> dict[str, Any]:
    """On a rank: the buckets of a second step in the order of sending, with names and bytes of parameters."""
    state = initialize_model_parallel(1)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    gradients = GradientBuckets(model, state.process_group("dp"))
    for _ in range(2):  # the first step teaches the order
        gradients.zero()
        model(torch.randint(CONFIG.vocab_size, (2, 64))).square().mean().backward()
        gradients.finish()
    by_address = sorted(
        (parameter.grad.data_ptr(), name, parameter.grad.nbytes)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    )
    buckets = [
        [(name, size) for at, name, size in by_address if 0 <= at - flat.data_ptr() < flat.nbytes]
        for flat in gradients.buckets
    ]
    return {"launched_in_backward": gradients.launched_in_backward, "buckets": buckets}


def main() -> None:
    model = f"GPT of {CONFIG.num_layers} layers and {CONFIG.hidden_size} features"
    with RankPool(2) as ranks:
        run = ranks.run(bucket_run)[0]
    LAYOUT.write_text(json.dumps({"recorded": f"{date.today()}", "model": model, **run}) + "\n")


if __name__ == "__main__":
    main()
