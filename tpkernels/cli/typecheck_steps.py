"""Runs a script for `typecheck`, and checks it until an optimizer would step its model again.

All operators are checked from the first call of a model with tensor-parallel layers. At each optimizer step
partial gradients must have been summed exactly once.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, device_mesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.cli import BadUse
from tpkernels.comm.transports import c10d
from tpkernels.groups.initialize import destroy_model_parallel
from tpkernels.interop.typecheck import typecheck
from tpkernels.layers import replicas
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.replicas import gradient_of
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.replicas import sum_over_ranks_


class CheckedSteps:
    """Runs a script until an optimizer would step again; checks it from a model's first call."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None  # of the model's layers, after its first call
        self.ranks = 0  # of this group
        self.stepped = False  # whether an optimizer has stepped the model's parameters
        self._errors: list[Exception] = []  # also those that the script has caught
        self._checking = ExitStack()
        self._sums: dict[int, _Sums] = {}  # of marked parameters, by id
        self._parameters: set[int] = set()  # ids of the model's
        self._optimizers: set[int] = set()  # ids of optimizers that have stepped some of them
        self._ended = False

    def run(self, script: str) -> str:
        """Run the script; return the first error in words, or ""."""
        from spmd_types import SpmdTypeError

        hooks = [
            register_module_forward_pre_hook(self._before_call),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with self._checking, patch.object(replicas, "sum_over_ranks_", self._summed):
                runpy.run_path(script, run_name="__main__")
        except _Ended:
            pass
        except SystemExit as end:
            if end.code not in (None, 0) and not self._errors:
                raise
        except Exception as error:
            found = [each for each in chain(error) if isinstance(each, SpmdTypeError)]
            if not (found or self._errors):
                raise
            self._errors += found
        finally:
            for hook in hooks:
                hook.remove()
        return told(self._errors[0]) if self._errors else ""

    def _before_call(self, module: nn.Module, args: object) -> None:
        if self.group is None:
            layers = (layer for layer in module.modules() if isinstance(layer, ParallelModule))
            layer = next((layer for layer in layers if layer.world.size > 1), None)
            if layer is not None:
                self.group, self.ranks = layer.world.group, layer.world.size
                self._check()
        elif (
            isinstance(module, ParallelModule)
            and module.world.size > 1
            and module.world.group is not self.group
        ):
            raise BadUse(
                "expected layers of one tensor-parallel group, got those of another, which is not checked"
            )
        if self.group is not None:
            for parameter in module.parameters():
                self._follow(parameter)

    def _check(self) -> None:
        errors = self._checking.enter_context(typecheck(self.group))
        self._checking.callback(lambda: self._errors.extend(errors))

    def _follow(self, parameter: Tensor) -> None:
        """Count the sums of a parameter's partial gradient."""
        if id(parameter) in self._parameters:
            return
        self._parameters.add(id(parameter))
        if parameter.requires_grad and Attributes.of(parameter).sequence_parallel:
            sums = self._sums[id(parameter)] = _Sums(parameter)
            parameter.register_post_accumulate_grad_hook(lambda _: sums.accumulated())

    def _summed(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        sum_over_ranks_(gradients, group)
        with unobserved():
            found = {gradient.data_ptr() for gradient in gradients}
            for sums in self._sums.values():
                ours = gradient_of(sums.parameter)
                if ours is not None and ours.data_ptr() in found:
                    sums.summed(group)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        stepped = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._parameters and gradient_of(parameter) is not None
        ]
        if not stepped or self.group is None:
            return
        if self._ended or id(optimizer) in self._optimizers:
            self._ended = True  # in case the script continues
            raise _Ended
        self._optimizers.add(id(optimizer))
        self._checking.close()  # an optimizer's computation has other types
        by_buckets = {
            id(parameter)
            for buckets in gc.get_objects()
            if type(buckets) is GradientBuckets
            for parameter in buckets.summed_parameters()
        }
        for parameter in stepped:
            sums = self._sums.get(id(parameter))
            if sums is not None and (wrong := sums.wrong(id(parameter) in by_buckets, self.group)):
                error = PartialGradient(
                    f"the gradient of a parameter {tuple(parameter.shape)} marked sequence_parallel is a "
                    f"term of a sum over the ranks, and before the step {wrong}; call "
                    "finalize_gradients(model) once after the last backward, or give GradientBuckets the "
                    "tensor_parallel_group"
                )
                self._errors.append(error)
                raise error
        self.stepped = True

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if (sums := self._sums.get(id(parameter))) is not None:
                    sums.begin()
            self._check()


class _Sums:
    """The number of sums of a partial gradient since the last step."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.begin()

    def begin(self) -> None:
        self._count, self._terms_since = 0, False

    def accumulated(self) -> None:
        self._terms_since = True

    def summed(self, group: ProcessGroup) -> None:
        from spmd_types import P, R, maybe_get_axis_local_type, mutate_type, normalize_axis

        self._count, self._terms_since = self._count + 1, False
        gradient, axis = self.parameter.grad, normalize_axis(group)
        if gradient is not None and maybe_get_axis_local_type(gradient, axis) is P:
            mutate_type(gradient, axis, src=P, dst=R)

    def wrong(self, by_buckets: bool, group: ProcessGroup) -> str:
        """Return the fault of the gradient in words; "" for none."""
        from spmd_types import R, maybe_get_axis_local_type, normalize_axis

        gradient, count = self.parameter.grad, self._count + by_buckets
        reduced = gradient is not None and maybe_get_axis_local_type(gradient, normalize_axis(group)) is R
        if reduced and not count:
            return ""  # the script has all-reduced it
        if count == 1 and self._terms_since and not by_buckets:
            return "a backward has added to it after it was summed"
        return "" if count == 1 else f"was summed {count} times"


class PartialGradient(RuntimeError):
    """An optimizer takes a partial gradient for the full one, or a sum was made twice."""


class _Ended(BaseException):
    """The script has made its step."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause or context, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def told(error: BaseException) -> str:
    """Return the error with the user's line that raised it: the last outside torch and tpkernels."""
    ours = [
        Path(module.__file__).parent
        for module in (torch, sys.modules["tpkernels"], sys.modules["spmd_types"])
        if module.__file__
    ]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in ours)
        and not frame.filename.startswith("<")
    ]
    if not frames:
        return str(error)
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}\n    {frame.line}\n{error}"


@contextmanager
def as_rank_of(ranks: int) -> Iterator[None]:
    """Make process groups fake inside the block: the other ranks send the same as this one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, make = dist.init_process_group, dist.new_group

    def init_fake(*_: object, **__: object) -> None:
        init("fake", store=FakeStore(), rank=0, world_size=ranks)

    def new_fake(*args: Any, **options: Any) -> Any:
        return make(*args[:1], **{k: v for k, v in options.items() if k not in ("backend", "pg_options")})

    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with (
        patch.dict(os.environ, where),
        patch.object(dist, "init_process_group", init_fake),
        patch.object(device_mesh, "init_process_group", init_fake),
        patch.object(dist, "new_group", new_fake),
        # collectives in one round, which the fake backend answers; it has no point-to-point messages
        patch.object(c10d, "_processors", lambda device: 1),
    ):
        try:
            yield
        finally:
            destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def as_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as Python does for a script, inside the block."""
    with (
        patch.object(sys, "argv", [str(script), *arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
    ):
        yield
