"""An automatic check that replicated parameters are equal: after steps 1, 2, 4, 8, ..., and every N-th one.

TPKERNELS_CHECK_REPLICAS    N, by default 100; 0: never. For inputs (`batches`), too

`torch.nn.utils.clip_grad_norm_` sees one rank's shards only: each rank scales by another norm, and replicas
drift apart, which no loss shows. The same happens if partial gradients are not summed. torch calls a hook
after each step of each optimizer; ranks then compare checksums through torch.distributed's store. If ranks
have taken different numbers of steps, a time-out reports it; a collective would match another message.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, PrefixStore, Store
from torch.optim.optimizer import Optimizer

from tpkernels.layers.attributes import Attributes
from tpkernels.layers.foreign import is_split_over
from tpkernels.layers.replicas import drift, name_of
from tpkernels.runtime import c10d
from tpkernels.runtime.agreement import are_set
from tpkernels.runtime.checksums import sums_of_bits
from tpkernels.runtime.random import is_capturing

Copies = tuple[Sequence[int], Sequence[Tensor]]  # ranks with replicas, and this rank's replicas

VARIABLE = "TPKERNELS_CHECK_REPLICAS"


def _read(value: str | None) -> int:
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{VARIABLE} is {value!r}; expected a number of optimizer steps, or 0 for never")
    return int(value) if value else 100


steps_between = _read(os.environ.get(VARIABLE))  # read once: a step must be cheap


class Watch:
    """Counts the steps of one optimizer, and compares replicas after some of them."""

    def __init__(self) -> None:
        self._steps = self._looks = self._number = 0
        self._store: Store | None = None

    def after_step(self, copies: Callable[[], Copies | None]) -> None:
        """Count a step, and compare replicas after some steps. Called by all ranks with replicas."""
        self._steps = steps = self._steps + 1
        # powers of two: a short run may end before the first interval
        if steps_between and (steps & (steps - 1) == 0 or steps % steps_between == 0):
            self.look(copies())

    def look(self, found: Copies | None) -> None:
        """Compare replicas; all ranks raise the same error if they differ in a bit. Called by all of them."""
        if not steps_between or found is None or len(found[0]) < 2 or dist.get_rank() not in found[0]:
            return
        ranks, copies = found
        try:
            rows = self._sums_of_all(ranks, copies)
        except DistNetworkError as error:  # rank 0 may have ended with the run
            warnings.warn(
                f"copies of parameters could not be compared: {error}", RuntimeWarning, stacklevel=2
            )
            return
        if {len(row) for row in rows} != {len(copies)}:
            counts = ", ".join(f"{len(row)} on rank {rank}" for rank, row in zip(ranks, rows, strict=True))
            raise RuntimeError(f"tensor-parallel ranks hold different numbers of copies: {counts}")
        wrong = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
        if wrong:
            others = [
                rank for rank, row in zip(ranks, rows, strict=True) if row[wrong[0]] != rows[0][wrong[0]]
            ]
            copy = copies[wrong[0]]
            name = name_of(copy) or f"parameter {wrong[0]} of {len(copies)} that are copies"
            when = f", after {self._steps} steps of the optimizer ({VARIABLE}={steps_between}; 0: never)"
            raise drift(copy, name, others, ranks[0], len(wrong), len(copies), when)

    def _sums_of_all(self, ranks: Sequence[int], copies: Sequence[Tensor]) -> list[list[bytes]]:
        """Exchange checksums of replicas through the store; return those of each rank."""
        rank, store = dist.get_rank(), c10d.default_store()
        members = "-".join(map(str, ranks))
        if store is not self._store:  # the first look in this world
            self._store, self._looks = store, 0
            # Each rank counts its optimizers in the store: the count lives and dies with the world.
            self._number = PrefixStore("tpkernels/optimizers", store).add(f"{members} on {rank}", 1)
        self._looks += 1
        board = PrefixStore(f"tpkernels/copies/{members}/{self._number}", store)
        board.set(f"{self._looks}/{rank}", " ".join(map(str, sums_of_bits(copies))))
        keys = [f"{self._looks}/{member}" for member in ranks]
        timeout = c10d.default_timeout()
        if not are_set(board, keys, timeout):
            late = [str(member) for member, key in zip(ranks, keys, strict=True) if not board.check([key])]
            raise RuntimeError(
                f"rank {rank} waited {timeout.total_seconds():g} s after {self._steps} optimizer steps to "
                f"compare copies of parameters: rank{'s' * (len(late) > 1)} {', '.join(late)} took another "
                f"number of steps, or died. Tensor-parallel ranks must take or skip each step alike; "
                f"{VARIABLE} must be the same on all, 0 compares nothing"
            )
        rows = [board.get(key).split() for key in keys]
        with suppress(RuntimeError):  # not every store can; all ranks have read what they wrote before
            board.delete_key(f"{self._looks - 1}/{rank}")
        return rows


_watches: WeakKeyDictionary[Optimizer, Watch] = WeakKeyDictionary()


def after_step(optimizer: Optimizer, _: tuple[Any, ...], __: dict[Any, Any]) -> None:
    """torch's hook after each optimizer step: count the step, and compare replicas after some steps."""
    if not torch.compiler.is_compiling() and dist.is_initialized():
        _watches.setdefault(optimizer, Watch()).after_step(lambda: _copies_of(optimizer))


def _copies_of(optimizer: Optimizer) -> Copies | None:
    """The replicas among an optimizer's parameters, and their ranks; None if these are not known."""
    if is_capturing() or dist.get_backend() == "fake":  # a single process
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = {Attributes.of(parameter).tensor_parallel_ranks for parameter in parameters} - {()}
    if len(groups) != 1:  # with several groups it is not known which one a plain parameter belongs to
        return None
    (ranks,) = groups
    return ranks, [p for p in parameters if _is_copy(p, ranks)]


def _is_copy(parameter: Tensor, ranks: Sequence[int]) -> bool:
    """Whether a parameter is a replica: neither a shard nor a weight of Megatron's experts."""
    return not is_split_over(ranks, parameter) and getattr(parameter, "allreduce", True)
