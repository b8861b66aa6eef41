"""What the Python engine knows of each parameter and each bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work


@dataclass(eq=False)
class Slot:
    """One parameter. The second half is about the present round."""

    parameter: Tensor
    name: str
    marked: bool
    accumulator: Any  # autograd's node, which exists as long as somebody holds it
    dtype: torch.dtype
    view: Tensor | None = None
    bucket: int = 0
    expected: int = 0
    touched: bool = False  # received a gradient, synchronizing or not
    arrived: int = 0  # gradients that count
    last_arrival: int = 0
    scaled: bool = False  # divided already, while it was taken in
    reduced: bool = False  # holds the result of an earlier round

    @property
    def place(self) -> Tensor:
        assert self.view is not None, "arrange() comes first"
        return self.view

    def is_in_place(self, grad: Tensor) -> bool:
        """Whether autograd added to the bucket itself. By storage, for empty tensors have no address."""
        return grad.is_set_to(self.place)

    def refuse_converted(self) -> None:
        if self.parameter.dtype != self.dtype or self.parameter.device != self.place.device:
            raise RuntimeError(
                f"GradientBuckets: '{self.name}' was converted or moved, which takes its hook away; make "
                "GradientBuckets after that"
            )

    def refuse_resized(self, grad: Tensor) -> None:
        """It would be broadcast."""
        if grad.shape != self.place.shape:
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{self.name}' is of shape {list(grad.shape)}; expected "
                f"{list(self.place.shape)}, as when GradientBuckets were made"
            )

    def alias(self) -> Tensor:
        """What `grad` becomes. Not the view itself: `module.to()` replaces the data of `grad`, and with it
        the view's."""
        return self.place.detach()

    def move_to(self, flat: Tensor, offset: int) -> None:
        """Lie in `flat` from now on, laid out like the parameter: optimizers walk both in the same order."""
        strides = torch.empty_like(self.parameter, device="meta").stride()
        view = flat.as_strided(self.parameter.shape, strides, flat.storage_offset() + offset)
        if self.view is not None:
            view.copy_(self.view)
            grad = self.parameter.grad
            if grad is not None and self.is_in_place(grad):
                self.parameter.grad = view.detach()
        self.view = view


@dataclass(eq=False)
class Bucket:
    flat: Tensor
    members: list[Slot]
    half_way: bool = False  # in the first of its two groups
    pending: int = 0  # members that still expect a gradient
    streams: list[torch.Stream] = field(default_factory=list)
    wire: Tensor | None = None
    work: Work | None = None

    @property
    def marked(self) -> bool:
        return self.members[0].marked


def accumulator_of(parameter: Tensor) -> Any:
    """Autograd's node that adds to `grad`."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
