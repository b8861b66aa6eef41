"""Ways to reduce gradients and lists of tensors, for ranks to time: ours, DDP's, and a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.case import Case, Measured, Work
from bench.cases.blocking import world
from tpkernels import GradientBuckets, bucketed_all_reduce_
from tpkernels.comm.transports import select

Step = Callable[[], Sequence[Tensor]]
Shapes = list[tuple[int, ...]]


def gpt2_small() -> Shapes:
    """GPT-2 small's 148 parameters: 124 million elements."""
    width, vocabulary, tokens = 768, 50257, 1024
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (tokens, width), *layer * 12, (width,), (width,)]


def small_tensors(count: int) -> Shapes:
    """Of a width of 32: what a launch for each costs."""
    return [(32,), (32, 32), (32,), (32, 128)] * (count // 4)


LISTS: dict[str, Callable[[], Shapes]] = {
    "400_small": partial(small_tensors, 400),
    "5000_small": partial(small_tensors, 5000),
    "gpt2_small": gpt2_small,
}


class UsesAll(nn.Module):
    """A loss that every parameter has a part in, with as little arithmetic as can be."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes])

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for parameter in self.all:
            total = total + (parameter * x).sum()
        return total


def own_input(group: dist.ProcessGroup) -> Tensor:
    """Gradients differ from rank to rank, so that a sum that is not taken shows."""
    return torch.full((1,), 1.0 + group.rank())


def with_buckets(shapes: Shapes, group: dist.ProcessGroup, wire_dtype: torch.dtype | None = None) -> Step:
    module = UsesAll(shapes)
    buckets = GradientBuckets(module, group, wire_dtype=wire_dtype)

    def step() -> Sequence[Tensor]:
        buckets.zero()
        module(own_input(group)).backward()
        buckets.finish()
        return module.gradients()

    return step


def with_ddp(shapes: Shapes, group: dist.ProcessGroup, *, views: bool) -> Step:
    module = UsesAll(shapes)
    wrapped = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=25, gradient_as_bucket_view=views
    )

    def step() -> Sequence[Tensor]:
        wrapped.zero_grad(set_to_none=True)
        wrapped(own_input(group)).backward()
        return module.gradients()

    return step


def without_reduction(shapes: Shapes, group: dist.ProcessGroup) -> Step:
    """A floor: gradients are linear in the input, so those of its average need no other rank."""
    module = UsesAll(shapes)
    average = torch.full((1,), (1.0 + group.size()) / 2)

    def step() -> Sequence[Tensor]:
        module.zero_grad(set_to_none=True)
        module(average).backward()
        return module.gradients()

    return step


def with_loop(shapes: Shapes, group: dist.ProcessGroup) -> Step:
    module = UsesAll(shapes)

    def step() -> Sequence[Tensor]:
        module.zero_grad(set_to_none=True)
        module(own_input(group)).backward()
        average_in_a_loop(module.gradients(), group)
        return module.gradients()

    return step


def average_in_a_loop(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
        tensor /= group.size()


STEPS: dict[str, Callable[[Shapes, dist.ProcessGroup], Step]] = {
    "ours": with_buckets,
    "naive": lambda shapes, group: with_ddp(shapes, group, views=False),
    "ddp_views": lambda shapes, group: with_ddp(shapes, group, views=True),
    "alone": without_reduction,
    "loop": with_loop,
}


def reduced(op: str, list_name: str, pass_: str, naive: str) -> Work:
    """Describes a case that reduces a list over all ranks."""
    ranks = dist.get_world_size()
    list_bytes = sum(4 * torch.Size(shape).numel() for shape in LISTS[list_name]())
    return Work(
        op=op,
        shape=f"{list_name}-world{ranks}",
        pass_=pass_,
        naive=naive,
        world=ranks,
        bytes=None,
        wire_bytes=round(2 * (ranks - 1) / ranks * list_bytes),
        backend="gloo",
    )


def step_case(list_name: str, names: Sequence[str]) -> Case:
    """Forward, backward and reduction of gradients."""
    shapes = LISTS[list_name]()
    return Case(
        reduced("gradient_buckets", list_name, "step", "DistributedDataParallel"),
        {name: STEPS[name](shapes, world()) for name in names},
    )


def step_over_gloo(list_name: str, bfloat16: bool) -> Case:
    """As between machines: all bytes travel in collectives."""
    with patch.object(select, "requested_transport", "c10d"):
        case = step_case(list_name, ["naive", "ddp_views"])
        ours = with_buckets(LISTS[list_name](), world(), torch.bfloat16 if bfloat16 else None)
    work = replace(case.work, shape=f"{case.work.shape}-gloo{'-bfloat16' * bfloat16}")
    return Case(work, {"ours": ours, **case.ways}, tolerance=1e-2 if bfloat16 else None)


def low(seconds: Sequence[float]) -> float:
    """A tenth of the rounds took less: what neighbours on the machine disturbed least."""
    return sorted(seconds)[len(seconds) // 10]


def with_better_ddp(measured: Measured) -> Measured:
    """The naive way is DDP in the form that takes less, gradients copied or views of its buckets."""
    seconds = measured.seconds
    forms = {"ddp_copies": seconds["naive"]}
    if "ddp_views" in seconds:
        forms["ddp_views"] = seconds["ddp_views"]
    return measured._replace(seconds={**seconds, **forms, "naive": min(forms.values(), key=low)})


def list_case(list_name: str) -> Case:
    """An average of each tensor of a list."""

    def way(average: Callable[[list[Tensor]], object]) -> Step:
        tensors = [torch.full(shape, 1.0 + dist.get_rank()) for shape in LISTS[list_name]()]

        def run() -> Sequence[Tensor]:
            average(tensors)
            return tensors

        return run

    return Case(
        reduced("bucketed_all_reduce", list_name, "average", "a loop of all-reduces"),
        {
            "ours": way(partial(bucketed_all_reduce_, op="avg")),
            "unchecked": way(partial(bucketed_all_reduce_, op="avg", check=False)),
            "naive": way(partial(average_in_a_loop, group=world())),
        },
    )


def construction_case(list_name: str, names: Sequence[str]) -> Case:
    """Making `GradientBuckets`, and both forms of DDP."""
    module = UsesAll(LISTS[list_name]())

    def construct() -> Sequence[Tensor]:
        GradientBuckets(module, world()).detach()
        return []

    def wrap(*, views: bool) -> Sequence[Tensor]:
        DistributedDataParallel(module, bucket_cap_mb=25, gradient_as_bucket_view=views)
        return []

    ways: dict[str, Step] = {
        "ours": construct,
        "naive": partial(wrap, views=False),
        "ddp_views": partial(wrap, views=True),
    }
    return Case(
        reduced("gradient_buckets", list_name, "construction", "DistributedDataParallel"),
        {name: ways[name] for name in names},
    )


def hooks_case() -> Case:
    """Backwards that only accumulate: what hooks add, without communication."""

    def accumulating(*, hooks: bool) -> Step:
        module = UsesAll(small_tensors(400))
        buckets = GradientBuckets(module, world()) if hooks else None

        def step() -> Sequence[Tensor]:
            with buckets.no_sync() if buckets else nullcontext():
                module(own_input(world())).backward()
            return module.gradients()

        return step

    return Case(
        reduced("gradient_buckets", "400_small", "accumulation", "no hooks"),
        {"ours": accumulating(hooks=True), "naive": accumulating(hooks=False)},
    )
