"""Small models, and the problems that a step of training poses to a rank of them."""

from functools import wraps

import torch

from tpkernels import GPT, GPTConfig, initialize_model_parallel
from tpkernels.dispatch import primitives
from tpkernels.dispatch.products import PRODUCTS

GPTS = {
    "gated": GPTConfig(
        vocab_size=96,
        hidden_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=96,
        activation="swiglu",
        norm="rms_norm",
        bias=False,
        tied=False,
    ),
    "plain": GPTConfig(vocab_size=96, hidden_size=64, num_layers=1, num_heads=4, max_positions=160),
}


def problems_of_a_step(kind: str, tokens: int, fused: bool) -> list[str]:
    """Their keys, once each. Without overlap each product is of all tokens."""
    initialize_model_parallel(torch.distributed.get_world_size())
    model = GPT(
        GPTS[kind],
        dtype=torch.bfloat16,
        sequence_parallel=True,
        gradient_accumulation_fusion=fused,
        overlap=False,
    )
    if fused:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    ids = torch.arange(tokens).view(1, -1) % 96
    posed: list[str] = []
    real = {name: getattr(primitives, name) for name in PRODUCTS}
    real_into = primitives.into

    def seen(name):
        @wraps(real[name])
        def call(*args):
            posed.append(PRODUCTS[name].problem(*args).key)
            return real[name](*args)

        return call

    def into(primitive, out, *args):
        name = primitive.__name__
        if name in PRODUCTS:
            posed.append(PRODUCTS[name].problem(*args, out=out).key)
        real_into(primitive, out, *args)

    try:
        for name in PRODUCTS:
            setattr(primitives, name, seen(name))
        primitives.into = into
        model(ids, ids).backward()
    finally:
        for name, call in real.items():
            setattr(primitives, name, call)
        primitives.into = real_into
    return sorted(set(posed))
