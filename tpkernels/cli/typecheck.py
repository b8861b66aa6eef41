"""`python -m tpkernels typecheck SCRIPT`: checks the first step of a training script by types over ranks.

The script runs in this process as the only rank of a world (torch's "fake" backend): its numbers are wrong,
but their types over the tensor-parallel ranks are right (`interop.typecheck`). All operators are checked from
the first call of a model with tensor-parallel layers or marked shards, until an optimizer would step its
model again. At each optimizer step partial gradients must have been summed exactly once.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
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
from tpkernels.cli import BadUse, add_number, require_packages
from tpkernels.comm.transports import c10d
from tpkernels.groups.initialize import destroy_model_parallel
from tpkernels.groups.state import current_or_none
from tpkernels.interop.typecheck import typecheck
from tpkernels.layers import replicas
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.replicas import gradient_of
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.replicas import sum_over_ranks_
from tpkernels.ops.tensor_parallel import mappings

T = TypeVar("T")
LEGEND = (
    "Types over the tensor-parallel ranks: I replicated, with the full gradient; R replicated, its gradient "
    "a term of a sum; V a shard; P a term of a sum"
)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    add_number(parser, "--ranks", "of the world that the script sees", 2, least=2)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script for torchrun")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")


def main(options: Namespace) -> int:
    require_packages("spmd_types")
    script = options.script
    if not script.is_file():
        raise BadUse(f"expected a script, got {str(script)!r}, which is no file")
    steps = CheckedSteps()
    with (
        as_rank_of(options.ranks),
        patch.object(sys, "argv", [str(script), *options.arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
    ):
        wrong = steps.run(str(script))
    if wrong:
        print(f"{wrong}\n\n{LEGEND}")
        return 1
    if steps.group is None:
        print(f"{script}: {steps.why_unchecked()}, so nothing was checked")
        return 1
    if not steps.stepped:
        print(
            f"{script}: no torch.optim.Optimizer has stepped parameters of the model that have gradients, so "
            "only what was called is checked: no fault found in it"
        )
        return 1
    print(f"{script}: no fault found in types over {steps.group.size()} tensor-parallel ranks")
    return 0


class CheckedSteps:
    """Runs a script until an optimizer would step again; checks it from a model's first call."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None  # of the model's layers, after its first call
        self.stepped = False  # whether an optimizer has stepped the model's parameters
        self._marked = self._moved = False  # whether shards were marked, and regions called, before it
        self._errors: list[Exception] = []  # also those that the script has caught
        self._checking = ExitStack()
        self._parameters: dict[int, Tensor] = {}  # of the model, by id
        self._optimizers: set[int] = set()  # ids of optimizers that have stepped some parameters
        self._by_buckets: set[int] = set()  # ids of parameters whose gradients buckets have summed

    def run(self, script: str) -> str:
        """Run the script; return the first error in words, or ""."""
        from spmd_types import SpmdTypeError

        hooks = [
            register_module_forward_pre_hook(self._before_call),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with (
                self._checking,
                patch.object(replicas, "sum_over_ranks_", self._summed),
                patch.object(GradientBuckets, "finish", self._finished(GradientBuckets.finish)),
                patch.object(mappings, "_region", self._noted(mappings._region)),
            ):
                runpy.run_path(script, run_name="__main__")
        except _Ended:
            pass
        except SystemExit as end:
            if end.code not in (None, 0) and not self._errors:
                raise
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, SpmdTypeError):
                    self._errors.append(cause)
                cause = cause.__cause__ or cause.__context__
            if not self._errors:
                raise
        finally:
            for hook in hooks:
                hook.remove()
        return told(self._errors[0]) if self._errors else ""

    def _before_call(self, module: nn.Module, args: object) -> None:
        if self.group is None:
            layers = (layer for layer in module.modules() if isinstance(layer, ParallelModule))
            layer = next((layer for layer in layers if layer.world.size > 1), None)
            if layer is not None:
                self.group = layer.world.group
            elif any(Attributes.of(each).tensor_model_parallel for each in module.parameters()):
                self._marked, state = True, current_or_none()  # a model by hand: its shards are marked
                if state is not None and state.size("tp") > 1:
                    self.group = state.process_group("tp")
            if self.group is not None:
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
                if id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = parameter
                    if _is_partial(parameter):
                        parameter.register_post_accumulate_grad_hook(self._accumulated)

    def why_unchecked(self) -> str:
        """Say what a script lacks by which its model would have been checked."""
        if self._marked:
            return (
                "a model with marked shards was called, but no tensor-parallel state tells over which ranks: "
                "call initialize_model_parallel(tensor_model_parallel_size=...), or check in Python, by "
                "tpkernels.typecheck(group)"
            )
        if self._moved:
            return (
                "regions were called, but by no module with layers of tpkernels or marked parameters, whose "
                "types would be known: mark each shard of a weight, weight.tensor_model_parallel = True and "
                "weight.partition_dim = the dimension that is split"
            )
        return "no model with tensor-parallel layers was called"

    def _noted(self, region: Callable[..., T]) -> Callable[..., T]:
        """Return a region that notes that it was called."""

        def noting(*args: Any, **options: Any) -> T:
            self._moved = True
            return region(*args, **options)

        return noting

    def _check(self) -> None:
        errors = self._checking.enter_context(typecheck(self.group))
        self._checking.callback(lambda: self._errors.extend(errors))

    def _accumulated(self, parameter: Tensor) -> None:
        from spmd_types import P

        self._set_type(parameter, P)

    def _set_type(self, parameter: Tensor, new: Any) -> Any:
        """Give a parameter's gradient a type; return the type before."""
        from spmd_types import assert_type, maybe_get_axis_local_type, mutate_type, normalize_axis

        assert self.group is not None
        with unobserved():
            main_grad, axis = getattr(parameter, "main_grad", None), normalize_axis(self.group)
            gradient = parameter.grad if main_grad is None else main_grad
            assert isinstance(gradient, Tensor)
            before = maybe_get_axis_local_type(gradient, axis)
            if before is None:
                assert_type(gradient, {axis: new})
            elif before is not new:
                mutate_type(gradient, axis, src=before, dst=new)
            return before

    def _summed(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        from spmd_types import R

        sum_over_ranks_(gradients, group)
        found = {gradient.data_ptr() for gradient in gradients}
        for parameter in self._parameters.values():
            with unobserved():
                gradient = gradient_of(parameter)
            if gradient is not None and gradient.data_ptr() in found and self._set_type(parameter, R) is R:
                raise self._fault(parameter, 2)

    def _finished(self, finish: Callable[[GradientBuckets], T]) -> Callable[[GradientBuckets], T]:
        """Return a `GradientBuckets.finish` that notes which parameters it sums."""

        def noting(buckets: GradientBuckets) -> T:
            self._by_buckets.update(map(id, buckets.summed_parameters()))
            return finish(buckets)

        return noting

    def _fault(self, parameter: Tensor, count: int) -> PartialGradient:
        error = PartialGradient(
            f"the gradient of a parameter {tuple(parameter.shape)} marked sequence_parallel is a term of a "
            f"sum over the ranks, and since the last backward it was summed {count} times; call "
            "finalize_gradients(model) once after the last backward, or give GradientBuckets the "
            "tensor_parallel_group"
        )
        self._errors.append(error)
        return error

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        from spmd_types import R

        stepped = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._parameters and gradient_of(parameter) is not None
        ]
        if not stepped or self.group is None:
            return
        if id(optimizer) in self._optimizers:
            raise _Ended
        self._optimizers.add(id(optimizer))
        self._checking.close()  # an optimizer's computation has other types
        for parameter in filter(_is_partial, stepped):
            count = (self._set_type(parameter, R) is R) + (id(parameter) in self._by_buckets)
            if count != 1:
                raise self._fault(parameter, count)
        self.stepped = True

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._optimizers:
            self._check()


def _is_partial(parameter: Tensor) -> bool:
    """Whether each rank's gradient of the parameter is a term of a sum."""
    return parameter.requires_grad and Attributes.of(parameter).sequence_parallel


class PartialGradient(RuntimeError):
    """An optimizer takes a partial gradient for the full one, or a sum was made twice."""


class _Ended(BaseException):
    """The script has made its step."""


def told(error: BaseException) -> str:
    """Return the error with the user's line that raised it: the last outside torch and tpkernels."""
    modules = torch, sys.modules["tpkernels"], sys.modules["spmd_types"]
    ours = [Path(module.__file__).parent for module in modules if module.__file__]
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
        patch.object(c10d, "processors_of", lambda device: 1),
    ):
        try:
            yield
        finally:
            destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()
