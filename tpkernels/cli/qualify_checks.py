"""The checks of `qualify`: kernels against float64, times over each transport, gradient buckets."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from tpkernels.buckets import registered
from tpkernels.buckets.gradients import GradientBuckets
from tpkernels.buckets.registered import Collective
from tpkernels.cli.qualify_world import Check, LeftOut, QualifyWorld
from tpkernels.comm.agreement import CannotTakePart
from tpkernels.comm.groups import start_all_gather, start_reduce_scatter
from tpkernels.dispatch.numeric_cases import cases
from tpkernels.extension import ExtensionState, extension
from tpkernels.gate.numerics import Frames, NumericCase, examine
from tpkernels.kernels import launch
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import fp8_obstacle, target_of
from tpkernels.ops import parallel_mlp

SHARE = 0.4  # of all the time
MOST_QUICK = 4  # cases of a rank
# Descriptors take rows of whole 16-byte units. The interpreter's tiles are small, so shapes straddle tiles.
GPU_UNITS, CPU_UNITS = (16, 160), (8, 14)
POINTER = (65, 97)
# launchers for fp8, which older GPUs cannot multiply
IN_FP8 = ("scaled_linear_fwd", "quantize", "quantize_act", "quantize_glu", "dequantize")


def check_kernels(world: QualifyWorld) -> Iterator[Check]:
    """Yield a check for each launcher, with the worst of its cases on all ranks."""
    faults, found = world.all_do(lambda: _computed(world))
    if faults:
        yield Check("kernels", "all", "wrong", "; ".join(faults))
        return
    worst: dict[str, tuple[int, float, list[str]]] = {}
    for rank, (_, cases_of_rank) in enumerate(found):
        for name, error, failure in cases_of_rank:
            launcher, _, rest = name.partition("/")
            count, most, failures = worst.get(launcher, (0, 0.0, []))
            if failure:
                failures = [*failures, f"rank {rank}: {rest} {failure}"]
            worst[launcher] = count + 1, max(most, error), failures
    for launcher, (count, most, failures) in sorted(worst.items()):
        cases_done = f"{count} case{'s' * (count > 1)}"
        said = f"{cases_done}, at most {most:.2f} of what is allowed against float64"
        said = "; ".join(failures) or said
        yield Check("kernels", launcher, "wrong" if failures else "right", said)
    if others := sorted(found[0][0] - set(worst)):  # in a quick run
        yield Check("kernels", "others", "left out", ", ".join(others))


def _computed(world: QualifyWorld) -> tuple[set[str], list[tuple[str, float, str]]]:
    """Return all launchers, and (name, error as a fraction of the bound, failure) of this rank's cases."""
    draw = random.Random(world.seed)
    all_cases = [case for _ in range(2) for case in cases(_sizes(draw, world.on_gpu))]
    if world.on_gpu and not target_of(world.device).has_tma:
        all_cases = [case for case in all_cases if "/descriptor/" not in case.name]
    if world.on_gpu and fp8_obstacle(target_of(world.device)):
        all_cases = [case for case in all_cases if _launcher(case) not in IN_FP8]
    launchers = {_launcher(case) for case in all_cases}
    order = list(enumerate(_one_of_each_first(all_cases, draw)))
    if not world.on_gpu:  # ranks share the work; each GPU does all of it
        order = order[world.rank :: world.ranks]
    torch.manual_seed(world.seed + world.rank)
    frames, computed = Frames(), []
    with patch.object(launch, "allocate", frames.empty), torch.device(world.device):
        for number, case in order[: MOST_QUICK if world.quick else None]:
            if number >= len(launchers) and world.late(SHARE):
                break
            one = examine(case, frames)
            computed.append((one.case, one.error, one.failure))
    return launchers, computed


def _launcher(case: NumericCase) -> str:
    return case.name.partition("/")[0]


def _sizes(draw: random.Random, on_gpu: bool) -> dict[Form, tuple[int, int, int]]:
    tokens, out_units, in_units = (draw.randint(*(GPU_UNITS if on_gpu else CPU_UNITS)) for _ in range(3))
    return {
        "descriptor": (8 * tokens - draw.randrange(8), 8 * out_units, 8 * in_units),
        "pointer": (draw.randint(*POINTER), draw.randint(*POINTER), draw.randint(*POINTER)),
    }


def _one_of_each_first(all_cases: list[NumericCase], draw: random.Random) -> list[NumericCase]:
    """Return the cases in random order, but one of each launcher before a second of any."""
    draw.shuffle(all_cases)
    seen: dict[str, int] = {}
    turns = []
    for case in all_cases:
        turns.append(seen.setdefault(_launcher(case), 0))
        seen[_launcher(case)] += 1
    return [all_cases[i] for i in sorted(range(len(all_cases)), key=turns.__getitem__)]


ROUNDS, ROUNDS_QUICK, WARM_UPS = 15, 3, 2
NAIVE = "naive"  # all-gather, products, reduce-scatter, one after the other, by torch
GPU_SIZES, CPU_SIZES = (8192, 4096, 14336), (1024, 512, 1024)  # tokens, features, features between


def check_times(world: QualifyWorld) -> Iterator[Check]:
    sizes = GPU_SIZES if world.on_gpu else CPU_SIZES
    operands = _operands(world, *sizes)
    possible = [name for name, obstacle in world.transports().items() if not obstacle]
    with ExitStack() as opened:
        ways: dict[str, Callable[[], Tensor]] = {}
        for transport in possible:
            group = opened.enter_context(world.group_over(transport))
            ways[transport] = partial(_ours, world, transport, operands, group)
        if world.ranks > 1:
            ways[NAIVE] = partial(_naive, operands, opened.enter_context(world.group_over("c10d")))
        else:
            ways["alone"] = partial(
                _ours, world, "c10d", operands, opened.enter_context(world.group_over("c10d"))
            )
        name = f"MLP {'x'.join(map(str, sizes))}"
        yield world.timed("times", name, partial(_interleaved, world, ways), "forward")


def _operands(world: QualifyWorld, tokens: int, features: int, between: int) -> list[Tensor]:
    """Return this rank's x, w_up and w_down."""
    make = torch.Generator(world.device).manual_seed(world.seed)
    dtype = torch.bfloat16 if world.on_gpu else torch.float32
    ranks = world.ranks
    shapes = (tokens // ranks, features), (between // ranks, features), (features, between // ranks)
    return [torch.randn(s, generator=make, device=world.device).mul_(s[1] ** -0.5).to(dtype) for s in shapes]


def _ours(world: QualifyWorld, transport: str, operands: list[Tensor], group: ProcessGroup) -> Tensor:
    x, w, w2 = operands
    with world.asking_for(transport):
        return parallel_mlp(x, w, None, w2, None, group, sequence_parallel=True)


def _naive(operands: list[Tensor], group: ProcessGroup) -> Tensor:
    x, w, w2 = operands
    full = x.new_empty(x.shape[0] * group.size(), x.shape[1])
    start_all_gather(group, full, x).wait()
    partial_sum = functional.linear(functional.gelu(functional.linear(full, w), approximate="tanh"), w2)
    y = torch.empty_like(x)
    start_reduce_scatter(group, y, partial_sum, dist.ReduceOp.SUM, None).wait()
    return y


def _interleaved(world: QualifyWorld, ways: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Return milliseconds of each way in each round; each round begins with another way."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    with torch.no_grad():
        for number in range(WARM_UPS + (ROUNDS_QUICK if world.quick else ROUNDS)):
            for way in (*order[number % len(order) :], *order[: number % len(order)]):
                world.synchronize()
                dist.barrier()
                began = time.perf_counter()
                ways[way]()
                world.synchronize()
                if number >= WARM_UPS:
                    times[way].append(1e3 * (time.perf_counter() - began))
    return times


def auto_line(world: QualifyWorld, times: dict[str, float]) -> str:
    """Return in a line the transport that TPKERNELS_TRANSPORT=auto takes for the timed MLP, and why."""
    if world.ranks == 1:
        return "auto: nothing to send, a rank is alone"
    operands, heard = _operands(world, *(GPU_SIZES if world.on_gpu else CPU_SIZES)), _Heard()
    logger = logging.getLogger("tpkernels.choices")  # in which transports say what they chose, and why
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with world.group_over("auto") as group, torch.no_grad():
            faults, _ = world.all_do(partial(_ours, world, "auto", operands, group))
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    if faults:
        return f"auto: fails here: {'; '.join(faults)}"
    chosen = "; ".join(dict.fromkeys(heard.of_transports())) or "c10d (the default)"
    measured = ", ".join(f"{way} {ms:.3g} ms" for way, ms in times.items())
    return f"auto: {chosen}{'; measured: ' * bool(measured)}{measured}"


class _Heard(logging.Handler):
    """Keeps logged messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def of_transports(self) -> list[str]:
        """Return each choice with its reason, without its group."""
        return [text.rpartition(" ranks: ")[2] for text in self.messages if "process group" in text]


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
