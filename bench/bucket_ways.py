"""Ways to reduce gradients and lists of tensors, for ranks to time: ours, DDP's, and a plain loop."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tpkernels import GradientBuckets, bucketed_all_reduce_
from tpkernels.comm.engine import EngineChoice

Way = Callable[[], object]
Shapes = list[tuple[int, ...]]


def gpt2_small() -> Shapes:
    """GPT-2 small's 148 parameters: 124 million elements."""
    width, vocabulary, tokens = 768, 50257, 1024
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (tokens, width), *layer * 12, (width,), (width,)]


def small_tensors() -> Shapes:
    """400 tensors of a width of 32: what a launch for each costs."""
    return [(32,), (32, 32), (32,), (32, 128)] * 100


LISTS: dict[str, Callable[[], Shapes]] = {"gpt2_small": gpt2_small, "400_small": small_tensors}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class UsesAll(nn.Module):
    """A loss that every parameter has a part in, with as little arithmetic as can be."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum() * 0
        for parameter in self.all:
            total = total + (parameter * x).sum()
        return total


def with_buckets(shapes: Shapes, group: dist.ProcessGroup, engine: EngineChoice) -> Way:
    module = UsesAll(shapes)
    buckets = GradientBuckets(module, group, engine=engine)

    def step() -> None:
        buckets.zero()
        module(torch.ones(1)).backward()
        buckets.finish()

    return step


def with_ddp(shapes: Shapes, group: dist.ProcessGroup, *, views: bool) -> Way:
    module = DistributedDataParallel(
        UsesAll(shapes), process_group=group, bucket_cap_mb=25, gradient_as_bucket_view=views
    )

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(torch.ones(1)).backward()

    return step


def with_loop(shapes: Shapes, group: dist.ProcessGroup) -> Way:
    module = UsesAll(shapes)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(torch.ones(1)).backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)
            assert parameter.grad is not None
            parameter.grad /= group.size()

    return step


STEPS: dict[str, Callable[[Shapes, dist.ProcessGroup], Way]] = {
    "cpp": lambda shapes, group: with_buckets(shapes, group, "cpp"),
    "python": lambda shapes, group: with_buckets(shapes, group, "python"),
    "ddp": lambda shapes, group: with_ddp(shapes, group, views=False),
    "ddp_views": lambda shapes, group: with_ddp(shapes, group, views=True),
    "loop": with_loop,
}


def time_ways(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round on this rank; in each round all ways, from another one on each time."""
    for _ in range(3):
        for way in ways.values():
            way()
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        for position in range(len(names)):
            name = names[(round_ + position) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def time_steps(list_name: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Forward, backward and reduction of gradients; all ways in the same processes."""
    shapes = LISTS[list_name]()
    return time_ways({name: STEPS[name](shapes, world()) for name in names}, rounds)


def time_steps_apart(list_name: str, names: list[str], rounds: int) -> tuple[str, list[float], int]:
    """The same, each way with ranks of its own: (which way this rank is of, its seconds, page faults a step).

    Where gradients are large, ways in one process take each other's memory: what one gives back the next has
    to fault in. Ranks of the ways whose turn it is not wait meanwhile.
    """
    size = dist.get_world_size() // len(names)
    groups = [dist.new_group(range(first, first + size)) for first in range(0, dist.get_world_size(), size)]
    turn = dist.get_rank() // size
    step = STEPS[names[turn]](LISTS[list_name](), groups[turn])
    for _ in range(3):
        step()
    seconds = []
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for round_ in range(rounds):
        for position in range(len(names)):
            dist.barrier()
            if (round_ + position) % len(names) == turn:
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return names[turn], seconds, faults // rounds


def time_lists(list_name: str, rounds: int) -> dict[str, list[float]]:
    """An all-reduce of each tensor of a list."""
    tensors = [torch.ones(shape) for shape in LISTS[list_name]()]

    def loop() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    ways: dict[str, Way] = {
        "bucketed": lambda: bucketed_all_reduce_(tensors),
        "unchecked": lambda: bucketed_all_reduce_(tensors, check=False),
        "loop": loop,
    }
    return time_ways(ways, rounds)


def time_construction(rounds: int) -> dict[str, list[float]]:
    """Making `GradientBuckets` for 400 parameters, and DDP."""
    module = UsesAll(small_tensors())

    def construct(engine: EngineChoice) -> None:
        GradientBuckets(module, world(), engine=engine).detach()

    ways: dict[str, Way] = {
        "cpp": lambda: construct("cpp"),
        "python": lambda: construct("python"),
        "ddp": lambda: DistributedDataParallel(module, bucket_cap_mb=25),
    }
    return time_ways(ways, rounds)


def time_hooks(rounds: int) -> dict[str, list[float]]:
    """Backwards that only accumulate: what hooks add, without communication."""

    def accumulating(engine: EngineChoice | None) -> Way:
        module = UsesAll(small_tensors())
        buckets = GradientBuckets(module, world(), engine=engine) if engine else None

        def step() -> None:
            if buckets is None:
                module(torch.ones(1)).backward()
                return
            with buckets.no_sync():
                module(torch.ones(1)).backward()

        return step

    return time_ways(
        {"none": accumulating(None), "cpp": accumulating("cpp"), "python": accumulating("python")}, rounds
    )


def bytes_on_the_wire(list_name: str, wire_dtype: torch.dtype | None) -> tuple[int, int, int]:
    """What each rank brings to the collectives of a step, the size of the gradients, how many collectives."""
    module = UsesAll(LISTS[list_name]())
    buckets = GradientBuckets(module, world(), wire_dtype=wire_dtype, timeout=timedelta(seconds=60))
    sent = sum(bucket.numel() * (wire_dtype or bucket.dtype).itemsize for bucket in buckets.buckets)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    return sent, gradients, len(buckets.buckets)
