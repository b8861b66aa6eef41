"""What of a module is under buckets, and what is not: a gradient that nobody reduces is told."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn

from tpkernels.buckets.parameters import Named, is_under_buckets
from tpkernels.comm.calls import is_looked_at


class Members:
    """The parameters of a module that one `GradientBuckets` has; of given pairs, all that there are."""

    def __init__(self, module_or_named_parameters: object, named: Named) -> None:
        given = module_or_named_parameters
        self._module = ref(given) if isinstance(given, nn.Module) else None
        self._named, self._times = named, 0

    def weights(self) -> list[tuple[str, Tensor]]:
        """Of these and of the module's frozen ones, as far as a checksum can read them."""
        frozen = [(name, p) for name, p in self._of_module() if not (p.requires_grad or p.is_meta)]
        return [*self._named, *(pair for pair in frozen if type(pair[1].data) is torch.Tensor)]

    def refuse_others(self) -> None:
        """An error if a parameter that came later has a gradient: looks grow rare, for they cost."""
        self._times += 1
        if not is_looked_at(self._times):
            return
        own = {id(parameter) for _, parameter in self._named}
        for name, parameter in self._of_module():
            has_gradient = parameter.requires_grad and parameter.grad is not None
            if has_gradient and id(parameter) not in own and not is_under_buckets(parameter):
                raise RuntimeError(
                    f"GradientBuckets: the gradient of '{name}' is not reduced: it was added to the module, "
                    "unfrozen, or replaced (load_state_dict(assign=True), say) after these buckets were "
                    "made; detach() them and make new ones"
                )

    def _of_module(self) -> Named:
        module = None if self._module is None else self._module()
        return [] if module is None else [*module.named_parameters()]
