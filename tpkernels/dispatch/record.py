"""Records of primitives: computations on local tensors, by torch or by a kernel of ours.

Whatever knows a primitive reads its record: `primitives`, through which it is called, the compiler, the
chooser and the gate. To add one, write a kernel and a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from tpkernels.kernels.operands import are_halves

if TYPE_CHECKING:
    from tpkernels.dispatch.problem import Problem
    from tpkernels.kernels.activation_names import Activation, Glu
    from tpkernels.kernels.recipe import Format, Scaling
    from tpkernels.kernels.scaled import Scaled
    from tpkernels.kernels.target import Target
    from tpkernels.kernels.tiles import Kernel

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer and what surrounds it: the sizes that samples are made for."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = "none"  # after it in `linear`, before it in `dgrad_act`
    glu: Glu = "swiglu"  # likewise in `glu` and `dglu`
    bias: bool = True
    training: bool = True  # pre-activations are kept for backward
    format: Format = "e4m3"  # of x in fp8; weights are in e4m3
    scaling: Scaling = "rows"
    square: bool = False  # a scale for each 128 x 128 of what a product takes as weight
    fast: bool = False  # tensor cores sum all of the depth of a product in fp8

    def x(self) -> Tensor:
        return self.tensor(self.tokens, self.in_features)

    def dy(self) -> Tensor:
        return self.tensor(self.tokens, self.out_features)

    def weight(self) -> Tensor:
        return self.tensor(self.out_features, self.in_features)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of these sizes, without memory; the gate's layers give it numbers."""
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def integers(self, count: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from low to high - 1."""
        return self.tensor(count, dtype=dtype)

    def scaled(self, rows: int, features: int, format: Format, square: bool = False) -> Scaled:
        """Return a matrix in fp8, by the layer's scaling. square: a weight with a scale for each square"""
        from tpkernels.kernels.scaled import Scaled, words_of

        words = self.tensor(rows, words_of(features, self.scaling), dtype=torch.int32)
        return Scaled(words, features, format, self.scaling)


class Library(NamedTuple):
    """A fused operator of torch that computes some problems."""

    name: str
    run: Callable[..., Any]
    fits: Callable[[Problem, Target], bool]
    into: Callable[..., object] | None = None  # as of a primitive


# how a problem names arguments that are there, or asked for
OPTIONS = {"bias": "bias", "keep_z": "z", "keep_gu": "gu", "bias_grad": "db", "fast_accumulate": "fast"}
SCALES = frozenset(("x_scale", "w_scale"))  # arguments that any layout of is read as fast


@dataclass(frozen=True, eq=False)
class Primitive(Generic[P, R]):
    """2-D tensors in, new tensors out; a result that was not asked for is None.

    by_torch: torch's way, whose signature is the primitive's; derivatives of any order follow it
    by_kernel: ours; takes `tile` and `form`, too, if it has tiles to choose from, and `out` if there is
    `into`
    sample: arguments as a training step would make them, on the meta device
    schema: of its operator, which compiled code calls; it returns a list if `given` may leave some out
    given: which results a call gives; None: always all
    into: torch's way into given tensors, its first argument, without a copy; None: computed, then copied
    pairs: how many products of two matrices, which the arguments begin with, are summed
    fake: what the compiler is told: empty tensors like the results; by_torch unless that looks at numbers
    changes_first: it changes its first argument; compiled code never sees it, so that it has no schema
    kernel: whose tiles are candidates of a choice by timing, with torch and `library`; None: nothing is timed
    takes: if nothing is timed, whether our kernel serves these arguments on a GPU; None: torch does
    oracle: the truth where it is given float64; by_torch unless given
    """

    name: str
    by_torch: Callable[P, R]
    by_kernel: Callable[..., R]
    sample: Callable[[Layer], tuple[Any, ...]]
    schema: str = ""
    given: Callable[P, tuple[bool, ...]] | None = None
    into: Callable[..., object] | None = None
    pairs: int = 1
    fake: Callable[..., R] | None = None
    changes_first: bool = False
    kernel: Kernel | None = None
    library: tuple[Library, ...] = ()
    takes: Callable[..., bool] | None = None
    oracle: Callable[P, R] | None = None

    def problem(self, *args: Any, out: Sequence[Tensor] = (), **kwargs: Any) -> Problem:
        """Return the problem of a call, whose tensors may be on the meta device. out: what it writes into"""
        from tpkernels.dispatch.problem import Problem  # what is timed has problems, on GPUs

        assert self.kernel is not None, "only what has tiles is timed"
        call = signature(self.by_torch).bind(*args, **kwargs).arguments
        matrices = [
            value
            for name, value in call.items()
            if isinstance(value, Tensor) and value.ndim == 2 and name not in SCALES
        ]
        words = [value for value in call.values() if isinstance(value, str)]
        words += [
            OPTIONS[name]
            for name, value in call.items()
            if name in OPTIONS and not (value is None or value is False)
        ]
        if self.kernel == "glu" and are_halves(*matrices[1:3]):
            words.append("halves")  # of one matrix, by which one product multiplies
        if call.keys() >= SCALES:
            words += words_of_scales(matrices[0], matrices[1], call["x_scale"], call["w_scale"])
        if self.changes_first:
            matrices = [*matrices[1:], matrices[0]]
            words.append(str(matrices[-1].dtype).removeprefix("torch."))
        written = [] if self.changes_first else [tensor for tensor in out if tensor.ndim == 2] or None
        return Problem.of(
            self.name,
            self.kernel,
            matrices,
            tuple(words),
            written=written,
            pairs=self.pairs,
            dtype=getattr(torch, call["dtype"]) if "dtype" in call else None,
        )


def words_of_scales(x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor) -> list[str]:
    """Return the words by which problems tell products in fp8 apart."""
    words = [] if weight.dtype == x.dtype else [str(weight.dtype).removeprefix("torch.")]
    words += ["blocks"] * (x_scale.shape[1] != 1)
    return words + ["square"] * (w_scale.shape[0] != weight.shape[0])


def copied_into(compute: Callable[..., Any], out: Sequence[Tensor], *args: Any) -> None:
    """Copy the results of `compute` into given tensors."""
    results = compute(*args)
    results = (results,) if isinstance(results, Tensor) else results
    for tensor, result in zip(out, [result for result in results if result is not None], strict=True):
        tensor.copy_(result)


def launcher(
    module: str,
    function: str,
    *keywords: str,
    always: Mapping[str, object] | None = None,
    gives: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Return a launcher of `kernels`, imported at its first call: a CPU needs no Triton.

    keywords: what it calls the last arguments, which it takes by name; always: more that it is told
    gives: which of its results the primitive has; by default all
    """

    home = cache(partial(import_module, f"tpkernels.kernels.{module}"))
    told = always or {}

    def launch(*args: Any, **tile_and_form: Any) -> Any:
        count = len(args) - len(keywords)
        named = dict(zip(keywords, args[count:], strict=True)) if keywords else {}
        results = getattr(home(), function)(*args[:count], **named, **told, **tile_and_form)
        return tuple(getattr(results, name) for name in gives) if gives else results

    return launch
