"""The products that large models ask for, and how fast a GPU could at best compute each.

python -m bench.shapes > bench/shapes.csv     the table of them all
python -m bench.shapes --gpu-set              those that `make gpu` tunes and times, for `tpkernels tune`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
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

    @property
    def traffic(self) -> int:
        """Bytes that a perfect kernel reads and writes in 16 bits."""
        t, n, k = self.tokens, self.out_features, self.in_features
        return 2 * (t * k + n * k + t * n)


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


def table() -> Iterator[str]:
    """The lines of `shapes.csv`: each product with its work and, in microseconds, its floor on each GPU."""
    floors = ",".join(f"{gpu}_us" for gpu in RATED_GPUS)
    yield f"model,tensor,tokens,layer,out_features,in_features,gflop,mbyte,{floors}"
    for s in all_shapes():
        sizes = f"{s.model.name},{s.tensor},{s.tokens},{s.layer},{s.out_features},{s.in_features}"
        floors = ",".join(f"{1e6 * gpu.floor(s.flops, s.traffic):.1f}" for gpu in RATED_GPUS.values())
        yield f"{sizes},{s.flops / 1e9:.1f},{s.traffic / 1e6:.1f},{floors}"


def sizes_of(shapes: Iterable[Shape]) -> str:
    """What `python -m tpkernels tune --shapes` takes: tokens x out_features x in_features, each once."""
    return ",".join(dict.fromkeys(f"{s.tokens}x{s.out_features}x{s.in_features}" for s in shapes))


if __name__ == "__main__":
    print(sizes_of(GPU_SET) if sys.argv[1:] == ["--gpu-set"] else "\n".join(table()))
