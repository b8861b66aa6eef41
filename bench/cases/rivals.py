"""Fused kernels of ours against the same by a library's product and one pass behind, and by torch's chain.

What a training step asks for: pre-activations are kept, and the bias gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.case import Case, Work
from bench.shapes import Shape
from tpkernels.dispatch import one_pass, primitives
from tpkernels.dispatch.products import PRODUCTS
from tpkernels.dispatch.record import Layer, Library

RIVALS: dict[str, Sequence[Library]] = {
    "linear": (one_pass.LINEAR,),
    "glu": (one_pass.GLU, one_pass.WIDE_GLU),
    "dgrad_act": (one_pass.DGRAD_ACT,),
    "dglu": (one_pass.DGLU,),
}


@dataclass(frozen=True, slots=True)
class RandomLayer(Layer):
    device: str = "cpu"

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made: Tensor = torch.randn(shape, device=self.device) / shape[-1] ** 0.5
        return made.to(dtype or self.dtype)


def step_of(shape: Shape) -> str | None:
    """What is fused into this layer's product: of an MLP, up forward and down backward."""
    gated = shape.model.gated
    return {"fc_up": "glu" if gated else "linear", "fc_down": "dglu" if gated else "dgrad_act"}.get(
        shape.layer
    )


def case_of(shape: Shape, dtype: torch.dtype, device: str) -> Case:
    step = step_of(shape)
    assert step is not None, "nothing is fused into this layer's product"
    record, sizes = PRODUCTS[step], (shape.tokens, shape.out_features, shape.in_features)
    layer = RandomLayer(*sizes, dtype, "gelu_tanh", "swiglu", device=device)
    arguments = record.sample(layer)
    if step == "glu":
        x, *_, kind, keep = arguments
        whole = replace(layer, out_features=2 * layer.out_features).weight()
        arguments = (x, *whole.chunk(2), kind, keep)
    ways = {
        "ours": getattr(primitives, step),
        "naive": record.by_torch,
        "fused": record.by_kernel,
        **{library.name: library.run for library in RIVALS[step]},
    }
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    results = [each for each in record.by_torch(*arguments) if each is not None]
    return Case(
        Work(
            op=f"fused_{step}",
            shape=str(shape),
            pass_="forward" if step in ("linear", "glu") else "dgrad",
            naive="a chain of torch",
            dtype=dtype,
            device=device,
            flops=shape.flops * (2 if step == "glu" else 1),
            bytes=sum(each.nbytes for each in (*tensors, *results)),
        ),
        {name: _way(way, arguments) for name, way in ways.items()},
    )


def _way(
    way: Callable[..., Sequence[Tensor | None]], arguments: Sequence[object]
) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        with torch.no_grad():
            return [each for each in way(*arguments) if each is not None]

    return run
