"""The options that all layers share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, TypedDict, TypeVar, cast

import torch
from typing_extensions import Unpack as Unpack  # Python 3.11; torch needs it, too

from tpkernels.layers.world import State
from tpkernels.ops.quantize import Recipe


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What all layers of a model share; a layer takes it as `options`, and each field as a keyword, too.

    sequence_parallel: tokens (dimension 0) are sharded between products; no effect on one rank
    state: the tensor-parallel group: a ParallelState, process group or device mesh; None: the current state
    device, dtype: of the parameters
    perform_initialization: draw the weight; False: draw nothing, allocate the shard only, and fill it with
        NaN until it is loaded
    gradient_accumulation_fusion: add the weight's gradient to `weight.main_grad`
    overlap: transfer some chunks while others are computed
    quantize: compute the products in fp8, by a `Recipe`; the weight keeps its dtype
    tp_invariant: segments of TP-invariance, of all ranks; 0: without it; None: as `tpkernels.tp_invariant`
        says when the layer is built

    `gradient_accumulation_fusion`, `overlap` and `quantize` are of layers with products,
    `perform_initialization` of those with split weights: other layers take no such keyword, and have no use
    for the field.
    """

    sequence_parallel: bool = False
    state: State = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    perform_initialization: bool = True
    gradient_accumulation_fusion: bool = False
    overlap: bool = True
    quantize: Recipe | None = None
    tp_invariant: int | None = None

    def __repr__(self) -> str:
        found = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return f"LayerOptions({', '.join(f'{n}={v!r}' for n, (v, usual) in found.items() if v != usual)})"


class ReplicatedOptions(TypedDict, total=False):
    """Keywords of a layer whose parameters are replicated."""

    sequence_parallel: bool
    state: State
    device: torch.device | str | None
    dtype: torch.dtype | None
    tp_invariant: int | None


class SplitOptions(ReplicatedOptions, total=False):
    """Keywords of a layer with split weights."""

    perform_initialization: bool


class LinearOptions(SplitOptions, total=False):
    """Keywords of a layer with products."""

    gradient_accumulation_fusion: bool
    overlap: bool
    quantize: Recipe | None


DEFAULT = LayerOptions()
Init = TypeVar("Init", bound=Callable[..., None])


def takes(keywords: Any) -> Callable[[Init], Init]:
    """Make an `__init__` with an argument `options` take some fields of it as keywords, too.

    keywords: a TypedDict of these fields; for type checkers `__init__` unpacks the same in its signature
    """
    names: frozenset[str] = keywords.__optional_keys__
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields(LayerOptions)
        if f.name in names
    ]

    def decorate(init: Init) -> Init:
        own = inspect.signature(init)
        *first, last, _ = own.parameters.values()  # the last are `options`, and the keywords together
        signature = own.replace(parameters=[*first, *shared, last])

        @wraps(init)
        def with_options(*args: Any, options: LayerOptions = DEFAULT, **given: Any) -> None:
            if unknown := given.keys() - signature.parameters.keys():
                layer = type(args[0]).__name__
                if "config" in unknown:
                    raise TypeError(
                        f"{layer}: expected keywords or options=LayerOptions(...), got config=: layers that "
                        "take Megatron's ModelParallelConfig are in tpkernels.interop.megatron_core "
                        "(docs/megatron.md#our-layers-inside-megatron-core)"
                    )
                raise TypeError(f"{layer}.__init__() got an unexpected keyword argument {min(unknown)!r}")
            fields_given = {name: given.pop(name) for name in names & given.keys()}
            init(*args, **given, options=replace(options, **fields_given))

        vars(with_options)["__signature__"] = signature
        return cast("Init", with_options)

    return decorate
