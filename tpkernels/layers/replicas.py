"""Sums of partial gradients of replicated parameters, and checks that replicas are equal on all ranks.

Under sequence parallelism a norm's gradient is partial: it covers this rank's tokens only. Such a parameter
is marked `sequence_parallel`, and `finalize_gradients` sums its gradients, once after the (last) backward of
a step. Without this sum replicas drift apart, which no loss shows. The same happens if gradients are clipped
by `torch.nn.utils.clip_grad_norm_`, which sees one rank's shards only: each rank scales by another norm.

clip_grad_norm_     refuses gradients that differ
check_replicas      refuses parameters that differ
Watch               refuses them after steps 1, 2, 4, 8, ..., and every N-th one of an optimizer

TPKERNELS_CHECK_REPLICAS    N, by default 100; 0: never. For inputs (`batches`), too

A `Watch` compares checksums through torch.distributed's store. If ranks have taken different numbers of
steps, a time-out reports it; a collective would match another message.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistNetworkError, PrefixStore, Store
from torch.optim.optimizer import Optimizer

from tpkernels.groups import c10d
from tpkernels.groups.agreement import are_set
from tpkernels.groups.checksums import sums_of_bits
from tpkernels.groups.random import is_capturing
from tpkernels.layers.attributes import Attributes
from tpkernels.layers.world import State, tensor_world
from tpkernels.layers.wrappers import groups_with_blocks, is_dtensor, local_of, reshard
from tpkernels.ops.inputs import unobserved
from tpkernels.ops.replicas import agree_on, from_all_ranks, sum_over_ranks_, unlike_first_rank


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's local `main_grad` if there is one, else its local `grad`; None without either."""
    gradient = _held_gradient(parameter)
    if is_dtensor(gradient) and _is_partial(gradient):
        raise ValueError(
            f"expected gradients that are summed, got one of {tuple(gradient.shape)} with the placements "
            f"{gradient.placements}; redistribute it to its parameter's placements first"
        )
    return None if gradient is None else local_of(gradient)


def _held_gradient(parameter: Tensor) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def _is_partial(gradient: Tensor | None) -> bool:
    return is_dtensor(gradient) and any(placement.is_partial() for placement in gradient.placements)


def finalize_gradients(module: nn.Module, *, state: State = None) -> None:
    """Sum the gradients of parameters marked `sequence_parallel` over the tensor group, in place.

    Called by all its ranks. `GradientBuckets(..., tensor_parallel_group=...)` does the same; doing it twice
    multiplies by the number of ranks.
    """
    world = tensor_world(state)
    reshard(module)
    for name, parameter in module.named_parameters():
        # fully_shard makes new parameters: our layers mark theirs again, other modules do not
        if is_dtensor(parameter) and "sequence_parallel" not in vars(parameter):
            raise TypeError(
                "finalize_gradients: expected parameters with the attribute sequence_parallel, got the "
                f"DTensor '{name}' of a module that is not of tpkernels, which has lost its attributes; "
                "after fully_shard, set its attribute sequence_parallel to True or False"
            )
    if world.size == 1:
        return
    with unobserved():
        marked = [
            (name, gradient_of(parameter))
            for name, parameter in module.named_parameters()
            if Attributes.of(parameter).sequence_parallel
        ]
        agree_on("finalize_gradients", marked, world.group)
        sum_over_ranks_([gradient for _, gradient in marked if gradient is not None], world.group)


def check_replicas(module: nn.Module, *, state: State = None) -> None:
    """Raise unless replicated parameters have the same bits on all ranks of the tensor group.

    Called by all its ranks. All raise the same error, which names a parameter and the ranks that differ.
    Each parameter is sent and copied, too slow for every step.
    """
    world = tensor_world(state)
    reshard(module)
    named = module.named_parameters()
    copies = {name: parameter for name, parameter in named if not is_split_over(world.ranks, parameter)}
    for name in _described_as_shards(module):
        copies.pop(name, None)
    if world.size == 1 or not copies:
        return
    held = [(name, local_of(parameter)) for name, parameter in copies.items()]
    agree_on("check_replicas", held, world.group)
    unlike = unlike_first_rank([copy for _, copy in held], world.group)

    def ask(numbers: list[float]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=held[0][1].device)
        return from_all_ranks(own, world.group).tolist()

    _require_alike(unlike.tolist(), world.ranks, copies, ask)


def _described_as_shards(module: nn.Module) -> Iterator[str]:
    """Yield names of unmarked parameters that modules of Megatron describe, for checkpoints, as shards."""
    for prefix, owner in module.named_modules():
        describe = getattr(owner, "sharded_state_dict", None)
        own = {n: p for n, p in owner._parameters.items() if p is not None}
        unmarked = [short for short, p in own.items() if "tensor_model_parallel" not in vars(p)]
        if not callable(describe) or not unmarked:
            continue
        try:
            described = describe(metadata={"dp_cp_group": None})
        except Exception:  # of another library, or without its groups: they are compared
            continue
        for short in unmarked:
            entry = described.get(short)
            if getattr(entry, "local_shape", None) != getattr(entry, "global_shape", None):
                yield f"{prefix}.{short}".lstrip(".")


def _require_alike(
    rows: Sequence[Sequence[object]],
    ranks: Sequence[int],
    copies: Mapping[str, Tensor],
    ask: Callable[[list[float]], list[list[float]]],
    when: str = "",
) -> None:
    """Raise if replicas differ between ranks.

    rows: of each rank, a value for each replica, equal where the replica is
    ask: exchanges equally many numbers of each rank
    """
    wrong = [i for i, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
    if not wrong:
        return
    others = [rank for rank, row in zip(ranks, rows, strict=True) if row[wrong[0]] != rows[0][wrong[0]]]
    name, copy = list(copies.items())[wrong[0]]
    more = f"; so do {len(wrong) - 1} more of {len(copies)} parameters" if len(wrong) > 1 else ""
    raise RuntimeError(
        f"check_replicas: '{name}' differs between tensor-parallel ranks that hold copies of it. "
        f"{_cause_of_drift(copy, ask(_projected_gradient(copy)), ranks)}. "
        f"It differs on rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} from rank "
        f"{ranks[0]}{more}{when}"
    )


_PROJECTIONS = 8
# Relative: rounding causes less; norms of ranks' shards, by which torch's clipping scales, differ by more.
_ALIKE = 1e-4


def _projected_gradient(copy: Tensor) -> list[float]:
    """Return sums of the gradient with several weights: proportional if gradients are; NaN without one."""
    gradient = _held_gradient(copy)
    if gradient is None or _is_partial(gradient):
        return [math.nan] * _PROJECTIONS
    numbers = local_of(gradient).detach().to_dense().reshape(-1).double()
    order = torch.arange(1, len(numbers) + 1, dtype=torch.float64, device=numbers.device)
    return [float((numbers * (order * (each + 1)).cos()).sum()) for each in range(_PROJECTIONS)]


def _cause_of_drift(copy: Tensor, projected: Sequence[Sequence[float]], ranks: Sequence[int]) -> str:
    """Return why a replica differs between ranks, by its gradients, which are still there after a step.

    projected: of each rank's gradient
    """
    gradients = torch.tensor(projected, dtype=torch.float64)
    first = gradients[0]
    length = first.square().sum()
    if not gradients.isfinite().all() or not length:
        return (
            f"{likely_causes(copy)}. No gradients are there to compare: ranks may also have begun with other "
            f"weights (one seed, one checkpoint), or clipped by {_TORCH_CLIPS}"
        )
    if (gradients == first).all():
        return (
            "Its gradients are equal now: ranks have begun with other weights (one seed, one checkpoint), or "
            "their optimizers have other options"
        )
    factors = gradients @ first / length
    away = (gradients - factors[:, None] * first).square().sum(1).sqrt() / length.sqrt()
    if copy.numel() > 1 and bool((away <= _ALIKE).all()):
        far = int((factors - 1).abs().argmax())
        if abs(float(factors[far]) - 1) <= _ALIKE:
            return (
                "Its gradients differ by rounding: on GPUs chosen kernels may differ in the last bit: "
                "TPKERNELS_TUNE=0"
            )
        return (
            f"Its gradients are proportional, on rank {ranks[far]} {float(factors[far]):.3g} times those of "
            f"rank {ranks[0]}, as after {_TORCH_CLIPS}"
        )
    return f"Its gradients differ, too. {likely_causes(copy)}"


_TORCH_CLIPS = (
    "torch's clip_grad_norm_, which takes the norm of one rank's shards: clip by tpkernels.clip_grad_norm_"
)


def likely_causes(copy: Tensor) -> str:
    """Return why gradients of replicas differ between ranks and what to do, the likeliest cause first."""
    causes = [
        "other data: give each rank the same batch, by a sampler over state.rank_in('dp')",
        "other dropout: seed by tpkernels.manual_seed(seed), alike on all ranks",
        "a sum that is missing: call finalize_gradients(model) after each backward, or give GradientBuckets "
        "the tensor_parallel_group, and mark parameters sequence_parallel whose gradients are of this rank's "
        "tokens",
    ]
    if Attributes.of(copy).sequence_parallel:
        causes.insert(0, causes.pop())
    if "tensor_model_parallel" not in vars(copy):
        causes.append(
            "a shard, not a copy, of a module that is not of tpkernels: mark it by "
            "set_tensor_model_parallel_attributes(parameter, True, dim, 1)"
        )
    return f"Likeliest is {'; then '.join(causes)}"


def is_split_over(ranks: Sequence[int], parameter: Tensor) -> bool:
    """Whether these tensor-parallel ranks hold shards of `parameter`, rather than replicas."""
    return Attributes.of(parameter).tensor_model_parallel or tuple(ranks) in groups_with_blocks(parameter)


# Ranks with replicas, and this rank's replicas by name.
Copies = tuple[Sequence[int], Mapping[str, Tensor]]

VARIABLE = "TPKERNELS_CHECK_REPLICAS"


def _read(value: str | None) -> int:
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{VARIABLE} is {value!r}; expected a number of optimizer steps, or 0 for never")
    return int(value) if value else 100


steps_between_checks = _read(os.environ.get(VARIABLE))  # read once: a step must be cheap


def is_due(number: int) -> bool:
    """Whether ranks compare in this step or call: in early ones, ever more rarely, and in every N-th."""
    # powers of two: a short run may end before the first interval
    return bool(steps_between_checks) and (number & (number - 1) == 0 or number % steps_between_checks == 0)


class Watch:
    """Counts the steps of one optimizer, and compares replicas after some of them."""

    def __init__(self) -> None:
        self._steps = self._looks = self._number = 0
        self._store: Store | None = None

    def after_step(self, copies: Callable[[], Copies | None]) -> None:
        """Count a step, and compare replicas after some steps. Called by all ranks with replicas."""
        self._steps += 1
        if is_due(self._steps):
            self.look(copies())

    def look(self, found: Copies | None) -> None:
        """Compare replicas; all ranks raise the same error if they differ in a bit. Called by all of them."""
        if not steps_between_checks or found is None or len(found[0]) < 2 or dist.get_rank() not in found[0]:
            return
        ranks, copies = found
        try:
            rows = self._exchanged(ranks, sums_of_bits(list(copies.values())))
        except DistNetworkError as error:  # rank 0 may have ended with the run
            warnings.warn(
                f"copies of parameters could not be compared: {error}", RuntimeWarning, stacklevel=2
            )
            return
        if {len(row) for row in rows} != {len(copies)}:
            counts = ", ".join(f"{len(row)} on rank {rank}" for rank, row in zip(ranks, rows, strict=True))
            raise RuntimeError(f"tensor-parallel ranks hold different numbers of copies: {counts}")
        when = f", after {self._steps} steps of the optimizer ({VARIABLE}={steps_between_checks}; 0: never)"

        def ask(numbers: list[float]) -> list[list[float]]:
            return [[float(each) for each in row] for row in self._exchanged(ranks, numbers)]

        _require_alike(rows, ranks, copies, ask, when)

    def _exchanged(self, ranks: Sequence[int], numbers: Sequence[float]) -> list[list[bytes]]:
        """Exchange numbers through the store; return those of each rank, as text."""
        rank, store = dist.get_rank(), c10d.default_store()
        members = "-".join(map(str, ranks))
        if store is not self._store:  # the first look in this world
            self._store, self._looks = store, 0
            # Each rank counts its optimizers in the store: the count lives and dies with the world.
            self._number = PrefixStore("tpkernels/optimizers", store).add(f"{members} on {rank}", 1)
        self._looks += 1
        board = PrefixStore(f"tpkernels/copies/{members}/{self._number}", store)
        board.set(f"{self._looks}/{rank}", " ".join(map(str, numbers)))
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
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    if len(set(names)) != len(parameters):
        names = [f"parameter {i} of the optimizer, {tuple(p.shape)}" for i, p in enumerate(parameters)]
    not_of_experts = [(n, p) for n, p in zip(names, parameters, strict=True) if Attributes.of(p).allreduce]
    return ranks, {name: p for name, p in not_of_experts if not is_split_over(ranks, p)}
