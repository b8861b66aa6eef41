"""Tests and times gradient buckets: exact sums, in the memory that TPKERNELS_TRANSPORT chooses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpkernels.buckets import registered
from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.buckets.registered import Collective
from tpkernels.cli.qualify_world import Check, LeftOut, QualifyWorld
from tpkernels.comm.agreement import CannotTakePart
from tpkernels.extension import ExtensionState, extension

WAYS = "c10d", "auto"
REDUCTIONS: tuple[Collective, ...] = "all_reduce", "reduce_scatter"
STEPS, STEPS_QUICK, LEARNING = 12, 3, 2  # the first step learns the order of buckets
PARAMETERS = 12
GPU_ELEMENTS, CPU_ELEMENTS = 2**20, 2**16  # of each


def check_buckets(world: QualifyWorld) -> Iterator[Check]:
    if world.ranks == 1:
        yield Check("buckets", "gradients", "left out", "a rank alone sends nothing")
        return
    if extension().state is ExtensionState.LOADED:
        yield _gradients(world)
    else:
        yield Check("buckets", "gradients", "left out", "the C++ extension is not built")
    if world.on_gpu:  # memory registered with NCCL, whatever timing would choose
        with world.group_over("auto") as group:
            yield world.check("buckets", "registered", partial(_in_registered_memory, world, group))


def _gradients(world: QualifyWorld) -> Check:
    """Return the check of interleaved steps with buckets of each way."""
    with ExitStack() as opened:
        groups = {way: opened.enter_context(world.group_over(way)) for way in WAYS}
        steps = partial(_steps, world, groups)
        return world.timed("buckets", "gradients", steps, "exact sums; backward")


def _steps(world: QualifyWorld, groups: dict[str, ProcessGroup]) -> dict[str, list[float]]:
    """Return milliseconds of each step of each way; raise for a wrong sum once no rank waits for this one."""
    elements = GPU_ELEMENTS if world.on_gpu else CPU_ELEMENTS
    found: dict[str, list[float]] = {way: [] for way in groups}
    models, buckets = {}, {}
    wrong = ""
    for way, group in groups.items():
        models[way] = [nn.Parameter(torch.zeros(elements, device=world.device)) for _ in range(PARAMETERS)]
        named = [(str(index), parameter) for index, parameter in enumerate(models[way])]
        with world.asking_for(way):
            buckets[way] = GradientBuckets(named, group, average=False)
    for step in range(LEARNING + (STEPS_QUICK if world.quick else STEPS)):
        for way, parameters in models.items():
            own, summed = numbers(world, elements, step, world.rank + 1), world.ranks * (world.ranks + 1) // 2
            world.synchronize()
            dist.barrier()
            began = time.perf_counter()
            with world.asking_for(way):
                buckets[way].zero()
                sum(((parameter * own).sum() for parameter in parameters), torch.zeros(())).backward()
                buckets[way].finish()
            world.synchronize()
            if step >= LEARNING:
                found[way].append(1e3 * (time.perf_counter() - began))
            expected = numbers(world, elements, step, summed)
            for index, parameter in enumerate(parameters):
                if parameter.grad is None or not torch.equal(parameter.grad, expected):
                    wrong = wrong or f"step {step} over {way}: the sum of gradient {index} is wrong"
    for each in buckets.values():
        each.detach()
    if wrong:
        raise ArithmeticError(wrong)
    return found


def numbers(world: QualifyWorld, elements: int, step: int, factor: int) -> Tensor:
    """Return whole numbers whose sums are exact."""
    return torch.arange(step, step + elements, device=world.device).remainder_(251).mul_(factor).float()


def _in_registered_memory(world: QualifyWorld, group: ProcessGroup) -> str:
    """Return times of sums in registered memory, or why there is none."""
    elements, said, wrong = PARAMETERS * GPU_ELEMENTS // world.ranks * world.ranks, [], ""
    try:
        registered.connected_by_all(group, world.device)
        flats, plain = registered.registered_by_all(
            group, [elements], [torch.float32], world.device, beside=0
        )
    except CannotTakePart as error:  # on all ranks alike
        return LeftOut(error)
    for reduction in REDUCTIONS:
        ours, theirs = registered.slowest(group, [*flats, *plain], reduction)
        said.append(f"{reduction}: registered {ours:.3g} ms, plain {theirs:.3g} ms")
        for flat in (*flats, *plain):
            flat.copy_(numbers(world, elements, 0, world.rank + 1))
            registered.reduce(group, flat, reduction)
            expected = numbers(world, elements, 0, world.ranks * (world.ranks + 1) // 2)
            if reduction == "reduce_scatter":
                flat, expected = (t.tensor_split(world.ranks)[world.rank] for t in (flat, expected))
            if not torch.equal(flat, expected):
                wrong = wrong or f"{reduction} of {elements} numbers: the sums are wrong"
        for flat in (*flats, *plain):
            flat.zero_()
    del flat
    flats.clear()
    registered.give_back_unused()
    if wrong:
        raise ArithmeticError(wrong)
    return f"exact sums of {elements * 4 / 2**20:.3g} MiB; {'; '.join(said)}"
