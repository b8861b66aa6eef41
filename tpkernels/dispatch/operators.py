"""Functions that torch.compile sees as one operator, and that eager code calls as they are.

An operator returns as many tensors whatever its arguments, so those that may lack some return a list.
Compiled code runs without autocast; whoever calls it casts what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

LIBRARY = __name__.partition(".")[0]  # a copy under another name has operators of its own


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define the operator `tpkernels::name`, which computes what `run` does; return it.

    schema: of flat arguments, one for each parameter of `run` and `fake`, and of results: "-> Tensor",
        "-> (Tensor, Tensor)", or "-> Tensor[]" for those that are not None
    run: changes no input
    fake: of the same arguments, tensors of the same shapes and dtypes
    """
    qualified = f"{LIBRARY}::{name}"
    kind = _only if schema.endswith("-> Tensor") else list if schema.endswith("-> Tensor[]") else tuple
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd", lambda *args: kind(_given(run, args)))
    torch.library.register_fake(qualified, lambda *args: kind(_given(fake, args)))

    def refuse(*_: object) -> NoReturn:  # else torch warns, and gives none
        raise RuntimeError(f"{qualified}: expected no gradient of an operator under torch.compile, got one")

    torch.library.register_autograd(qualified, refuse)
    overload: Callable[..., Any] = getattr(getattr(torch.ops, LIBRARY), name).default
    return overload


def _only(results: list[Tensor]) -> Tensor:
    (result,) = results
    return result


def _given(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a function gives, each once, as an operator must."""
    with torch.no_grad():  # what is below the dispatcher is not recorded, whatever requires a gradient
        results = function(*args)
    found: list[Tensor] = []
    for result in (results,) if isinstance(results, Tensor) else results:
        if result is not None:
            twice = any(result is other for other in found)
            found.append(result.clone() if twice else result.contiguous())
    return found


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents, which do not show in `requires_grad`."""
    return forward_ad._current_level >= 0


def refuse_forward_mode(name: str) -> None:
    """Raise if tensors may carry tangents, which operators drop without a word."""
    if in_forward_mode():
        raise NotImplementedError(
            f"{name}: expected no forward-mode derivative (jvp) under torch.compile, got one; use "
            "reverse mode, or torch's own layers"
        )
