"""What of a module is under buckets, and what is not: a gradient that nobody reduces is told."""

from __future__ import annotations

from collections.abc import ValuesView
from itertools import chain
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tpkernels.buckets.parameters import Named, is_under_buckets

_END = (object(),)


class _Walk:
    """Over the modules in a module, which is taken again only if one of them holds something else.

    own: the ids of the parameters that are not looked for
    """

    def __init__(self, own: set[int]) -> None:
        self._own = own
        self._dicts: list[ValuesView[Any]] = []  # of each module its parameters, and its modules
        self._held: list[Any] = []  # all that they held
        self._others: list[Tensor] = []

    def others_in(self, module: nn.Module) -> list[Tensor]:
        # at the speed of C; the end belongs to the comparison, for one may be longer
        held = chain(chain.from_iterable(self._dicts), _END)
        if not self._dicts or not all(map(is_, held, chain(self._held, _END))):
            self._dicts = [d.values() for each in module.modules() for d in (each._parameters, each._modules)]
            self._held = [*chain.from_iterable(self._dicts)]
            self._others = [p for p in module.parameters() if id(p) not in self._own]
        return self._others

    def forget(self, _: object) -> None:
        """Let what was walked over end with the module."""
        self._dicts, self._held, self._others = [], [], []


class Members:
    """The parameters of a module that one `GradientBuckets` has; of given pairs, all that there are."""

    def __init__(self, module_or_named_parameters: object, given: Named) -> None:
        """given: the names and parameters of the former; the frozen ones are not under the buckets"""
        source = module_or_named_parameters
        self._named = [(name, parameter) for name, parameter in given if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in given if not parameter.requires_grad]
        self._own = {id(parameter) for _, parameter in self._named}
        self._walk = _Walk(self._own)
        self._module = ref(source, self._walk.forget) if isinstance(source, nn.Module) else None

    def weights(self) -> list[tuple[str, Tensor]]:
        """Of these and of the module's frozen ones, as far as a checksum can read them."""
        frozen = [(name, p) for name, p in self._of_module() if not (p.requires_grad or p.is_meta)]
        return [*self._named, *(pair for pair in frozen if type(pair[1].data) is torch.Tensor)]

    def refuse_others(self) -> None:
        """An error if a parameter that came later has a gradient."""
        module = None if self._module is None else self._module()
        others = [p for _, p in self._frozen] if module is None else self._walk.others_in(module)
        if any(map(_is_unreduced, others)):
            name = next(name for name, p in [*self._of_module(), *self._frozen] if self._is_other(p))
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{name}' is not reduced; detach() these buckets and make "
                "new ones: it was added to the module, unfrozen, or replaced (load_state_dict(assign=True), "
                "say) after they were made"
            )

    def _is_other(self, parameter: Tensor) -> bool:
        return id(parameter) not in self._own and _is_unreduced(parameter)

    def _of_module(self) -> Named:
        module = None if self._module is None else self._module()
        return [] if module is None else [*module.named_parameters()]


def _is_unreduced(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.grad is not None and not is_under_buckets(parameter)
