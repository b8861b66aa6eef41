"""`GradientBuckets`: gradients in flat buckets, reduced over ranks during backward.

buckets = GradientBuckets(model, state.process_group("dp"))
for batch in batches:
    buckets.zero()
    loss(model(batch)).backward()
    buckets.finish()
    optimizer.step()
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.utils.hooks import RemovableHandle

from tpkernels.buckets import parameters as protocol
from tpkernels.buckets.build import problem_with_extension
from tpkernels.buckets.collectives import bucketed_all_gather
from tpkernels.buckets.engine import (
    Engine,
    EngineOptions,
    make_engine,
    problem_of_options,
)
from tpkernels.buckets.layout import (
    ALIGNMENT,
    DEFAULT_BUCKET_BYTES,
    GATHERED_BYTES,
    SMALLEST_BUCKET_BYTES,
    LayoutRules,
    lay_out_buckets,
    runs_within,
)
from tpkernels.buckets.live_group import LiveGroup
from tpkernels.buckets.memory import Bucket, BucketMemory
from tpkernels.buckets.neighbours import FAREWELL_SECONDS
from tpkernels.buckets.parameters import (
    Members,
    given_parameters,
    problem_of_order,
    refuse_early_steps,
    require_equal_weights,
)
from tpkernels.buckets.step import BucketStep, part_of_a_step
from tpkernels.buckets.supported import FLOATING, problem_of, problem_over
from tpkernels.comm.agreement import Claim, Problem, agree, describe
from tpkernels.comm.groups import (
    exchange_device,
    required_group,
    start_all_reduce,
    start_broadcast,
)
from tpkernels.comm.transports import select


class GradientBuckets:
    """Averages (or sums) gradients of parameters over the ranks of `group` in flat buckets, during backward.

    After `finish`, each `grad` is a view of its bucket and holds the result. The first step learns the order
    of buckets, and does not overlap yet.

    module_or_named_parameters: a module, or pairs of name and parameter; frozen parameters are ignored
    group: the data-parallel group; ranks that hold different shards of a parameter are refused
    bucket_bytes: the largest size of a bucket; the first and the last buckets are smaller
    reduce: "reduce_scatter" leaves each rank only its shard of the result: `gradient_shards`
    grad_dtype: of the buckets and of `grad`, if not the parameters' own: float32 sums of bfloat16 gradients
    wire_dtype: of sent data; by default the buckets' own, but float32 for halves if the backend would add
        them as halves (gloo)
    check_nan: check each bucket for NaN before it is sent; slow, for debugging
    tensor_parallel_group: gradients of parameters marked `sequence_parallel` are summed over it first
    main_grad: Megatron's protocol: gradients are summed in `parameter.main_grad` and `grad` stays None
    timeout: of each collective, if not the group's own

    Runs in C++. If the install did not build the extension, the first call builds it.
    """

    def __init__(
        self,
        module_or_named_parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        reduce: Literal["all_reduce", "reduce_scatter"] = "all_reduce",
        average: bool = True,
        grad_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        check_nan: bool = False,
        tensor_parallel_group: ProcessGroup | None = None,
        main_grad: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        options = EngineOptions(
            group=LiveGroup(required_group(group)),
            tensor_parallel_group=None
            if tensor_parallel_group is None
            else LiveGroup(required_group(tensor_parallel_group, "tensor_parallel_group")),
            rank=dist.get_rank(),
            reduce_scatter=reduce == "reduce_scatter",
            average=average,
            main_grad=main_grad,
            check_nan=check_nan,
            grad_dtype=grad_dtype,
            wire_dtype=wire_dtype,
            timeout=timeout,
        )
        given, problem = given_parameters(module_or_named_parameters)
        named = [(name, parameter) for name, parameter in given if parameter.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._module = Members(module_or_named_parameters, given)
        self._marked = [
            tensor_parallel_group is not None and bool(getattr(parameter, "sequence_parallel", False))
            for parameter in self._parameters
        ]
        self._options, transport = options, select.requested_transport
        self._step = BucketStep([live for live in (options.tensor_parallel_group, options.group) if live])
        self._agree(
            f"GradientBuckets(bucket_bytes={bucket_bytes}, reduce={reduce!r}, average={average}, "
            f"grad_dtype={grad_dtype}, wire_dtype={wire_dtype}, check_nan={check_nan}, "
            f"tensor_parallel_group={options.shown_tensor_parallel_group()}, main_grad={main_grad})"
            + ("" if transport == "auto" else f" with TPKERNELS_TRANSPORT={transport}"),
            problem_with_extension()
            or select.problem_of_request()
            or problem
            or problem_of(named, FLOATING, written=True)
            or problem_of_options(bucket_bytes, reduce, grad_dtype, wire_dtype, timeout)
            or problem_of_order(named, self._marked)
            or problem_over(
                named,
                dist.get_process_group_ranks(group),
                tensor_parallel_ranks=dist.get_process_group_ranks(tensor_parallel_group)
                if tensor_parallel_group is not None
                else (),
                average=average,
            ),
        )
        shards = group.size() if options.reduce_scatter else 1
        self._rules = LayoutRules(bucket_bytes, SMALLEST_BUCKET_BYTES, ALIGNMENT, padding=ALIGNMENT * shards)
        self._learning = True  # how many gradients each parameter receives, and in which order
        self._engine: Engine | None = None
        self._no_sync_depth = 0
        if named:
            self._attach()

    def summed_parameters(self) -> list[Tensor]:
        """Return parameters whose gradients are summed over the tensor-parallel group first."""
        return [each for each, marked in zip(self._parameters, self._marked, strict=True) if marked]

    @part_of_a_step
    def zero(self) -> None:
        """Clear all gradients, also those of a backward that raised."""
        if self._engine is None:
            return
        gave_up = self._memory.zero()
        gave_up |= self._engine.zero()
        if gave_up and self._learning and not self._options.check_nan:  # other ranks learn in finish()
            self._learn(self._engine, gave_up=True)

    @part_of_a_step
    def finish(self) -> tuple[str, ...]:
        """Wait until all gradients are reduced; return names of parameters without gradient on this rank.

        Called by every rank after each backward (or the last of several), also by a rank without backward. A
        second call changes nothing, unless gradients were cleared.
        """
        if self._engine is None:
            return ()
        self._memory.finish()
        unused = self._engine.finish()
        if self._learning:
            self._learn(self._engine)
        self._module.refuse_others()
        return tuple(self._names[index] for index in unused)

    @part_of_a_step
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them, for all but the last of several backwards."""
        return _NoSync(self._step, self._postpone)

    def detach(self) -> None:
        """Remove the hooks from the parameters; their gradients stay."""
        if self._engine is not None:
            self._engine = None
            try:
                self._memory.leave()
            finally:  # after Ctrl-C, too
                self._release()

    @property
    def buckets(self) -> tuple[Tensor, ...]:
        """The flat buckets, in the order of sending."""
        return tuple(self._engine.buckets()) if self._engine is not None else ()

    @property
    def launched_in_backward(self) -> int:
        """The number of buckets that the last step sent before `finish`."""
        return self._engine.launched_in_backward() if self._engine is not None else 0

    def unfinished(self) -> list[nn.Parameter]:
        """Return all parameters if there are gradients that are not reduced yet; else none."""
        return self._parameters if self._engine is not None and self._engine.is_midway() else []

    def gradient_shards(self) -> list[Tensor]:
        """Return this rank's shard of each bucket: the result of reduce="reduce_scatter" after `finish`."""
        if self.unfinished():
            raise RuntimeError("GradientBuckets.gradient_shards: nothing is reduced yet; call finish() first")
        return [self._own_shard(bucket) for bucket in self.buckets]

    def parameter_shards(self) -> list[Tensor]:
        """Return copies of the parameters' values, sharded like the gradients, for a sharded optimizer."""
        return self.shard(self._parameters)

    def gather_parameters(self, shards: Sequence[Tensor]) -> None:
        """All-gather the ranks' `parameter_shards` into the parameters."""
        kinds = [self._parameters[self._members(bucket)[0]].dtype for bucket in range(len(self.buckets))]
        with torch.no_grad():
            for index, value in self._gathered(shards, kinds):  # cast first: less to send
                self._parameters[index].copy_(value)

    def shard(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pack tensors of the parameters' shapes into buckets; return this rank's shard of each bucket."""
        if [tensor.shape for tensor in tensors] != [parameter.shape for parameter in self._parameters]:
            raise ValueError(
                f"tensors: expected one for each of {len(self._parameters)} parameters, of its shape"
            )
        with torch.no_grad():
            return [self._own_shard(flat).clone() for flat in self._packed(tensors)]

    def unshard(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """All-gather the ranks' `shard` results; return full tensors of the parameters' shapes."""
        with torch.no_grad():
            full = dict(self._gathered(shards, [shard.dtype for shard in shards]))
        return [full[index] for index in range(len(self._parameters))]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RuntimeError(
            "GradientBuckets cannot be copied or pickled; make new ones for the copied parameters"
        )

    def _postpone(self, by: int) -> None:
        """Enter (1) or leave (-1) a `no_sync`."""
        if self._engine is not None:  # not detached in the meantime
            self._no_sync_depth += by
            self._engine.set_synchronizing(self._no_sync_depth == 0)

    def _attach(self) -> None:
        self._engine = make_engine(self._parameters, self._names, self._marked, self._options)
        self._memory = BucketMemory(
            self._options, self._step, self._parameters[0].device, marked=any(self._marked)
        )
        if self._options.grad_dtype is not None and not self._options.main_grad:
            protocol.set_grad_dtype(self._parameters, self._options.grad_dtype)
        # First guess: autograd reaches parameters about in the reverse order of their use.
        self._arrange(self._engine, list(range(len(self._parameters)))[::-1])
        protocol.refuse_copies(self._parameters)
        handles = protocol.drop_dummies(self._parameters, self._step) if self._options.main_grad else []
        handles.append(refuse_early_steps(self))
        # not in the engine's destructor, which holds Python's lock and cannot wait for a backend
        self._release = weakref.finalize(self, _let_go, self._engine, self._memory, self._parameters, handles)
        self._release.atexit = False

    def _arrange(self, engine: Engine, order: list[int]) -> None:
        """Lay out buckets with the parameters in this order, and give them to the engine."""
        ordered = [self._parameters[index] for index in order]
        layout = lay_out_buckets(
            [parameter.numel() for parameter in ordered],
            [(self._marked[index], self._parameters[index].dtype) for index in order],
            [(self._options.grad_dtype or parameter.dtype).itemsize for parameter in ordered],
            self._rules,
        )
        placed = sorted(zip(order, layout.bucket_of, layout.offset_of, strict=True))  # by parameter
        bucket_of = [bucket for _, bucket, _ in placed]
        first = {bucket: index for index, bucket, _ in reversed(placed)}
        buckets = [
            Bucket(
                elements,
                self._options.grad_dtype or self._parameters[first[bucket]].dtype,
                self._marked[first[bucket]],
            )
            for bucket, elements in enumerate(layout.elements)
        ]
        self._memory.arrange(engine, bucket_of, [offset for _, _, offset in placed], buckets)
        self._bucket_of = bucket_of
        if self._options.main_grad:
            protocol.publish_main_grads(self._parameters, engine.views())

    def _learn(self, engine: Engine, *, gave_up: bool = False) -> None:
        """Reorder buckets as gradients arrived on the first rank in this step."""
        times = engine.last_arrivals()
        guess = list(range(len(times)))[::-1]
        # gradients that never arrived go last, because they hold back later ones
        observed = sorted(guess, key=lambda index: times[index] or float("inf"))
        device = exchange_device(self._options.group.get())
        order = torch.tensor(observed, device=device)
        arrivals = torch.tensor([*engine.arrivals(), int(gave_up)], device=device)
        groups = [live.get() for live in (self._options.group, self._options.tensor_parallel_group) if live]
        for group in reversed(groups):
            start_broadcast(group, order, 0).wait()
            start_all_reduce(group, arrivals, ReduceOp.MAX, self._options.timeout).wait()
        *counts, given_up = arrivals.tolist()
        if given_up or not any(counts):  # half a step, or a step without backward, shows no order
            return
        require_equal_weights(self._module.weights(), groups)
        # With reduce_scatter a sharded optimizer knows the buckets already.
        if not self._options.reduce_scatter and order.tolist() != guess:
            self._arrange(engine, order.tolist())
        engine.expect([max(1, count) for count in counts])
        self._learning = False

    def _gathered(
        self, shards: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> Iterator[tuple[int, Tensor]]:
        """Cast and gather shards, a few buckets at once; yield each parameter's index and value."""
        if [shard.numel() for shard in shards] != [self._own_shard(own).numel() for own in self.buckets]:
            raise ValueError("shards: expected one for each bucket, of the sizes of parameter_shards()")
        if self._engine is None:
            return
        views = self._engine.views()
        sizes = [flat.numel() * dtype.itemsize for flat, dtype in zip(self.buckets, dtypes, strict=True)]
        for some in runs_within(sizes, GATHERED_BYTES):
            cast = [shards[bucket].detach().to(dtypes[bucket]) for bucket in some]
            gathered = bucketed_all_gather(cast, self._options.group.get())
            for bucket, flat in zip(some, gathered, strict=True):
                for index in self._members(bucket):
                    yield index, _at(views[index], flat)

    def _own_shard(self, flat: Tensor) -> Tensor:
        group = self._options.group.get()
        return flat.tensor_split(group.size())[group.rank()]

    def _members(self, bucket: int) -> list[int]:
        return [index for index, place in enumerate(self._bucket_of) if place == bucket]

    def _packed(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield tensors laid out like the buckets, each in the widest dtype of its members."""
        if self._engine is None:
            return
        views = self._engine.views()
        for number, bucket in enumerate(self.buckets):
            members = self._members(number)
            dtypes = [tensors[index].dtype for index in members]
            flat = torch.zeros_like(bucket, dtype=functools.reduce(torch.promote_types, dtypes))
            for index in members:
                _at(views[index], flat).copy_(tensors[index])
            yield flat

    def _agree(self, request: str, problem: Problem | None) -> None:
        """Raise the same error on all ranks of both groups unless all make the same buckets."""
        pairs = list(zip(self._names, self._parameters, self._marked, strict=True))
        if problem is not None:
            # unusable parameters may be impossible to describe, and options are not the problem
            pairs, request = [], "GradientBuckets"
        over_data = tuple(
            describe(name, parameter) + " summed over tensor-parallel ranks" * marked
            for name, parameter, marked in pairs
        )
        # Between tensor-parallel ranks shards of one parameter may differ in shape, marked ones may not.
        over_tensor = tuple(
            describe(name, parameter) if marked else f"'{name}'" for name, parameter, marked in pairs
        )
        group, tensor_parallel_group = self._options.group, self._options.tensor_parallel_group
        if tensor_parallel_group is None:
            agree(Claim(request, over_data, problem), group.get())
            return
        try:
            agree(Claim(request, over_data, problem), group.get())
        except (TypeError, ValueError, ImportError) as error:  # other data-parallel groups must raise, too
            heard = dist.get_process_group_ranks(group.get())
            if set(dist.get_process_group_ranks(tensor_parallel_group.get())) <= set(heard):
                raise
            problem = type(error).__name__, str(error)
        agree(Claim(request, over_tensor, problem), tensor_parallel_group.get())


class _NoSync(AbstractContextManager[None]):
    def __init__(self, step: BucketStep, postpone: Callable[[int], None]) -> None:
        self._step, self._postpone = step, postpone

    @part_of_a_step
    def __enter__(self) -> None:
        self._postpone(1)

    @part_of_a_step
    def __exit__(self, *_: object) -> None:
        self._postpone(-1)


def _let_go(
    engine: Engine,
    memory: BucketMemory,
    parameters: Sequence[nn.Parameter],
    handles: Sequence[RemovableHandle],
) -> None:
    try:
        memory.leave(FAREWELL_SECONDS)  # garbage may be collected while other ranks wait for this one
    finally:  # after Ctrl-C, too
        engine.detach()
        memory.close()
        protocol.release(parameters, handles)


def _at(view: Tensor, flat: Tensor) -> Tensor:
    """Return a view of `flat` with the shape, strides and offset of `view`, a view of a bucket."""
    return flat.as_strided(view.shape, view.stride(), flat.storage_offset() + view.storage_offset())
