"""Base classes of layers: parameters with Megatron's attributes, and a tensor-parallel group.

Weights begin the same for any number of ranks: every rank draws the full weight in fp32 from the default
random stream, which is the same on all ranks, casts it and keeps its shard. So one seed gives one model,
whatever the tensor-parallel size and dtype. The full weight takes 4 bytes an element for a moment, on the
device of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpkernels.groups.random import DEFAULT_STREAM, get_rng_tracker
from tpkernels.layers import batches, foreign, replicas
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import State, tensor_world

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


InitMethod = Callable[[Tensor], Tensor | None]


@torch.no_grad()
def fill_shard(
    shard: Tensor,
    init_method: InitMethod,
    *,
    full: tuple[int, int],
    dim: int,
    ranges: Sequence[range],
) -> Tensor | None:
    """Fill this rank's shard of a weight; return the full weight in fp32.

    init_method: fills the tensor it is given in place, or returns another of its shape
    full: the shape that `init_method` sees
    ranges: of the full weight along `dim`, concatenated in the shard; the rest of the shard becomes zero

    On the meta device nothing is filled or drawn, and None is returned.
    """
    if shard.is_meta:
        return None
    master = _full_weight(init_method, full, shard.device)
    start = 0
    for each in ranges:
        shard.narrow(dim, start, len(each)).copy_(master.narrow(dim, each.start, len(each)))
        start += len(each)
    shard.narrow(dim, start, shard.shape[dim] - start).zero_()
    return master


@torch.no_grad()
def fill_with_nan(shard: Tensor, rows: int | None = None) -> None:
    """Fill a shard with NaN, so that a weight that is not loaded afterwards shows in the first loss.

    rows: how many of the shard's rows are not padding; padding becomes zero
    """
    shard[:rows].fill_(torch.nan)
    if rows is not None:
        shard[rows:].zero_()


def _full_weight(init_method: InitMethod, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw the full weight in fp32, the same on all ranks that share the default stream."""
    master = torch.zeros(shape, dtype=torch.float32, device=device)
    with get_rng_tracker().fork(DEFAULT_STREAM):
        made = init_method(master)
    if made is None:
        made = master
    if not isinstance(made, Tensor):
        raise TypeError(
            f"init_method: expected a function that fills the tensor it is given, got {type(made).__name__} "
            "back; return the tensor, or nothing"
        )
    if made.shape != shape or master.shape != shape:
        got = tuple(made.shape if made.shape != shape else master.shape)
        raise ValueError(
            f"init_method: expected a weight of shape {shape}, (out_features, in_features) of the full "
            f"layer, got {got}; fill the tensor that it is given in place"
        )
    return made.to(device)


# torch has these hooks for the whole process only: see `foreign`, `batches`, `elementwise` and `watch`.
register_module_module_registration_hook(foreign.look_at_wrapper)
register_module_module_registration_hook(batches.look_at_compiled)
register_optimizer_step_pre_hook(foreign.before_step)
if replicas.steps_between_checks:
    register_optimizer_step_post_hook(replicas.after_step)


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
        """Set an attribute; notice that torch's `fully_shard` has replaced parameters by DTensors.

        Not a property: since torch 2.14 torch.compile would take its value alone.
        """
        super().__setattr__(name, value)
        if name == "_is_fsdp_managed_module":
            self._after_fully_shard()

    def _after_fully_shard(self) -> None:
        self._mark()

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

    def __init__(self, state: State) -> None:
        super().__init__()
        self.world = tensor_world(state)
        batches.find_root_before(self)

    def adopt(self, state: State, attributes: dict[str, Attributes]) -> None:
        """Initialize a module that was built as an instance of another class.

        attributes: of the parameters that the caller sets next, in place of the module's own
        """
        self.world = tensor_world(state)
        for name in attributes:
            self._parameters[name] = None
        self._keep_attributes(attributes)
        batches.find_root_before(self)

    def _mark(self) -> None:
        super()._mark()
        for _, parameter in self._named():
            vars(parameter)["tensor_parallel_ranks"] = self.world.ranks  # of the group in this process

    def _after_fully_shard(self) -> None:
        foreign.refuse_mesh(self, self.world, holds_dtensors=self.holds_dtensors)
        super()._after_fully_shard()

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
