"""What ops over a group share: split and strategy of a call, checks, and operators of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

from tpkernels import journal, tp_invariance
from tpkernels.comm.agreement import Claim, agree
from tpkernels.comm.calls import CALLS_OF, calls_of, left_before_a_call
from tpkernels.comm.groups import required_group
from tpkernels.comm.tensor_parallel import Moved, TensorParallel
from tpkernels.comm.transports.rows import Gather, Reduced, Terms, Transport
from tpkernels.comm.transports.select import Exchanges
from tpkernels.dispatch import backends, log
from tpkernels.dispatch.operators import define, in_forward_mode, refuse_forward_mode
from tpkernels.env import env_flag
from tpkernels.kernels.activations import Activation
from tpkernels.kernels.recipe import Recipe
from tpkernels.ops.inputs import any_autocast, functorch_is_active, is_observed, refuse_transforms
from tpkernels.ops.main_grad import Into, empty_weight_gradient
from tpkernels.ops.matmul import PLAIN, Direction, Pair, Plain
from tpkernels.ops.tensor_parallel.flag_waits import FlagKernels

# TPKERNELS_DEBUG=1: ranks compare what they ask for before each call. Read once: an op should cost little.
debug = env_flag("TPKERNELS_DEBUG", default=False)

# once: comm cannot, as it does not know dispatch
log.show_if_asked()
journal.readers += log.readers_asked_for(backends.computing_on)

ALONE = TensorParallel(None)


def alone_in(segments: int) -> TensorParallel:
    """Return the split of an op without a group. segments: of TP-invariance"""
    return TensorParallel(None, segments=segments) if segments else ALONE


class TimedKernels(FlagKernels):
    """What transports ask of those who compute, on ranks that time ways to move rows."""

    def timed_way(
        self, group: ProcessGroup, moved: Moved, like: Tensor, exchanges: Exchanges, work: object
    ) -> Transport | None:
        """Words are timed, if their product is known."""
        known = like.is_floating_point() or (moved.width > 0 and work is not None)
        if not times_on(like) or not known or exchanges.transport != "auto":
            return None
        if (found := exchanges.chosen.get(moved._replace(width=0))) is not None:
            return found
        from tpkernels.ops.tensor_parallel.ways import Trial, choose  # on GPUs, where ways are timed

        return choose(Trial(self, moved, like, group, exchanges, work))

    def decides(self, like: Tensor) -> bool:
        if not times_on(like):
            return True
        from tpkernels.dispatch.autotune import why_not_now  # on GPUs, where products are timed

        return not why_not_now(like.device)


TIMED_KERNELS = TimedKernels()


def times_on(like: Tensor) -> bool:
    """Whether ways to move rows are timed where a tensor lies."""
    return like.is_cuda


def split_of(
    op: str,
    group: object,
    sequence_parallel: bool = False,
    overlap: bool = True,
    segments: int | None = None,
) -> TensorParallel:
    """Return the split of an op over a group, of which this rank is a member; each is made once.

    segments: of TP-invariance; 0: without it; None: as `tpkernels.tp_invariant` says now
    """
    segments = tp_invariance.default.segments if segments is None else segments
    if is_compiling():
        member = required_group(group, op=op)
        tp_invariance.own_segments(op, segments, member.size())
        return TensorParallel(member, sequence_parallel, overlap, TIMED_KERNELS, segments=segments)
    if functorch_is_active():
        refuse_transforms(op)
    try:
        calls = CALLS_OF.get(id(group))
        if calls is None or calls.failure or group not in distributed_c10d._world.pg_map:
            calls = calls_of(required_group(group, op=op))
        key = bool(sequence_parallel), bool(overlap), segments
        found: TensorParallel | None = calls.splits.get(key)
        if found is None:
            member = required_group(group, op=op)
            tp_invariance.own_segments(op, tp_invariance.checked(segments, op), member.size())
            found = TensorParallel(member, *key[:2], TIMED_KERNELS, segments=segments)
            calls.splits[key] = found
        return found
    except BaseException as error:  # Ctrl-C: other ranks may be in the op already
        left_before_a_call(group, error)
        raise


def compare_request(
    op: str,
    tp: TensorParallel,
    x: Tensor,
    parameters: Sequence[Tensor | None] = (),
    options: Sequence[object] = (),
    *,
    rows: Sequence[int] | None = None,
    width: int | None = None,
) -> None:
    """With TPKERNELS_DEBUG=1, raise unless all ranks ask for the same.

    x: an input of the op, before autocast
    parameters: other inputs that may need gradients
    options: all else that ranks must have alike
    rows, width: leading dimensions and features of the rows that are moved, if not those of x
    """
    if not debug or tp.group is None or tp.ranks == 1 or is_compiling():
        return
    required_group(tp.group, op=op)
    device, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    grad = torch.is_grad_enabled()
    needs = [grad and each is not None and each.requires_grad for each in (x, *parameters)]
    rows = x.shape[:-1] if rows is None else rows
    width = (x.shape[-1] if x.ndim else 0) if width is None else width
    moved = f"what is moved: {(*rows, width)} {dtype}"
    alike = *options, tp.sequence_parallel, tp.overlap, tp.segments
    agree(Claim(op, (moved, f"requires_grad: {needs}", f"options: {alike}")), tp.group)


def compare_in_backward(op: str, tp: TensorParallel, needs: Sequence[object]) -> None:
    """With TPKERNELS_DEBUG=1, raise unless all ranks are in this backward and need the same gradients."""
    if debug and tp.group is not None and tp.ranks > 1:
        agree(Claim(op, (f"gradients: {[bool(need) for need in needs]}",)), tp.group)


def strategy_of(op: str, tp: TensorParallel, recipe: Recipe | None, x: Tensor) -> Plain:
    """Return how an op computes; raise if ranks, or x, checked and cast, do not allow it."""
    if recipe is not None:
        from tpkernels.ops.quantize import require_quantizable  # here: only ops in fp8 need it

        segments = tp_invariance.default.segments if tp.group is None else tp.segments
        require_quantizable(op, recipe, x, segments)
    return _strategy(tp, recipe) if tp.segments or recipe is not None else PLAIN


def _strategy(tp: TensorParallel, recipe: Recipe | None) -> Plain:
    if recipe is not None:
        from tpkernels.ops.quantized.products import Quantized

        return Quantized(recipe)
    if tp.segments:
        from tpkernels.ops.tensor_parallel.segments import Segmented

        return Segmented(tp.segments, tp.own_segments)
    return PLAIN


def require_segments(op: str, tp: TensorParallel, name: str, size: int) -> None:
    """Raise unless this rank's segments of TP-invariance divide a size of its shards."""
    if tp.segments and size % tp.own_segments:
        raise ValueError(
            f"{op}: expected {name} that this rank's {tp.own_segments} of the {tp.segments} segments of "
            f"TP-invariance divide, got {size}"
        )


def refuse_tokens(op: str, x: Tensor, name: str = "x") -> NoReturn:
    """Raise for an x that has no tokens to split."""
    raise ValueError(
        f"{op}: expected {name} (tokens, ..., in_features) with sequence_parallel, got {x.ndim}-D"
    )


def refuse_uneven(op: str, x: Tensor, tp: TensorParallel) -> NoReturn:
    """Raise for an x whose dimension 0 the ranks of the group do not divide."""
    raise ValueError(
        f"{op}: expected dimension 0 of x divisible by the {tp.ranks} ranks of the group, got "
        f"{tuple(x.shape)}; pad the sequence to a multiple of {tp.ranks}"
    )


def shaped_like(y: Tensor, x: Tensor, tokens: int) -> Tensor:
    """Give (rows, features) the leading dimensions of x; the first becomes `tokens`."""
    return y.view(*(tokens, *x.shape[1:-1])[: x.ndim - 1], y.shape[1])


def recorded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records a call on these tensors; other calls do without `apply`, which takes time."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return in_forward_mode() or (not is_compiling() and is_observed())


def name_of(group: ProcessGroup) -> str:
    """Return the name by which an operator under torch.compile takes a group.

    With the size: compiled code is kept on disk, and must not serve a group of this name and another size.
    """
    return f"{group.group_name} of {group.size()} ranks"


def split_named(name: str, sequence_parallel: bool, overlap: bool, segments: int) -> TensorParallel:
    """Return the split that an operator is told of; traced with tensors that hold nothing, as well."""
    if not name:
        return alone_in(segments)
    group = c10d._resolve_process_group(GroupName(name.rpartition(" of ")[0] or name))
    return split_of("a compiled operator", group, sequence_parallel, overlap, segments)


class FakeSplit:
    """Moves nothing: it allocates what would arrive."""

    group = None  # nobody to compare calls with

    def __init__(self, tp: TensorParallel) -> None:
        self.ranks, self.token_shards = tp.ranks, tp.token_shards
        self.sequence_parallel, self.overlap = tp.sequence_parallel, tp.overlap

    def gather(self, op: str, name: str, shard: Tensor, *_: object, **options: object) -> Gather:
        return Gather(shard.new_empty(shard.shape[0] * self.token_shards, shard.shape[1]))

    def reduce(self, op: str, terms: Terms, bias: Tensor | None = None) -> Reduced:
        return Reduced(terms.like.new_empty(terms.rows // self.token_shards, terms.cols))


class FakeMatmul(Plain):
    """Computes nothing: it allocates the results of any strategy."""

    is_plain = False

    def unpack(self, rows: Tensor, features: int, dtype: torch.dtype, of: Direction = "x") -> Tensor:
        return rows.new_empty(rows.shape[0], features, dtype=dtype)

    def each(
        self, rows: Gather, widths: Sequence[int], compute: object, dtype: torch.dtype, *_: object
    ) -> list[Tensor]:
        return [rows.full.new_empty(rows.full.shape[0], width, dtype=dtype) for width in widths]

    def terms(self, pairs: Sequence[Pair], transposed: bool, dtype: torch.dtype) -> Terms:
        terms = super().terms(pairs, transposed, dtype)
        return replace(terms, like=terms.like.new_empty(0, dtype=dtype))

    def wgrad(self, dy: Tensor, x: Tensor, into: Into, *, split: Direction) -> Tensor:
        return empty_weight_gradient(dy, x, into)

    def bias_grad(self, dz: Tensor, *, split: bool) -> Tensor:
        return dz.new_empty(dz.shape[1])

    def act_grad(self, dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
        return torch.empty_like(dy)


class SplitOperator:
    """A function of tensors, a split and a strategy; in compiled code the operator `tpkernels::name`.

    run: computes a list of tensors, with None for those that were not asked for; it changes no input
    fake: of the same arguments, empty tensors like those; None: as `run` says with a split and a strategy
        that are fake
    """

    _SPLIT = "str group, bool sequence_parallel, bool overlap, int segments, str recipe"

    def __init__(
        self,
        name: str,
        schema: str,
        run: Callable[..., Sequence[Tensor | None]],
        fake: Callable[..., Sequence[Tensor | None]] | None = None,
    ) -> None:
        """schema: of the arguments but split and strategy, which come last"""
        self._name, self._run = name, run

        def unnamed(args: tuple[Any, ...]) -> tuple[Any, ...]:
            *given, group, sequence_parallel, overlap, segments, recipe = args
            tp = split_named(group, sequence_parallel, overlap, segments)
            return *given, tp, _strategy(tp, Recipe.named(recipe) if recipe else None)

        def running(*args: Any) -> Sequence[Tensor | None]:
            *given, tp, matmul = unnamed(args)
            with tp.call:
                if journal.readers or journal.is_profiled():
                    return self._told(*given, tp, matmul, by="compiled")
                return run(*given, tp, matmul)

        def faking(*args: Any) -> Sequence[Tensor | None]:
            *given, tp, matmul = unnamed(args)
            return run(*given, FakeSplit(tp), FakeMatmul()) if fake is None else fake(*given, tp, matmul)

        self._overload = define(name, f"({schema}, {self._SPLIT}) -> Tensor[]", running, faking)

    def _told(self, *args: Any, by: str = "") -> Sequence[Tensor | None]:
        """Run, and tell the journal. by: the compiler, if that calls"""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        name = self._name.replace("_backward", " backward")  # as in errors
        with journal.entered(journal.OpStep("op", name, name, tensors, by=by)):
            return self._run(*args)

    def __call__(
        self, *args: Any, tp: TensorParallel, matmul: Plain, given: Sequence[object] | None = None
    ) -> Any:
        """given: which results are asked for; None: all"""
        if not is_compiling():
            run = self._run
            if journal.readers or journal.is_profiled():
                run = self._told
            if not any_autocast():
                return run(*args, tp, matmul)
            with torch._C._DisableAutocast():
                return run(*args, tp, matmul)
        refuse_forward_mode(self._name)
        name = "" if tp.group is None else name_of(tp.group)
        flat = name, tp.sequence_parallel, tp.overlap, tp.segments, matmul.recipe
        found = self._overload(*args, *flat)
        if given is None:
            return list(found)
        there = iter(found)
        return [next(there) if each else None for each in given]
