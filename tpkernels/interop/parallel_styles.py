"""torch's parallel styles computed by tpkernels' ops, for plans of torch's `parallelize_module`.

    style               module                      input_layouts                   output_layouts
    ColwiseParallel     nn.Linear                   Replicate, tokens, features     features, Replicate
    RowwiseParallel     nn.Linear                   features, Replicate             Replicate, tokens
    RowwiseParallel     nn.Embedding                Replicate                       Replicate, tokens
    SequenceParallel    nn.LayerNorm, nn.RMSNorm    tokens                          tokens

Features are Shard(-1), the last dimension; tokens are Shard(d) of any other, which the ranks must divide.
Other layouts are errors. Inputs are local tensors of the style's layout, or DTensors.

As with torch's styles, parameters become DTensors under their old names; a module stays the same object, of a
subclass of its type. Gradients are complete after backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from tpkernels import ops
from tpkernels.interop.parallelize.guards import refuse_tp_invariance
from tpkernels.layers.world import TensorWorld, tensor_world
from tpkernels.ops.tensor_parallel.mappings import gather_from_region, scatter_to_region

FEATURES = Shard(-1)
_LAYOUTS = (Shard, Replicate)


class _Style(ParallelStyle):
    """How the input and the output of a module are laid out."""

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        super().__init__()
        for what, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if type(layout) not in _LAYOUTS:
                raise self.refusal(what, layout, "Replicate() or Shard(dim)")
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def refusal(self, what: str, got: object, expected: str) -> ValueError:
        """Return an error that says what to do instead."""
        return ValueError(
            f"{type(self).__name__}: {what}: expected {expected}, got {got}; redistribute it outside of the "
            "module, or use torch's own style for this module: a plan may have both"
        )

    def take(
        self, module: nn.Module, mesh: DeviceMesh, kind: type[_Styled], split: dict[str, int]
    ) -> nn.Module:
        """Distribute the parameters, and change the module's class to `kind`.

        split: the dimension along which each parameter is split; other parameters are replicated
        """
        name = type(self).__name__
        refuse_tp_invariance(name)
        if mesh.ndim != 1:
            raise ValueError(f"{name}: expected a mesh of one dimension, such as mesh['tp'], got {mesh}")
        world = tensor_world(mesh)
        for short, parameter in list(module.named_parameters()):
            if isinstance(parameter, DTensor):
                raise ValueError(f"{name}: '{short}' of {module} is a DTensor already: give it one style")
            dim = split.get(short)
            if dim is not None and parameter.shape[dim] % world.size and kind is not RowwiseEmbedding:
                raise ValueError(
                    f"{name}: expected features that the {world.size} ranks divide, got {module}; use "
                    "torch's own style for it: a plan may have both"
                )
            placement = Replicate() if dim is None else Shard(dim)
            held = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(short, nn.Parameter(held, requires_grad=parameter.requires_grad))
        module.__class__ = kind
        assert isinstance(module, _Styled)
        module.style, module.world = self, world
        return module


class ColwiseParallel(_Style):
    """Splits the output features of an nn.Linear; takes torch's arguments."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or FEATURES, use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_type(self, module, nn.Linear)
        return self.take(module, device_mesh, ColwiseLinear, {"weight": 0, "bias": 0})


class RowwiseParallel(_Style):
    """Splits the input features of an nn.Linear or the rows of an nn.Embedding; takes torch's arguments."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or FEATURES, output_layouts or Replicate(), use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_type(self, module, nn.Linear, nn.Embedding)
        if not isinstance(module, nn.Embedding):
            return self.take(module, device_mesh, RowwiseLinear, {"weight": 1})
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ValueError(
                "RowwiseParallel: expected an nn.Embedding without max_norm, scale_grad_by_freq and sparse, "
                f"got {module}"
            )
        if not isinstance(self.input_layouts, Replicate):
            raise self.refusal("input_layouts", self.input_layouts, "Replicate() for an nn.Embedding")
        return self.take(module, device_mesh, RowwiseEmbedding, {"weight": 0})


class SequenceParallel(_Style):
    """Lets an nn.LayerNorm or nn.RMSNorm compute this rank's tokens; takes torch's arguments."""

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(Shard(sequence_dim), Shard(sequence_dim), use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_type(self, module, nn.LayerNorm, nn.RMSNorm)
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if len(module.normalized_shape) != 1 or module.weight is None:
            raise ValueError(
                f"SequenceParallel: expected a norm over one dimension that has a weight, got {module}; use "
                "torch's own style for it: a plan may have both"
            )
        kind = TokenLayerNorm if isinstance(module, nn.LayerNorm) else TokenRMSNorm
        return self.take(module, device_mesh, kind, {})


class _Styled(nn.Module):
    """Base class of modules that a style has distributed."""

    style: _Style
    world: TensorWorld

    def local(self, name: str) -> Tensor | None:
        """Return this rank's local tensor of a parameter."""
        parameter: Tensor | None = self._parameters[name]
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    @property
    def weight_shard(self) -> Tensor:
        """This rank's shard of the weight."""
        weight = self.local("weight")
        assert weight is not None
        return weight

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the weight is distributed over."""
        weight: object = self._parameters["weight"]
        assert isinstance(weight, DTensor)
        return weight.device_mesh

    def taken(self, x: Tensor) -> tuple[Tensor, Placement]:
        """Return this rank's local tensor of the input, and its layout."""
        layout = self.style.input_layouts
        if isinstance(x, DTensor):
            layout = x.placements[0]
            if type(layout) not in _LAYOUTS:  # a partial sum
                layout = Replicate()
            x = x.redistribute(self.mesh, [layout]).to_local()
        return x, self.layout_of("input_layouts", layout, x.ndim)

    def layout_of(self, what: str, layout: Placement, ndim: int) -> Placement:
        """Normalize a layout: features to Shard(-1), tokens to Shard(0) or more."""
        if not isinstance(layout, Shard):
            return layout
        if not -ndim <= layout.dim < ndim:
            raise self.style.refusal(what, layout, f"a dimension of a tensor that has {ndim}")
        return FEATURES if layout.dim % ndim == ndim - 1 else Shard(layout.dim % ndim)

    def summed(self, op: Callable[[Tensor, bool], Tensor], x: Tensor, ndim: int) -> Tensor:
        """Compute op(x, sequence_parallel) for an output of `ndim` dimensions, full or this rank's tokens."""
        layout = self.layout_of("output_layouts", self.style.output_layouts, ndim)
        if layout == FEATURES:
            raise self.style.refusal("output_layouts", layout, "Replicate() or Shard of another dimension")
        if isinstance(layout, Shard):
            return self.returned(op(x.movedim(layout.dim, 0), True).movedim(0, layout.dim))
        return self.returned(op(x, False))

    def returned(self, y: Tensor) -> Tensor:
        """Return the output in the style's form: a local tensor, or a DTensor."""
        if self.style.use_local_output:
            return y
        return DTensor.from_local(y, self.mesh, [self.style.output_layouts], run_check=False)


class ColwiseLinear(_Styled, nn.Linear):
    """An nn.Linear that `ColwiseParallel` has distributed."""

    def forward(self, input: Tensor) -> Tensor:
        x, layout = self.taken(input)
        output_layout = self.layout_of("output_layouts", self.style.output_layouts, x.ndim)
        if isinstance(output_layout, Shard) and output_layout != FEATURES:
            raise self.style.refusal("output_layouts", output_layout, "Shard(-1) or Replicate()")
        group = self.world.group
        if layout == FEATURES:
            x, layout = gather_from_region(x, group), Replicate()
        tokens = layout.dim if isinstance(layout, Shard) else None
        y = ops.column_linear(
            x if tokens is None else x.movedim(tokens, 0),
            self.weight_shard,
            self.local("bias"),
            group,
            sequence_parallel=tokens is not None,
        )
        if tokens is not None:
            y = y.movedim(0, tokens)
        return self.returned(y if output_layout == FEATURES else gather_from_region(y, group))


class RowwiseLinear(_Styled, nn.Linear):
    """An nn.Linear that `RowwiseParallel` has distributed."""

    def forward(self, input: Tensor) -> Tensor:
        x, layout = self.taken(input)
        group = self.world.group
        if isinstance(layout, Replicate):
            x = scatter_to_region(x, group)
        elif layout != FEATURES:
            raise self.style.refusal("input_layouts", layout, "Shard(-1) or Replicate()")

        def product(x: Tensor, tokens: bool) -> Tensor:
            return ops.row_linear(
                x, self.weight_shard, self.local("bias"), group, sequence_parallel=tokens, tp_invariant=0
            )

        return self.summed(product, x, x.ndim)


class RowwiseEmbedding(_Styled, nn.Embedding):
    """An nn.Embedding that `RowwiseParallel` has distributed."""

    def forward(self, input: Tensor) -> Tensor:
        ids, layout = self.taken(input)
        if not isinstance(layout, Replicate):
            raise self.style.refusal("input_layouts", layout, "Replicate() for an nn.Embedding")
        rows = -(-self.num_embeddings // self.world.size)

        def look_up(ids: Tensor, tokens: bool) -> Tensor:
            weight = self.weight_shard
            return ops.vocab_embedding(
                ids,
                F.pad(weight, (0, 0, 0, rows - len(weight))) if len(weight) < rows else weight,
                self.world.group,
                sequence_parallel=tokens,
                padding_idx=self.padding_idx,
                vocab_size=self.num_embeddings,
            )

        return self.summed(look_up, ids, ids.ndim + 1)


class TokenLayerNorm(_Styled, nn.LayerNorm):
    """An nn.LayerNorm that `SequenceParallel` has distributed."""

    def forward(self, input: Tensor) -> Tensor:
        x, group = _own_tokens(self, input), self.world.group
        y = ops.layer_norm(
            x, self.weight_shard, self.local("bias"), eps=self.eps, group=group, tp_invariant=0
        )
        return self.returned(y)


class TokenRMSNorm(_Styled, nn.RMSNorm):
    """An nn.RMSNorm that `SequenceParallel` has distributed."""

    def forward(self, x: Tensor) -> Tensor:
        x = _own_tokens(self, x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return self.returned(
            ops.rms_norm(x, self.weight_shard, eps=eps, group=self.world.group, tp_invariant=0)
        )


def _own_tokens(module: _Styled, x: Tensor) -> Tensor:
    layout = module.layout_of("sequence_dim", module.style.input_layouts, x.ndim)
    if layout == FEATURES:
        raise module.style.refusal("sequence_dim", layout, "another dimension than the last")
    return x.redistribute(module.mesh, [layout]).to_local() if isinstance(x, DTensor) else x


def _require_type(style: _Style, module: nn.Module, *expected: type[nn.Module]) -> None:
    """Raise unless the type is exactly one of these: a subclass may compute something else."""
    if type(module) not in expected or "forward" in vars(module):
        names = " or ".join(f"nn.{kind.__name__}" for kind in expected)
        raise TypeError(
            f"{type(style).__name__}: expected an {names} with its own forward, got {type(module).__name__}; "
            "use torch's own style for it: a plan may have both"
        )
