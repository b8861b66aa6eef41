"""What watches training while there are layers: hooks on steps of optimizers, which torch has for all alone.

The first layer installs them, `destroy_model_parallel` removes them. With TPKERNELS_DEBUG=1 `check` runs in
the first call of each outermost module, too.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakSet

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tpkernels.env import env_flag
from tpkernels.groups.state import at_destroy
from tpkernels.layers import optimizers, replicas
from tpkernels.layers.check import check, layers_of


class _Installed:
    handles: ClassVar[list[RemovableHandle]] = []
    checked: ClassVar[WeakSet[nn.Module]] = WeakSet()


debug = env_flag("TPKERNELS_DEBUG", default=False)


def guard_training() -> None:
    """Install the hooks, unless they are."""
    if _Installed.handles:
        return
    _Installed.handles.append(register_optimizer_step_pre_hook(optimizers.before_step))
    if replicas.steps_between_checks:
        _Installed.handles.append(register_optimizer_step_post_hook(replicas.after_step))
    if debug:
        _Installed.handles.append(register_module_forward_pre_hook(_check_once))
    at_destroy(_remove)


def _remove() -> None:
    while _Installed.handles:
        _Installed.handles.pop().remove()


def _check_once(module: nn.Module, _: object) -> None:
    """Check a module, and with it all that are in it."""
    if module not in _Installed.checked:
        _Installed.checked.update(module.modules())
        if layers_of(module):
            check(module)
