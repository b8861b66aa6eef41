"""Our layers for specs that users write themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.tensor_parallel import layers as theirs
from torch import nn

from tpkernels.interop.megatron_core.column import ColumnParallelLinear
from tpkernels.interop.megatron_core.norm import build_norm
from tpkernels.interop.megatron_core.row import RowParallelLinear


class _SpecProvider(LocalSpecProvider):  # type: ignore[misc] # Megatron is not typed
    """Megatron's local modules, with our linear layers and norms."""

    def column_parallel_linear(self) -> type[nn.Module]:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type[nn.Module]:
        return RowParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Callable[..., nn.Module]:
        return build_norm

    def grouped_mlp_modules(self, *asked: bool) -> Any:
        """The experts' module and submodules; those of grouped products are Megatron's own."""
        made = super().grouped_mlp_modules(*asked)
        if isinstance(made, partial):  # of later sources than 0.16
            return partial(made, submodules=_ours(made.keywords["submodules"]))
        module, submodules = made
        return module, _ours(submodules)


def _ours(submodules: Any) -> Any:
    if submodules is None or submodules.linear_fc1 is not theirs.ColumnParallelLinear:
        return submodules
    return replace(submodules, linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def spec_provider() -> BackendSpecProvider:
    """A `BackendSpecProvider`, for functions such as `get_mlp_module_spec_for_backend`.

    The embedding and the output layer are not in a spec: GPTModel names them. See `layers`.
    """
    return _SpecProvider()
