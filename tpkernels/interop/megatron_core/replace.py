"""Builds our layers where Megatron names its own: in GPTModel, in its spec functions, in users' specs.

Our norms work under sequence parallelism, too, which Megatron's local norm refuses. Attention stays
Megatron's; its softmax offsets are marked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from tpkernels.interop.megatron_core.attention import DotProductAttention
from tpkernels.interop.megatron_core.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    require_no_invariance,
)
from tpkernels.layers import norm


@contextmanager
def layers() -> Iterator[None]:
    """Build our layers and norms in place of Megatron's layers and local norms inside the block.

    Models keep these layers afterwards. Subclasses of Megatron's layers stay what they are; linear layers of
    Transformer Engine are refused.
    """
    with ExitStack() as stack:
        for there, here in _pairs():
            stack.enter_context(_with_attribute(there, "__init__", _building(there, here)))
        stack.enter_context(_with_attribute(WrappedTorchNorm, "__new__", _new_norm))
        for foreign in _of_transformer_engine():
            stack.enter_context(_with_attribute(foreign, "__init__", _require_no_transformer_engine))
        yield


def _pairs() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """Return pairs of Megatron's class and ours."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, DotProductAttention)
    pairs: list[tuple[type[nn.Module], type[nn.Module]]] = [(kind.__base__, kind) for kind in kinds]
    if find_spec("apex") is not None:  # else Megatron does not name it
        from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

        pairs.append((FusedLayerNorm, LayerNorm))
    return pairs


def _of_transformer_engine() -> list[type[nn.Module]]:
    names = ("TELinear", "TELayerNormColumnParallelLinear", "TEGroupedLinear")
    found = [getattr(transformer_engine, name, None) for name in names if transformer_engine.HAVE_TE]
    return [each for each in found if each is not None]


def _building(theirs: type[nn.Module], ours: type[nn.Module]) -> Callable[..., None]:
    """Return an `__init__` of `theirs` that changes the instance's class to `ours`.

    Names that refer to `theirs` stay: specs may hold the class already.
    """
    initialize = theirs.__init__

    @wraps(initialize)
    def build(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if type(self) is theirs:
            object.__setattr__(self, "__class__", ours)
            ours.__init__(self, *args, **kwargs)
        else:
            initialize(self, *args, **kwargs)

    return build


def _new_norm(_: type[WrappedTorchNorm], *args: Any, **kwargs: Any) -> nn.Module:
    return build_norm(*args, **kwargs)


@contextmanager
def _with_attribute(owner: type, name: str, value: object) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _require_no_transformer_engine(layer: object, *_: object, **__: object) -> None:
    """Refuse to build a linear layer of Transformer Engine, as its `__init__`."""
    raise NotImplementedError(
        f"{type(layer).__name__}: expected no linear layer of Transformer Engine inside layers(): it would "
        "not be ours; make the spec by get_gpt_layer_local_spec"
    )


def build_norm(
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> nn.Module:
    """Build the norm that `config.normalization` names, for Megatron's `layer_norm` submodules.

    persist_layer_norm, zero_centered_gamma, normalization: have no effect, as in Megatron; config decides
    """
    kinds: dict[str, type[nn.Module]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise NotImplementedError(
            f"build_norm: expected config.normalization LayerNorm or RMSNorm, got {config.normalization!r}"
        )
    return kinds[config.normalization](config, hidden_size, eps)


class _BuiltByMegatron:
    """Adds Megatron's constructor; parameters are marked `sequence_parallel` by its config."""

    returns_residual = False  # read by later sources than 0.16

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "",
    ) -> None:
        require_no_invariance(type(self).__name__)
        for option in ("layernorm_zero_centered_gamma", "memory_efficient_layer_norm"):
            if getattr(config, option):
                raise NotImplementedError(f"{type(self).__name__}: expected config.{option}=False, got True")
        super().__init__(
            hidden_size,  # type: ignore[call-arg]  # of the norm that is the other base
            eps,
            sequence_parallel=config.sequence_parallel,
            device=torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device()),
            dtype=config.params_dtype,
        )


class LayerNorm(_BuiltByMegatron, norm.LayerNorm):
    """Our norm, with Megatron's constructor."""


class RMSNorm(_BuiltByMegatron, norm.RMSNorm):
    """Our norm, with Megatron's constructor."""


class _SpecProvider(LocalSpecProvider):  # type: ignore[misc] # Megatron is not typed
    """Megatron's local modules, with our linear layers and norms."""

    def column_parallel_linear(self) -> type[nn.Module]:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type[nn.Module]:
        return RowParallelLinear

    def core_attention(self) -> type[nn.Module]:
        return DotProductAttention

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Callable[..., nn.Module]:
        return build_norm

    def grouped_mlp_modules(self, *asked: bool) -> Any:
        """Return the experts' module and submodules; grouped products stay Megatron's own."""
        made = super().grouped_mlp_modules(*asked)
        if isinstance(made, partial):  # of later sources than 0.16
            return partial(made, submodules=_ours(made.keywords["submodules"]))
        module, submodules = made
        return module, _ours(submodules)


def _ours(submodules: Any) -> Any:
    if submodules is None or submodules.linear_fc1 is not ColumnParallelLinear.__base__:
        return submodules
    return dataclasses.replace(submodules, linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def spec_provider() -> BackendSpecProvider:
    """Return a `BackendSpecProvider` for functions such as `get_mlp_module_spec_for_backend`.

    The embedding and the output layer are not in a spec: GPTModel names them. Use `layers` for these.
    """
    return _SpecProvider()
