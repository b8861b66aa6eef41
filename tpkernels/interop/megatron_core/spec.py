"""Our layers for specs that users write themselves."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
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

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Callable[..., nn.Module]:
        return build_norm

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool
    ) -> tuple[type[nn.Module], MLPSubmodules | None]:
        """With grouped products these are Megatron's own."""
        module, submodules = super().grouped_mlp_modules(moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)
        if submodules is not None:
            submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return module, submodules


def spec_provider() -> BackendSpecProvider:
    """A `BackendSpecProvider`, for functions such as `get_mlp_module_spec_for_backend`.

    The embedding and the output layer are not in a spec: GPTModel names them. See `layers`.
    """
    return _SpecProvider()
