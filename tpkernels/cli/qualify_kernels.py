"""Tests every kernel against float64, at random shapes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest.mock import patch

import torch

from tpkernels.cli.qualify_world import Check, QualifyWorld, versions_here
from tpkernels.dispatch.cache import Cache
from tpkernels.dispatch.verdicts import recorded
from tpkernels.files import cache_folder
from tpkernels.gate.accuracy import Frames
from tpkernels.gate.numerics import NumericCase, cases, examine
from tpkernels.kernels import launch
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import fp8_obstacle, target_of

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


def check_trials(world: QualifyWorld) -> Iterator[Check]:
    """Yield a check for each kernel that child processes have tried on this model of GPU."""
    for variant, found in recorded(Cache(cache_folder(), versions_here())):
        step, _, candidate = variant.rpartition(" ")
        yield Check("trials", step, "right" if found == "passed" else "left out", f"{candidate} {found}")


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
