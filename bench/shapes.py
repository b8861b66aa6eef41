"""The products that large models ask for, and how fast a GPU could at best compute each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tpkernels.planning.gpus import RATED_GPUS, RatedGpu


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    ffn: int
    qkv: int  # rows of the fused query, key and value projection
    gated: bool


MODELS = (
    Model("llama3-8b", hidden=4096, ffn=14336, qkv=4096 + 2 * 1024, gated=True),
    Model("llama3-70b", hidden=8192, ffn=28672, qkv=8192 + 2 * 1024, gated=True),
    Model("gpt3-175b", hidden=12288, ffn=49152, qkv=3 * 12288, gated=False),
)
TENSOR_SIZES = (1, 2, 4, 8)
TOKENS = (4096, 8192)
SMOKE = Model("smoke", hidden=96, ffn=256, qkv=160, gated=True)  # small enough for a CPU


@dataclass(frozen=True)
class Shape:
    """One linear layer on one of `tensor` ranks: (tokens, in_features) -> (tokens, out_features)."""

    model: Model
    tensor: int
    tokens: int
    layer: str
    out_features: int
    in_features: int

    def __str__(self) -> str:
        return f"{self.model.name}-tp{self.tensor}-{self.tokens}-{self.layer}"

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.out_features * self.in_features


def shapes_of(model: Model, tensor: int, tokens: int) -> list[Shape]:
    sizes = {
        "qkv": (model.qkv // tensor, model.hidden),
        "proj": (model.hidden, model.hidden // tensor),
        "fc_up": (model.ffn // tensor, model.hidden),  # a gated model has two of these
        "fc_down": (model.hidden, model.ffn // tensor),
    }
    return [Shape(model, tensor, tokens, layer, n, k) for layer, (n, k) in sizes.items()]


def all_shapes() -> Iterator[Shape]:
    """Every layer of every model at every tensor size: 96 products."""
    for model in MODELS:
        for tensor in TENSOR_SIZES:
            for tokens in TOKENS:
                yield from shapes_of(model, tensor, tokens)


# what is tuned, timed and compared with a baseline within minutes
GPU_SET = [shape for shape in all_shapes() if shape.tokens == 4096 and shape.tensor in (1, 8)]


def this_gpu() -> RatedGpu | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((gpu for gpu in RATED_GPUS.values() if gpu.name == name), None)
