"""What ranks run to see that layers compute in fp8 as they are told to, and keep what is not a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.layers.parity import cut, gradient_of
from tests.models.small import CONFIGS, IDS, TARGETS
from tpkernels import (
    GPT,
    ColumnParallelLinear,
    Recipe,
    RowParallelLinear,
    TransformerBlock,
    checkpoint,
    initialize_model_parallel,
)
from tpkernels.comm import schedule
from tpkernels.interop import dcp, safetensors

K, N = 24, 48
OUT = 256  # of a column: each of two ranks has whole blocks of 128 rows, and so the scales of one rank
Parts = dict[str, Tensor]


def whole_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """fp8 rounds most of them, and yet their products add up in fp32 without rounding, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 101, shape, generator=generator).float()


def column(recipe: Recipe | None, sequence_parallel: bool) -> Parts:
    """Of this rank's features; dx of its tokens, if these are split."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    layer = ColumnParallelLinear(
        K, OUT, gather_output=False, sequence_parallel=sequence_parallel, quantize=recipe
    )
    tokens = cut(0) if sequence_parallel else torch.clone
    with torch.no_grad():
        layer.weight.copy_(cut(0)(whole_numbers((OUT, K), 2)))
    x = tokens(whole_numbers((8, 3, K), 1)).requires_grad_()
    y, _ = layer(x)
    y.backward(cut(2)(whole_numbers((8, 3, OUT), 3)))
    return {"y": y.detach(), "dw": layer.weight.grad, "dx": x.grad}


def row(recipe: Recipe | None, sequence_parallel: bool) -> Parts:
    """y of this rank's tokens, if these are split; dx and dw of its features."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    layer = RowParallelLinear(
        N, K, bias=False, input_is_parallel=True, sequence_parallel=sequence_parallel, quantize=recipe
    )
    tokens = cut(0) if sequence_parallel else torch.clone
    with torch.no_grad():
        layer.weight.copy_(cut(1)(whole_numbers((K, N), 2)))
    x = cut(2)(whole_numbers((8, 3, N), 1)).requires_grad_()
    y, _ = layer(x)
    y.backward(tokens(whole_numbers((8, 3, K), 3)))
    return {"y": y.detach(), "dw": layer.weight.grad, "dx": x.grad}


def block(**options: object) -> TransformerBlock:
    torch.manual_seed(5)
    return TransformerBlock(32, 4, num_kv_heads=2, activation="swiglu", bias=False, **options)  # type: ignore[arg-type]


def outcome(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """y, dx, and gradients of the parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(gradient_of(p).clone() for p in layer.parameters())]


def recomputed(recipe: Recipe) -> dict[str, bool]:
    """Whether ways to compute a block again give the bits of the block."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    x = cut(0)(torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1)))
    plain = block(sequence_parallel=True, quantize=recipe)
    expected = outcome(plain, plain, x)
    found = {"checkpoint": outcome(plain, lambda x: checkpoint(plain, x), x)}
    for recompute in ("selective", "full"):
        layer = block(sequence_parallel=True, quantize=recipe, recompute=recompute)
        found[recompute] = outcome(layer, layer, x)
    return {name: all(map(torch.equal, ours, expected)) for name, ours in found.items()}


def compiled(recipe: Recipe, fused: bool) -> float:
    """How far a block that was compiled in one graph is from the block, relative to the largest number."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    layer = block(sequence_parallel=True, quantize=recipe, gradient_accumulation_fusion=fused)
    x = cut(0)(torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(1)))

    def fresh() -> None:
        for parameter in layer.parameters():
            if fused and parameter.ndim == 2:
                parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]

    fresh()
    expected = outcome(layer, layer, x)
    torch._dynamo.reset()
    fresh()
    ours = outcome(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), x)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True))


def saved_and_loaded(folder: str) -> list[str]:
    """What differs between a model in fp8 and one that has loaded its checkpoint without."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    ours = GPT(CONFIGS["llama"], quantize=Recipe.rowwise(head=True))
    dcp.save(folder, ours)
    torch.manual_seed(4)
    plain = GPT(CONFIGS["llama"])
    dcp.load(folder, plain)
    return unlike(ours, plain)


def unlike(ours: nn.Module, other: nn.Module) -> list[str]:
    pairs = zip(ours.state_dict().items(), other.state_dict().items(), strict=True)
    return [name for (name, a), (word, b) in pairs if name != word or not torch.equal(a, b)]


def written_and_read(path: str) -> list[str]:
    """The same by a file of safetensors."""
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(3)
    ours = GPT(CONFIGS["llama"], quantize=Recipe.rowwise(head=True))
    safetensors.save(path, ours)
    torch.manual_seed(4)
    plain = GPT(CONFIGS["llama"])
    safetensors.load(path, plain)
    return unlike(ours, plain)


def gpt_loss(shape: str, recipe: Recipe | None, dtype: torch.dtype) -> tuple[float, Parts]:
    """And this rank's gradients."""
    schedule.LEAST_BYTES = 64
    initialize_model_parallel(dist.get_world_size())
    torch.manual_seed(4)
    model = GPT(CONFIGS[shape], quantize=recipe, dtype=dtype, sequence_parallel=True)
    loss = model(IDS, TARGETS)
    loss.backward()
    named = {name: gradient_of(p).float() for name, p in model.named_parameters()}
    return float(loss), named
