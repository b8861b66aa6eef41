"""RMSNorm and LayerNorm as layers, with parameters that are replicated on every rank.

Under sequence parallelism each rank normalises its own tokens, so that its gradients are partial: the
parameters' attribute `sequence_parallel` says so, and `finalize_gradients` sums them. With TP-invariance the
norm itself sums them in backward, before they are rounded, and the parameters are not marked.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from tpkernels import ops
from tpkernels.groups.sizes import positive
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.options import DEFAULT, LayerOptions, ReplicatedOptions, Unpack, takes
from tpkernels.layers.parallel_module import MarkedModule
from tpkernels.layers.world import tensor_world
from tpkernels.ops.local.norm import NormKind
from tpkernels.tp_invariance import given_or_default


class _Norm(MarkedModule):
    """Base class: parameters of the size of a token's features."""

    weight: nn.Parameter
    kind: ClassVar[NormKind]

    @takes(ReplicatedOptions)
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        options: LayerOptions = DEFAULT,
        **_: Unpack[ReplicatedOptions],
    ) -> None:
        super().__init__()
        self.hidden_size = positive(hidden_size, "hidden_size")
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps: expected a number of 0 or more, got {eps}")
        self.eps = eps
        self.sequence_parallel = options.sequence_parallel
        self.tp_invariant = given_or_default(options.tp_invariant)
        sums_in_backward = options.sequence_parallel and self.tp_invariant
        self.world = tensor_world(options.state, self.tp_invariant) if sums_in_backward else None
        marked = Attributes(sequence_parallel=options.sequence_parallel and self.world is None)
        self.add_parameter("weight", (hidden_size,), marked, device=options.device, dtype=options.dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        if (bias := self._parameters.get("bias")) is not None:
            nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        said = "".join(f", bias={p is not None}" for name, p in self._parameters.items() if name == "bias")
        return f"{self.hidden_size}, eps={self.eps}{said}, sequence_parallel={self.sequence_parallel}"


class RMSNorm(_Norm):
    """Normalizes x by its root mean square over the last dimension: x / rms(x) * weight.

    sequence_parallel: x is this rank's tokens
    state: the tensor-parallel group, looked up with TP-invariance only; None: the current state
    """

    kind = "rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (..., hidden_size)."""
        group = None if self.world is None else self.world.group
        return ops.rms_norm(x, self.weight, eps=self.eps, group=group, tp_invariant=self.tp_invariant)


class LayerNorm(_Norm):
    """Normalizes x to zero mean and unit variance over the last dimension; returns it times weight plus bias.

    sequence_parallel, state: as in `RMSNorm`
    """

    bias: nn.Parameter | None
    kind = "layer_norm"

    @takes(ReplicatedOptions)
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        options: LayerOptions = DEFAULT,
        **_: Unpack[ReplicatedOptions],
    ) -> None:
        super().__init__(hidden_size, eps, options=options)
        shape, marked = (hidden_size,) if bias else None, Attributes.of(self.weight)
        self.add_parameter("bias", shape, marked, device=options.device, dtype=options.dtype)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (..., hidden_size)."""
        group = None if self.world is None else self.world.group
        return ops.layer_norm(
            x, self.weight, self.bias, eps=self.eps, group=group, tp_invariant=self.tp_invariant
        )


def norm_for_op(norm: nn.Module, *, sequence_parallel: bool, tp_invariant: int) -> ops.Norm | None:
    """Return a norm as an op takes it that ends in it; None if it is to be called.

    That is if its class is not one of these, if hooks or wrappers hang on it, or if it sums gradients
    otherwise than an op with these options.
    """
    if type(norm) not in (RMSNorm, LayerNorm) or not is_bare(norm):
        return None
    assert isinstance(norm, _Norm)
    if (norm.sequence_parallel, norm.tp_invariant) != (sequence_parallel, tp_invariant):
        return None
    if type(norm.weight) is not nn.Parameter:  # `fully_shard` has it
        return None
    return ops.Norm(norm.weight, norm._parameters.get("bias"), norm.eps, norm.kind)


def is_bare(module: nn.Module, *, called: bool = False) -> bool:
    """Whether nothing sees what a module returns, nor, unless it is called, what it is given."""
    seen = module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
    return not any(seen) and "forward" not in vars(module) and (called or not module._forward_pre_hooks)
