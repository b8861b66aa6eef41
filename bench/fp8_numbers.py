"""`python -m bench fp8_numbers`: how far products in fp8 are off, and bytes that ranks send, as tables."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases.scaled_ranks import apart_from_one_rank, bytes_of
from tests.ranks import RankPool
from tpkernels import Recipe, ops

TOKENS, IN, OUT, FEW = 256, 1024, 512, 8
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "rowwise": Recipe.rowwise(),
    "+power_of_two": Recipe.rowwise(power_of_two=True),
    "+wgrad=fp8": Recipe.rowwise(wgrad="fp8"),
    "+wgrad=fp8+gradients=e5m2": Recipe.rowwise(wgrad="fp8", gradients="e5m2"),
    "blockwise": Recipe.blockwise(),
    "blockwise+power_of_two": Recipe.blockwise(power_of_two=True),
}


def _few_times(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(x: Tensor) -> Tensor:
        x[:, :FEW] *= factor
        return x

    return scaled


def _zero_rows(x: Tensor) -> Tensor:
    x[::2] = 0
    return x


def _log_normal(x: Tensor) -> Tensor:
    return x * torch.exp(2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)))


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of x and of dy; weights are normal
    "normal": lambda x: x,
    "log-normal sizes": _log_normal,
    "8 features times 100": _few_times(1e2),
    "8 features times 100,000": _few_times(1e5),
    "every second row zero": _zero_rows,
    "rows of 1e30": lambda x: x * 1e30,
    "rows of 1e-30": lambda x: x * 1e-30,
    "rows of 1e-40": lambda x: x * 1e-40,
}


def matrix(name: str, rows: int, cols: int, seed: int = 0) -> Tensor:
    """fp32"""
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return DISTRIBUTIONS[name](normal)


def relative_errors(name: str, recipe: Recipe | None, dtype: torch.dtype) -> dict[str, float]:
    """‖fp8 - exact‖ / ‖exact‖ of y, dx and dw, with the exact products of the same inputs in float64."""
    x, dy = (matrix(name, TOKENS, cols, seed).to(dtype) for seed, cols in ((0, IN), (1, OUT)))
    weight = (matrix("normal", OUT, IN, 2) / IN**0.5).to(dtype)
    if "times" in name:  # what they do to the other features: weights leave them out
        weight[:, :FEW] = 0
        weight[:FEW] = 0
    if "rows of" in name:  # dw of both were too large or too small for the dtype
        dy_of_dw = matrix("normal", TOKENS, OUT, 1).to(dtype)
    else:
        dy_of_dw = dy
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y = ops.linear(*leaves, quantize=recipe)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (dw,) = torch.autograd.grad(y, weight, dy_of_dw)
    wide_x, wide_w, wide_dy = (t.detach().double() for t in (x, weight, dy))
    exact = {"y": wide_x @ wide_w.t(), "dx": wide_dy @ wide_w, "dw": dy_of_dw.double().t() @ wide_x}
    return {
        result: float((ours.double() - exact[result]).norm() / exact[result].norm())
        for result, ours in (("y", y.detach()), ("dx", dx), ("dw", dw))
    }


def row_of(name: str) -> str:
    cells = []
    for recipe in RECIPES.values():
        found = relative_errors(name, recipe, torch.bfloat16)
        cells.append(" / ".join(f"{100 * found[result]:.1f}" for result in ("y", "dx", "dw")))
    return f"| {name} | {' | '.join(cells)} |"


def head_errors(name: str, sure: float) -> dict[str, float]:
    """Of a head of Llama 3's vocabulary, with a recipe of RECIPES, against float64.

    sure: by how much the logits of targets are raised; others are normal
    """
    tokens, features, vocab, generator = 32, 256, 128256, torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, features, generator=generator).to(torch.bfloat16)
    target = torch.randint(vocab, (tokens,), generator=generator)
    hidden = torch.randn(tokens, features, generator=generator) / features**0.5
    hidden = (hidden + sure * weight[target] / features).to(torch.bfloat16)
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    exact = (wide[0] @ wide[1].t()).log_softmax(1).gather(1, target[:, None])[:, 0]
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    assert dist.group.WORLD is not None
    found, _ = ops.linear_logprobs(hidden, weight, target, dist.group.WORLD, quantize=RECIPES[name])
    of_logprobs = (found.detach() - exact.detach()).abs()
    errors = {"rms": float(of_logprobs.square().mean().sqrt()), "most": float(of_logprobs.max())}
    exact.sum().backward()
    found.sum().backward()
    for result, ours, truth in zip(("dhidden", "dweight"), leaves, wide, strict=True):
        assert ours.grad is not None
        assert truth.grad is not None
        errors[result] = float((ours.grad.double() - truth.grad).norm() / truth.grad.norm())
    return errors


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    """It takes no options."""


def main(options: Namespace) -> int:
    print(f"| x and dy | {' | '.join(RECIPES)} |\n|{'---|' * (1 + len(RECIPES))}")
    for name in DISTRIBUTIONS:
        print(row_of(name), flush=True)
    with RankPool(2) as ranks2, RankPool(4) as ranks4:
        print_distance_from_one_rank([ranks2, ranks4])
        print_bytes(ranks2)
    with RankPool(1) as alone:
        print_heads(alone)
    return 0


def print_heads(pool: RankPool) -> None:
    print("\n| targets | recipe | log p, rms | log p, most | dhidden | dweight |\n|---|---|---|---|---|---|")
    names = ["bf16", "rowwise", "+wgrad=fp8+gradients=e5m2", "blockwise"]
    for (targets, sure), name in product((("any", 0.0), ("probable", 16.0)), names):
        (found,) = pool.run(head_errors, name, sure)
        cells = f"{found['rms']:.3f} | {found['most']:.3f} | {100 * found['dhidden']:.1f} | "
        print(f"| {targets} | {name} | {cells}{100 * found['dweight']:.1f} |", flush=True)


def print_distance_from_one_rank(pools: Sequence[RankPool]) -> None:
    results = [f"{op} {result}" for op in ("column", "row") for result in ("y", "dx", "dw")]
    print(f"\n| recipe | TP | {' | '.join(results)} |\n|{'---|' * 8}")
    for recipe, pool in product(("rowwise", "blockwise"), pools):
        found = pool.run(apart_from_one_rank, Recipe.named(recipe))[0]
        cells = " | ".join(f"{100 * found[result]:.2f}" for result in results)
        print(f"| {recipe} | {pool.world_size} | {cells} |", flush=True)


def print_bytes(pool: RankPool) -> None:
    print("\n| hidden | recipe | gathers | reduce-scatters |\n|---|---|---|---|")
    for hidden in (64, 256, 1024, 4096):
        (plain, *_) = pool.run(bytes_of, hidden, None)
        for recipe in ("rowwise", "blockwise"):
            (sent, *_) = pool.run(bytes_of, hidden, Recipe.named(recipe))
            to_plain = {
                kind: {f"{sent[name] / plain[name]:.3f}" for name in sent if kind in name}
                for kind in (" gather", "reduce-scatter")
            }
            cells = " | ".join(", ".join(sorted(ratios)) for ratios in to_plain.values())
            print(f"| {hidden} | {recipe} | {cells} |", flush=True)
