"""RMSNorm and LayerNorm as layers, with parameters that are replicated on every rank.

Under sequence parallelism each rank normalises its own tokens, so that its gradients are partial: the
parameters' attribute `sequence_parallel` says so, and `finalize_gradients` sums them. With TP-invariance the
norm itself sums them in backward, before they are rounded, and the parameters are not marked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpkernels import ops
from tpkernels.groups.sizes import positive
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import MarkedModule
from tpkernels.layers.world import State, TensorWorld, tensor_world
from tpkernels.tp_invariance import mode


class RMSNorm(MarkedModule):
    """Normalizes x by its root mean square over the last dimension: x / rms(x) * weight.

    sequence_parallel: x is this rank's tokens
    state: the tensor-parallel group, looked up with TP-invariance only; None: the current state
    """

    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        state: State = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = positive(hidden_size, "hidden_size")
        self.eps = _require_eps(eps)
        self.sequence_parallel = sequence_parallel
        self.world = tensor_world(state) if sequence_parallel and mode.fix("a norm") else None
        marked = Attributes(sequence_parallel=sequence_parallel and self.world is None)
        self.add_parameter("weight", (hidden_size,), marked, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (..., hidden_size)."""
        return ops.rms_norm(x, self.weight, eps=self.eps, group=_group(self.world))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(MarkedModule):
    """Normalizes x to zero mean and unit variance over the last dimension; returns it times weight plus bias.

    sequence_parallel, state: as in `RMSNorm`
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        state: State = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = positive(hidden_size, "hidden_size")
        self.eps = _require_eps(eps)
        self.sequence_parallel = sequence_parallel
        self.world = tensor_world(state) if sequence_parallel and mode.fix("a norm") else None
        marked = Attributes(sequence_parallel=sequence_parallel and self.world is None)
        self.add_parameter("weight", (hidden_size,), marked, device=device, dtype=dtype)
        self.add_parameter("bias", (hidden_size,) if bias else None, marked, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, (..., hidden_size)."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps, group=_group(self.world))

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, eps={self.eps}, bias={self.bias is not None}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


def _group(world: TensorWorld | None) -> ProcessGroup | None:
    return None if world is None else world.group


def _require_eps(eps: float) -> float:
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a number of 0 or more, got {eps}")
    return eps
