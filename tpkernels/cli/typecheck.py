"""`python -m tpkernels typecheck SCRIPT`: one step of a training script, checked by types over the ranks.

The script runs in this process as rank 0 of a world without others (torch's "fake" backend): what it computes
are not its numbers, but their types over the tensor-parallel ranks are (`interop.typecheck`). From the first
call of a model with tensor-parallel layers on all is checked, up to the first step of an optimizer, where the
script ends: by then `finalize_gradients` or buckets must have summed each partial gradient, once.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
import traceback
from argparse import REMAINDER, ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.cli import BadUse, require_packages
from tpkernels.comm.transports import c10d
from tpkernels.interop.typecheck import typecheck
from tpkernels.layers import replicas
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.parallel_module import ParallelModule
from tpkernels.layers.replicas import gradient_of
from tpkernels.ops.replicas import sum_over_ranks_
from tpkernels.runtime.initialize import destroy_model_parallel

LEGEND = (
    "Types over the tensor-parallel ranks: I replicated, with the full gradient; R replicated, its gradient "
    "a term of a sum; V a shard; P a term of a sum"
)


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="of the world that the script sees (default: 2)")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a training script for torchrun")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")


def main(options: Namespace) -> int:
    require_packages("spmd_types")
    if not options.script.is_file():
        raise BadUse(f"expected a script, got {str(options.script)!r}, which is no file")
    if options.ranks < 2:
        raise BadUse(f"expected --ranks of at least 2, got {options.ranks}")
    step = CheckedStep()
    with _as_rank_of(options.ranks), _as_script(options.script, options.arguments):
        wrong = step.run(str(options.script))
    if wrong:
        print(f"{wrong}\n\n{LEGEND}")
        return 1
    if not step.models:
        print(f"{options.script}: no model with tensor-parallel layers was called, so nothing was checked")
        return 1
    how = "up to the first step of an optimizer" if step.ended else "no optimizer made a step"
    print(f"{options.script}: no fault found in types over {options.ranks} ranks ({how})")
    return 0


class CheckedStep:
    """Runs a script up to its first optimizer step, and checks it from the first call of a model on."""

    def __init__(self) -> None:
        self.models = 0  # that were called
        self.ended = False  # by a step
        self._errors: list[Exception] = []  # also those that the script has caught
        self._checking = ExitStack()
        self._sums: Counter[int] = Counter()  # of gradients over ranks, by address

    def run(self, script: str) -> str:
        """Run it; return what is wrong, or nothing."""
        from spmd_types import SpmdTypeError

        before_call = register_module_forward_pre_hook(self._before_call)
        before_step = register_optimizer_step_pre_hook(self._before_step)
        try:
            with self._checking, patch.object(replicas, "sum_over_ranks_", self._summed):
                runpy.run_path(script, run_name="__main__")
        except _Ended:
            self.ended = True
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except Exception as error:
            causes = chain(error)
            found = next(
                (each for each in causes if isinstance(each, (SpmdTypeError, PartialGradient))), None
            )
            if found is None:
                raise
            return told(found)
        finally:
            before_call.remove()
            before_step.remove()
        return told(self._errors[0]) if self._errors else ""

    def _before_call(self, module: nn.Module, args: object) -> None:
        if self.models:
            return
        layers = (layer for layer in module.modules() if isinstance(layer, ParallelModule))
        layer = next((layer for layer in layers if layer.world.size > 1), None)
        if layer is not None:
            self.models += 1
            self._errors = self._checking.enter_context(typecheck(layer.world.group))

    def _summed(self, gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        sum_over_ranks_(gradients, group)
        self._sums.update(gradient.data_ptr() for gradient in gradients)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self.models:
            return
        self._checking.close()
        summed_by_buckets = {
            id(parameter)
            for buckets in gc.get_objects()
            if type(buckets) is GradientBuckets
            for parameter in buckets.summed_parameters()
        }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = gradient_of(parameter)
                if gradient is None or not Attributes.of(parameter).sequence_parallel:
                    continue
                sums = self._sums[gradient.data_ptr()] + (id(parameter) in summed_by_buckets)
                if sums != 1:
                    raise PartialGradient(
                        f"the gradient of a parameter {tuple(parameter.shape)} marked sequence_parallel is a "
                        f"term of a sum over the ranks, and was summed {sums} times before the step; call "
                        "finalize_gradients(model) once after the last backward, or give GradientBuckets "
                        "the tensor_parallel_group"
                    )
        raise _Ended


class PartialGradient(RuntimeError):
    """An optimizer takes the gradient of this rank's tokens for that of all, or sums were made twice."""


class _Ended(BaseException):
    """The script has made its step."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those in whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def told(error: BaseException) -> str:
    """The error, after the line of the user's that it came from: the last outside of torch and of us."""
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
def _as_rank_of(ranks: int) -> Iterator[None]:
    """Let any process group that is made be one whose other ranks send what this one does."""
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
        # whole collectives, which the fake backend answers; it has no messages point to point
        patch.object(c10d, "_processors", lambda device: 1),
    ):
        try:
            yield
        finally:
            destroy_model_parallel()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _as_script(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    with (
        patch.object(sys, "argv", [str(script), *arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
    ):
        yield
