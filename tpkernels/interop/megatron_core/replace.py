"""Our layers where Megatron names its own: in GPTModel, and in its functions that make specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from tpkernels.interop.megatron_core.column import ColumnParallelLinear
from tpkernels.interop.megatron_core.embedding import VocabParallelEmbedding
from tpkernels.interop.megatron_core.limits import require_no_transformer_engine
from tpkernels.interop.megatron_core.norm import LayerNorm, build_norm
from tpkernels.interop.megatron_core.row import RowParallelLinear


@contextmanager
def layers() -> Iterator[None]:
    """Inside, Megatron's layers and local norms are built as ours, whoever names them.

    They stay ours afterwards. Subclasses of Megatron's layers are built as they are; linear layers of
    Transformer Engine are refused.
    """
    with ExitStack() as stack:
        for there, here in _pairs():
            stack.enter_context(_with_attribute(there, "__init__", _building(there, here)))
        stack.enter_context(_with_attribute(WrappedTorchNorm, "__new__", _new_norm))
        for foreign in _of_transformer_engine():
            stack.enter_context(_with_attribute(foreign, "__init__", require_no_transformer_engine))
        yield


def _pairs() -> list[tuple[type[nn.Module], type[nn.Module]]]:
    """Megatron's class and ours: its own, by whatever names it may be reached."""
    kinds = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
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
    """An `__init__` of `theirs` that makes it one of `ours`.

    The class itself changes, not the names that refer to it: specs may have taken it long before.
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
