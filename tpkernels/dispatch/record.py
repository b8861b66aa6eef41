"""Records of primitives: computations on local tensors, by torch or by a kernel of ours.

Calling, compiling, tuning, oracle and gate follow from a record. To add one, write a kernel and a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tpkernels.kernels.activation_names import Activation, Glu
    from tpkernels.kernels.matmul_tile import MatmulTile
    from tpkernels.kernels.operands import Form
    from tpkernels.kernels.recipe import Format, Scaling
    from tpkernels.kernels.scaled import Scaled
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


class Candidate(NamedTuple):
    """A way to compute a primitive, under a name that files and logs know it by."""

    name: str
    run: Callable[..., Any]
    into: Callable[..., object]  # into given tensors, its first argument
    tile: MatmulTile | None = None  # of our kernel


class Library(NamedTuple):
    """A way to compute a primitive by operators of torch."""

    name: str
    run: Callable[..., Any]
    fits: Callable[..., bool] = lambda key, target: True  # whether it computes a `TuneKey` on a `Target`
    into: Callable[..., object] | None = None  # into given tensors, its first argument, without a copy

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.run, self.into or partial(copied_into, self.run))


@dataclass(frozen=True, eq=False)
class Primitive(Generic[P, R]):
    """2-D tensors in, new tensors out; a result that was not asked for is None.

    schema: as torch's, with names for results: "f(Tensor x, bool keep_z) -> y, z if keep_z". Compiled code
        calls an operator of this schema; not if the first argument is changed, "Tensor(a!) x"
    by_torch: torch's form, whose signature is the primitive's; derivatives of any order follow it. Given
        float64 it computes in float64: the oracle
    by_kernel: ours; it takes `tile`, `form` and `out` if it has tiles
    sample: arguments as a training step would make them, on the meta device
    on_gpu: the kernel whose tiles are candidates, timed against torch; or whether ours, untimed, computes
        these arguments
    library: other candidates; that named "torch" says how torch's form writes into given tensors
    fake: empty tensors like the results, for the compiler; by_torch unless that looks at numbers
    """

    schema: str
    by_torch: Callable[P, R]
    by_kernel: Callable[..., R]
    sample: Callable[[Layer], tuple[Any, ...]]
    on_gpu: Kernel | Callable[..., bool]
    library: tuple[Library, ...] = ()
    fake: Callable[..., R] | None = None

    @cached_property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @cached_property
    def kernel(self) -> Kernel | None:
        """The kernel whose tiles are timed; None: nothing is."""
        return None if callable(self.on_gpu) else self.on_gpu

    @cached_property
    def changes_first(self) -> bool:
        """Whether it changes its first argument."""
        return "(a!)" in self.schema

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        listed = self.schema.partition("(")[2].rpartition(") -> ")[0]
        return tuple(parameter.split()[-1] for parameter in listed.split(", "))

    @cached_property
    def flags(self) -> tuple[int | None, ...]:
        """Of each result the position of the argument that asks for it; None: it is always there."""
        results = self.schema.rpartition(") -> ")[2].split(", ")
        asked_by = [result.partition(" if ")[2] for result in results]
        return tuple(self.parameters.index(flag) if flag else None for flag in asked_by)

    @cached_property
    def torch_schema(self) -> str:
        """The schema without names, as torch takes it: a list where results may be missing."""
        count = len(self.flags)
        results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        if any(flag is not None for flag in self.flags):
            results = "Tensor[]"
        return f"{self.schema.removeprefix(self.name).rpartition(' -> ')[0]} -> {results}"

    @cached_property
    def torch(self) -> Candidate:
        """Plain torch."""
        into = next((way.into for way in self.library if way.name == "torch"), None)
        return Library("torch", self.by_torch, into=into).candidate

    def ours(
        self, name: str = "triton", tile: MatmulTile | None = None, form: Form | None = None
    ) -> Candidate:
        """Our kernel, with a tile and form, or with those that it takes untold."""
        run = self.by_kernel if tile is None else partial(self.by_kernel, tile=tile, form=form)
        writes = any(way.name == "torch" and way.into for way in self.library)
        return Candidate(name, run, writing(run) if writes else partial(copied_into, run), tile)


def writing(run: Callable[..., Any]) -> Callable[..., None]:
    """Return a way into given tensors of a function that takes these as `out`."""

    def into(out: Sequence[Tensor], *args: Any) -> None:
        run(*args, out=out)

    return into


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
