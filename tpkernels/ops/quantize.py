"""Recipes of fp8, for whoever builds on ops and does not see kernels."""

from __future__ import annotations

from tpkernels.kernels.recipe import Recipe as Recipe
from tpkernels.ops.quantized.limits import require_recipe as require_recipe
from tpkernels.ops.quantized.weights import reuse_quantized_weights as reuse_quantized_weights
