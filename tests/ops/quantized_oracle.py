"""Fp8 by its definition, in float64: nothing of the code under test, and no dtype of torch's with 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels import Recipe

BLOCK = 128
FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # bits of mantissa, least exponent, largest
RECIPES = {
    "rowwise": Recipe.rowwise(),
    "rowwise, power of two": Recipe.rowwise(power_of_two=True),
    "rowwise, wgrad fp8": Recipe.rowwise(wgrad="fp8"),
    "rowwise, wgrad fp8, e5m2": Recipe.rowwise(wgrad="fp8", gradients="e5m2"),
    "blockwise": Recipe.blockwise(),
    "blockwise, power of two, e5m2": Recipe.blockwise(power_of_two=True, gradients="e5m2"),
}


def rounded(x: Tensor, format: str) -> Tensor:
    """To the nearest number of the format; to the one with an even mantissa between two. x: float64"""
    bits, least, largest = FORMATS[format]
    exponent = (torch.frexp(x).exponent - 1).clamp(min=least)
    step = torch.exp2((exponent - bits).double())
    return (torch.round(x / step) * step).clamp(-largest, largest)


def scale_of(amax: Tensor, format: str, power_of_two: bool) -> Tensor:
    """amax: float64, of fp32 numbers"""
    scale = (amax / FORMATS[format][2]).float().double().clamp(min=2.0**-126)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.where(mantissa == 0.5, scale, torch.exp2(exponent.double()))
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(amax.isfinite(), scale, torch.nan)


def quantized(x: Tensor, format: str, recipe: Recipe, square: bool = False) -> Tensor:
    """x as fp8 holds it, with scales along its rows: float64."""
    x = x.double()
    columns = BLOCK if recipe.scaling == "blocks" else max(1, x.shape[1])
    rows = BLOCK if square else max(1, x.shape[0])
    result = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for k in range(0, x.shape[1], columns):
            block = x[i : i + rows, k : k + columns]
            amax = block.abs().max() if square else block.abs().amax(1, keepdim=True)
            scale = scale_of(amax, format, recipe.power_of_two)
            # a quotient of two numbers of fp32 that is rounded to float64 and then to fp32 is rounded right
            result[i : i + rows, k : k + columns] = rounded((block / scale).float().double(), format) * scale
    return result


@dataclass(frozen=True)
class Oracle:
    """The products of a recipe: operands as fp8 holds them, multiplied in float64."""

    recipe: Recipe

    def activations(self, x: Tensor) -> Tensor:
        return quantized(x, "e4m3", self.recipe)

    def gradients(self, dy: Tensor) -> Tensor:
        return quantized(dy, self.recipe.gradients, self.recipe)

    def weight(self, weight: Tensor) -> Tensor:
        return quantized(weight, "e4m3", self.recipe, self.recipe.scaling == "blocks")

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        z = self.activations(x) @ self.weight(weight).t()
        return z if bias is None else z + bias.double()

    def dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
        return self.gradients(dy) @ self.weight(weight.t()).t()

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        if self.recipe.wgrad == "bf16":
            return dy.double().t() @ x.double()
        return self.gradients(dy.t()) @ self.activations(x.t()).t()
