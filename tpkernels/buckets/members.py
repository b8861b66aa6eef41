"""What of a module is under buckets, and what is not: a gradient that nobody reduces is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import ref

import torch
from torch import Tensor, nn

from tpkernels.buckets.parameters import Named, is_under_buckets


class Members:
    """The parameters of a module that one `GradientBuckets` has; of given pairs, all that there are."""

    def __init__(self, module_or_named_parameters: object, given: Named) -> None:
        """given: the names and parameters of the former; the frozen ones are not under the buckets"""
        source = module_or_named_parameters
        self._module = ref(source) if isinstance(source, nn.Module) else None
        self._named = [(name, parameter) for name, parameter in given if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in given if not parameter.requires_grad]
        self._own = {id(parameter) for _, parameter in self._named}

    def weights(self) -> list[tuple[str, Tensor]]:
        """Of these and of the module's frozen ones, as far as a checksum can read them."""
        frozen = [(name, p) for name, p in self._of_module() if not (p.requires_grad or p.is_meta)]
        return [*self._named, *(pair for pair in frozen if type(pair[1].data) is torch.Tensor)]

    def refuse_others(self) -> None:
        """An error if a parameter that came later has a gradient."""
        module = None if self._module is None else self._module()
        if module is None:
            others: Iterable[Tensor] = (p for _, p in self._frozen if p.requires_grad)
        else:
            others = _trainable_beside(self._own, module)
        if any(map(_is_unreduced, others)):
            name = next(name for name, p in [*self._of_module(), *self._frozen] if self._is_other(p))
            raise RuntimeError(
                f"GradientBuckets: the gradient of '{name}' is not reduced: it was added to the module, "
                "unfrozen, or replaced (load_state_dict(assign=True), say) after these buckets were "
                "made; detach() them and make new ones"
            )

    def _is_other(self, parameter: Tensor) -> bool:
        return parameter.requires_grad and id(parameter) not in self._own and _is_unreduced(parameter)

    def _of_module(self) -> Named:
        module = None if self._module is None else self._module()
        return [] if module is None else [*module.named_parameters()]


def _is_unreduced(parameter: Tensor) -> bool:
    return parameter.grad is not None and not is_under_buckets(parameter)


def _trainable_beside(own: set[int], module: nn.Module) -> Iterator[Tensor]:
    """The parameters that require gradients and are not `own`. Without names, which take most of the time."""
    seen: set[nn.Module] = set()
    waiting: list[nn.Module | None] = [module]
    while waiting:
        each = waiting.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        parameters = each._parameters.values()
        if not own.issuperset(map(id, parameters)):  # at the speed of C where all are
            yield from (p for p in parameters if p is not None and id(p) not in own and p.requires_grad)
        waiting += each._modules.values()
