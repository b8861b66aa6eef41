"""Base classes of layers: parameters with Megatron's attributes, and a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.check import guard_training
from tpkernels.layers.world import State, tensor_world
from tpkernels.layers.wrappers import refuse_mesh

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


class MarkedModule(nn.Module):
    """A module whose parameters carry Megatron's attributes.

    torch makes new parameters, without attributes, when a module is copied, unpickled, materialised or
    converted, or loads a state dict by assignment. So attributes are noted before, and set again after.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keep_attributes({})

    def _keep_attributes(self, attributes: dict[str, Attributes]) -> None:
        self._attributes = attributes
        self.register_load_state_dict_pre_hook(_note_before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_mark_after)  # type: ignore[no-untyped-call]

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        attributes: Attributes,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register a parameter that `reset_parameters` fills, or None under this name if shape is None."""
        if shape is None:
            self.register_parameter(name, None)
            return
        self._attributes[name] = attributes
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._note()
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._note()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._note()
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; notice `FullyShardedDataParallel`, and that `fully_shard` has made DTensors.

        Not a property: since torch 2.14 torch.compile would take its value alone.
        """
        super().__setattr__(name, value)
        if name == "_is_fsdp_managed_module":
            self._after_fully_shard()
        if name == "_fsdp_use_orig_params" and not value:
            self._refuse_flat_parameters()

    def _after_fully_shard(self) -> None:
        self._mark()

    def _refuse_flat_parameters(self) -> None:
        """Raise if `FullyShardedDataParallel`, which has flat parameters, may average other shards."""

    def _note(self) -> None:
        """Remember the parameters' attributes, which callers may have changed."""
        for name, parameter in self._named():
            self._attributes[name] = Attributes.of(parameter)

    def _mark(self) -> None:
        """Set the remembered attributes on the parameters."""
        for name, parameter in self._named():
            self._attributes[name].put_on(parameter)

    def _named(self) -> list[tuple[str, Tensor]]:
        found = [(name, self._parameters.get(name)) for name in self._attributes]
        return [(name, parameter) for name, parameter in found if parameter is not None]


class ParallelModule(MarkedModule):
    """Base class of modules over a tensor-parallel group, `world`.

    holds_dtensors: whether parameters are DTensors over the tensor-parallel ranks, of the full shape
    """

    holds_dtensors = False

    def __init__(self, state: State, tp_invariant: int | None = None) -> None:
        """tp_invariant: segments of TP-invariance; None: as `tpkernels.tp_invariant` says now"""
        super().__init__()
        self.world = tensor_world(state, tp_invariant)
        guard_training()

    def adopt(self, state: State, attributes: dict[str, Attributes]) -> None:
        """Initialize a module that was built as an instance of another class.

        attributes: of the parameters that the caller sets next, in place of the module's own
        """
        self.world = tensor_world(state, 0)
        for name in attributes:
            self._parameters[name] = None
        self._keep_attributes(attributes)
        guard_training()

    def _mark(self) -> None:
        super()._mark()
        for _, parameter in self._named():
            vars(parameter)["tensor_parallel_ranks"] = self.world.ranks  # of the group in this process

    def _after_fully_shard(self) -> None:
        refuse_mesh(self, self.world.ranks, holds_dtensors=self.holds_dtensors)
        super()._after_fully_shard()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if getattr(param, "_fsdp_flattened", False):
            self._refuse_flat_parameters()
        super().register_parameter(name, param)

    def _refuse_flat_parameters(self) -> None:
        if self.world.size > 1:
            raise ValueError(
                f"FullyShardedDataParallel: expected no {type(self).__name__} over {self.world.size} ranks, "
                "which cannot see whether its shards would be averaged; use "
                'torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"])'
            )

    def require_features(self, x: Tensor, features: int, advice: str) -> None:
        """Raise unless x is (..., features). advice: what to do, for the error"""
        if x.ndim < 1 or x.shape[-1] != features:
            raise ValueError(
                f"{type(self).__name__}: expected input (..., {features}), got {tuple(x.shape)}; {advice}"
            )


def _note_before(module: nn.Module, *_: object) -> None:
    assert isinstance(module, MarkedModule)
    module._note()


def _mark_after(module: nn.Module, _: object) -> None:
    assert isinstance(module, MarkedModule)
    module._mark()
