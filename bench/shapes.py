"""The products that large models ask for, and how fast a GPU could at best compute each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Gpu:
    """What the data sheet allows: dense bf16 products, and memory traffic."""

    name: str
    flops: float
    bytes: float

    def floor(self, flops: float, traffic: float) -> float:
        """Seconds that no kernel can go below."""
        return max(flops / self.flops, traffic / self.bytes)


GPUS = (Gpu("H200", 989e12, 4.8e12), Gpu("H100", 989e12, 3.35e12), Gpu("A100", 312e12, 2.0e12))


def this_gpu() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def sizes_of(shapes: Iterable[Shape]) -> str:
    """What `python -m tpkernels tune --shapes` takes: tokens x out_features x in_features, each once."""
    return ",".join(dict.fromkeys(f"{s.tokens}x{s.out_features}x{s.in_features}" for s in shapes))


if __name__ == "__main__":  # python -m bench.shapes 4096 1,8: those of 4096 tokens on 1 and on 8 ranks
    tokens, tensors = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    print(sizes_of(shape for shape in all_shapes() if shape.tokens == tokens and shape.tensor in tensors))
