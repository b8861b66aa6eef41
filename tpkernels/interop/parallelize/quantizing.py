"""Which products of a split model are computed in fp8.

nn.Linear that is split as column, row or row_of_full, shared heads    yes
the head: an output that is gathered, or as wide as the vocabulary     with `Recipe(..., head=True)`
a layer with LoRA                                                      yes, and its factors no
experts in one parameter, embeddings, what every rank keeps            no
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tpkernels.interop.parallelize.hf_modules import oriented_shape
from tpkernels.interop.parallelize.lora import is_factor
from tpkernels.interop.parallelize.swaps import Swap, Work
from tpkernels.interop.parallelize.vocabulary import tables
from tpkernels.ops.quantize import Recipe

PRODUCTS = ("column", "row", "row_of_full", "shared_heads", "head")


def quantizable(model: nn.Module, work: Work, recipe: Recipe) -> list[str]:
    """Names of the layers, before they are replaced; an error if there are none."""
    named = [swap.old for swap in work.swaps if swap.kind in ("embedding", "table")]
    weights = [getattr(table, "weight", None) for table in [*tables(model), *named]]
    vocabularies = {weight.shape[0] for weight in weights if isinstance(weight, Tensor)}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]

    def is_head(swap: Swap) -> bool:
        inside = any(swap.name.startswith(f"{name}.") for name in lists)  # of layers, which may be as wide
        wide = swap.kind == "column" and not inside and oriented_shape(swap.old)[0] in vocabularies
        return swap.kind == "head" or wide

    names = [
        swap.name
        for swap in work.swaps
        if swap.kind in PRODUCTS
        and not isinstance(swap.old, nn.Embedding)
        and not is_factor(model, swap.name)
        and (recipe.head or not is_head(swap))
    ]
    if not names:
        raise ValueError(
            "quantize: expected a plan that splits linear layers besides the head, got one that does not; "
            "leave out quantize"
        )
    return names


def quantize_products(model: nn.Module, names: list[str], recipe: Recipe) -> None:
    """After the layers were replaced."""
    for name in names:
        layer: Any = model.get_submodule(name)
        layer.quantize = recipe
