"""What each rank of `qualify` tries: the gate's numeric cases, then ops over a group on each transport.

All ranks do each step together, and each gets all ranks' results. Rank 0 prints each result at once, so that
a rank that dies loses none.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.cli import write_json
from tpkernels.cli.op_programs import IDS, OP_PROGRAMS
from tpkernels.comm.transports import select
from tpkernels.comm.transports.symmetric import EPOCHS
from tpkernels.dispatch import backends
from tpkernels.dispatch.cache import versions_for
from tpkernels.gate.numerics import BOUND, Frames, NumericCase, examine, relative_error
from tpkernels.kernels import launch
from tpkernels.kernels.operands import Form
from tpkernels.kernels.target import Target, fp8_obstacle, target_of
from tpkernels.registered.numeric_cases import cases
from tpkernels.training.launch import device_of_rank, hold_lifeline, join_world

# of one call: a rank that takes longer has failed. On GPUs the first call compiles kernels.
CALL_SECONDS, GPU_CALL_SECONDS = 30.0, 300.0
STEP_SECONDS = 600.0  # in which all ranks end a step, failed or not
KERNELS_SHARE = 0.4  # of all the time
CASES_QUICK, CALLS_QUICK = 4, 32  # of a rank; on each transport
# Descriptors take rows of whole 16-byte units. The interpreter's tiles are small, so shapes straddle tiles.
GPU_UNITS, CPU_UNITS = (16, 160), (8, 14)
POINTER = (65, 97)
IN_TURN, IN_A_ROW = 3, EPOCHS + 8  # calls of each problem; of the last: flags wrap around
AT_ONCE = 8  # calls between two looks at the clock
DELAYS = (0.0, 0.0, 0.0, 5e-4, 2e-3)  # seconds of a rank before a call
DTYPES = (torch.float32, torch.bfloat16)
TIMES_BOUND = 4.0  # two products, an activation and a sum over ranks round once each


@dataclass(frozen=True)
class Check:
    """One line of the table of `qualify`: a test and its result."""

    part: str  # SMs, kernels, transports, calls
    name: str
    status: Literal["right", "wrong", "left out"]
    text: str


@dataclass
class QualifyWorld:
    """One rank of `qualify`. All ranks do each step together, even if one of them fails."""

    device: torch.device
    seed: int
    seconds: float  # for all of it
    quick: bool
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.on_gpu = self.device.type == "cuda"
        self.seed = self.all_do(lambda: self.seed)[1][0]

    def all_do(self, step: Callable[[], Any]) -> tuple[str, list[Any]]:
        """Do a step on all ranks, also if it fails on some; return all errors in words, and the results."""
        fault, value = "", None
        try:
            value = step()
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
        except Exception as error:  # any error becomes a line of the table
            fault = f"rank {self.rank}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        answers: list[Any] = [None] * self.ranks
        dist.all_gather_object(answers, (fault, value))  # tests never use the default group
        return "; ".join(fault for fault, _ in answers if fault), [value for _, value in answers]

    def late(self, share: float) -> bool:
        """Whether that fraction of the time is over, by this rank's clock."""
        return time.monotonic() - self.began > share * self.seconds

    def transports(self) -> dict[str, str]:
        """Return the transports of this device, each with the reason to leave it out, or ""."""
        if self.ranks == 1:
            in_memory = ("symmetric", select.IN_ROUNDS) if self.on_gpu else ("shared",)
            return dict.fromkeys(("c10d", *in_memory), "a rank alone sends nothing")
        if not self.on_gpu:
            return {"c10d": "", "shared": ""}
        gpus = torch.cuda.device_count()
        pairs = ((i, j) for i in range(gpus) for j in range(i))
        apart = [f"{i} and {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
        why = f"GPUs {apart[0]} do not reach each other's memory" if apart else ""
        several = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks)) < self.ranks
        in_rounds = why or "ranks are on several machines" * several
        return {"c10d": "", "symmetric": why, select.IN_ROUNDS: in_rounds}


def qualify_as_rank(options: Namespace) -> int:
    """Test this machine as one rank of a running world; return the exit code."""
    hold_lifeline()
    assert sys.__stderr__ is not None, "a rank has its launcher's stderr"
    # ends a rank that hangs
    faulthandler.dump_traceback_later(3 * options.seconds + 180, exit=True, file=sys.__stderr__)
    try:
        torch.set_num_threads(1)
        device = device_of_rank()
        join_world("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=STEP_SECONDS))
        seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
        code = _qualified(QualifyWorld(device, seed, options.seconds, options.quick), options)
        dist.barrier()
        dist.destroy_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return code


def _qualified(world: QualifyWorld, options: Namespace) -> int:
    """Try everything; rank 0 prints each check at once, and writes the report."""
    versions = versions_for(torch.cuda.get_device_name(world.device) if world.on_gpu else "cpu")

    def tell(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    tell(f"{versions.gpu}, torch {versions.torch}, triton {versions.triton}")
    tell(f"{world.ranks} ranks, --seed {world.seed}")
    checks = []
    for part in (check_reserved_sms, check_kernels, check_transports):
        for check in part(world):
            checks.append(check)
            tell(f"{check.status:<8}  {check.part:<10}  {check.name}: {check.text}")
    wrong = [f"{check.part} {check.name}" for check in checks if check.status == "wrong"]
    tell(f"not qualified: {', '.join(wrong)}" if wrong else "qualified")
    if world.rank == 0 and options.json is not None:
        report = {"right": not wrong, "versions": asdict(versions), "ranks": world.ranks, "seed": world.seed}
        write_json(options.json, report | {"checks": [asdict(check) for check in checks]})
    return 1 if wrong else 0


def check_reserved_sms(world: QualifyWorld) -> Iterator[Check]:
    """Yield a check for each library: do its products leave SMs to collectives? The answers are kept."""
    if not world.on_gpu:
        yield Check("SMs", "all", "left out", "a CPU has none to reserve")
        return
    from tpkernels.cli.sm_probe import probe_and_keep  # its kernel is for GPUs

    # of GPUs of one name one answer is kept: rank 0's, beside nobody else's product
    fault, found = world.all_do(lambda: probe_and_keep(world.device) if world.rank == 0 else {})
    if fault:
        yield Check("SMs", "all", "wrong", fault)
        return
    for library, answer in found[0].items():
        bad = library == "ours" and not answer.obeys  # of others it is good to know
        yield Check("SMs", library, "wrong" if bad else "right", str(answer))


def check_kernels(world: QualifyWorld) -> Iterator[Check]:
    """Yield a check for each launcher, with the worst of its cases on all ranks."""
    fault, found = world.all_do(lambda: computed_cases(world))
    if fault:
        yield Check("kernels", "all", "wrong", fault)
        return
    worst: dict[str, tuple[int, float, list[str]]] = {}
    for rank, (_, cases_of_rank) in enumerate(found):
        for name, error, failure in cases_of_rank:
            launcher, _, rest = name.partition("/")
            done, most, failures = worst.get(launcher, (0, 0.0, []))
            failures = failures + [f"rank {rank}: {rest} {failure}"] * bool(failure)
            worst[launcher] = done + 1, max(most, error), failures
    for launcher, (done, most, failures) in sorted(worst.items()):
        said = f"{done} case{'s' * (done > 1)}, at most {most:.2f} of what is allowed against float64"
        yield Check("kernels", launcher, "wrong" if failures else "right", "; ".join(failures) or said)
    if others := sorted(found[0][0] - set(worst)):  # in a quick run
        yield Check("kernels", "others", "left out", ", ".join(others))


def computed_cases(world: QualifyWorld) -> tuple[set[str], list[tuple[str, float, str]]]:
    """Return all launchers, and (name, error as a fraction of the bound, failure) of this rank's cases."""
    draw = random.Random(world.seed)
    target = target_of(world.device) if world.on_gpu else None
    all_cases = [
        case for _ in range(2) for case in cases(_sizes(draw, world.on_gpu)) if runs_on(case, target)
    ]
    draw.shuffle(all_cases)
    seen = Counter[str]()

    def turn(case: NumericCase) -> int:  # one of each launcher before a second of any
        seen[case.name.partition("/")[0]] += 1
        return seen[case.name.partition("/")[0]]

    order = list(enumerate(sorted(all_cases, key=turn)))
    if not world.on_gpu:  # ranks share the work; each GPU does all of it
        order = order[world.rank :: world.ranks]
    torch.manual_seed(world.seed + world.rank)
    frames, computed = Frames(), []
    with patch.object(launch, "allocate", frames.empty), torch.device(world.device):
        for number, case in order[: CASES_QUICK if world.quick else None]:
            if number >= len(seen) and world.late(KERNELS_SHARE):
                break
            one = examine(case, frames)
            computed.append((one.case, one.error, one.failure))
    return set(seen), computed


def runs_on(case: NumericCase, target: Target | None) -> bool:
    """Whether a GPU can run a case; None: the interpreter, which runs all."""
    launcher, *options = case.name.split("/")
    in_fp8 = "fp8" in options or launcher in ("quantize", "dequantize")
    by_descriptors = "descriptor" in options and launcher != "segment_sum"  # which chooses its form itself
    return target is None or not (
        (by_descriptors and not target.has_tma) or (in_fp8 and fp8_obstacle(target))
    )


def _sizes(draw: random.Random, on_gpu: bool) -> dict[Form, tuple[int, int, int]]:
    tokens, out_units, in_units = (draw.randint(*(GPU_UNITS if on_gpu else CPU_UNITS)) for _ in range(3))
    return {
        "descriptor": (8 * tokens - draw.randrange(8), 8 * out_units, 8 * in_units),
        "pointer": (draw.randint(*POINTER), draw.randint(*POINTER), draw.randint(*POINTER)),
    }


class Problem(NamedTuple):
    """An op, whether it is sequence-parallel, and its full operands with the gradient of its result."""

    name: str
    split: bool
    full: list[Tensor]


def problems_of(seed: int, ranks: int) -> Iterator[Problem]:
    """Yield problems of each op, whose shards are sent as one chunk and as four, the same on all ranks."""
    draw = random.Random(seed)
    for (name, op), large, dtype in product(OP_PROGRAMS.items(), (False, True), DTYPES):
        # large: at least 512 KiB in bf16, of rows that four chunks divide
        rows = 4 * draw.randint(128, 136) if large else draw.randint(9, 40)
        sizes = {letter: 8 * (draw.randint(64, 68) if large else draw.randint(4, 12)) for letter in "FO"}
        sizes |= {letter: 8 * draw.randint(2, 6) * ranks for letter in "BV"} | {"T": rows * ranks}
        make = torch.Generator().manual_seed(draw.getrandbits(48))
        full = []
        for number, (operand, shape) in enumerate(op.shapes(sizes).items()):
            if operand == IDS:
                full.append(torch.randint(sizes["V"], shape, generator=make))
            else:
                scale = shape[1] ** -0.5 if number and len(shape) == 2 else 1.0
                full.append(torch.randn(shape, generator=make).mul_(scale).to(dtype))
        for split in (True, False)[not op.by_tokens :]:
            yield Problem(name, split, full)


def check_transports(world: QualifyWorld) -> Iterator[Check]:
    """Yield checks of each transport: results against float64, and bits of delayed calls."""
    transports, problems = world.transports(), list(problems_of(world.seed, world.ranks))
    possible = [name for name, obstacle in transports.items() if not obstacle]
    # our kernels on a GPU, without timing candidates; torch on a CPU
    with patch.object(backends, "backend", "triton" if world.on_gpu else "torch"):
        for transport, obstacle in transports.items():
            if obstacle:
                yield Check("transports", transport, "left out", obstacle)
                continue
            # of its own: a call that fails ends the calls of its group only
            seconds = GPU_CALL_SECONDS if world.on_gpu else CALL_SECONDS
            group = dist.new_group(timeout=timedelta(seconds=seconds))
            share = KERNELS_SHARE + (1 - KERNELS_SHARE) * (possible.index(transport) + 1) / len(possible)
            with patch.object(select, "requested_transport", transport):
                fault, worst = world.all_do(lambda: _worst_error(world, problems, group))  # noqa: B023
                said = (
                    f"at most {max(filter(None, worst), default=0.0):.2f} of what is allowed against float64"
                )
                yield Check("transports", transport, "wrong" if fault else "right", fault or said)
                if not fault:
                    yield delayed_calls(world, transport, problems, group, share)


def _worst_error(world: QualifyWorld, problems: Sequence[Problem], group: ProcessGroup) -> float:
    """Return the largest error, as a fraction of what is allowed; raise if one is not allowed."""
    worst = 0.0
    for name, split, full in problems:
        op, dtype = OP_PROGRAMS[name], full[-1].dtype
        found = op.results(full, group, split, world.device)
        pairs = zip(found, op.exact_results(full, group, split), strict=True)
        for what, (actual, exact) in enumerate(pairs):
            error = relative_error(actual.cpu(), exact) / (TIMES_BOUND * BOUND[dtype])
            if not error < 1:
                raise ArithmeticError(
                    f"{name} in {dtype}: {_name_of(what)}, of shape {tuple(exact.shape)}, is off by "
                    f"{error:.3g} times what is allowed against float64"
                )
            worst = max(worst, error)
    return worst


def _name_of(what: int) -> str:
    return f"gradient {what}" if what else "the result"


def delayed_calls(
    world: QualifyWorld, transport: str, problems: Sequence[Problem], group: ProcessGroup, share: float
) -> Check:
    """Check that each call has the bits of the first call with its operands, whatever ranks are late.

    In turn problems need more exchanges than stay open, so that these close and open. In a row an exchange
    goes through its slots again and again, and through all numbers that its flags can hold.
    """
    first: dict[int, list[Tensor]] = {}
    delay, done = random.Random(f"{world.seed} {world.rank}"), 0
    order = [*range(len(problems))] * IN_TURN + [len(problems) - 1] * IN_A_ROW
    order = order[: CALLS_QUICK if world.quick else None]

    def some_calls() -> bool:
        for call in range(done, min(done + AT_ONCE, len(order))):
            time.sleep(delay.choice(DELAYS))
            if world.on_gpu:
                torch.cuda._sleep(delay.randrange(2_000_000))  # about a millisecond at most
            name, split, full = problems[order[call]]
            found = OP_PROGRAMS[name].results(full, group, split, world.device)
            for what, (ours, once) in enumerate(
                zip(found, first.setdefault(order[call], found), strict=True)
            ):
                if not torch.equal(ours, once):
                    most = float((ours.double() - once.double()).abs().max())
                    raise ArithmeticError(
                        f"call {call} of {name} in {ours.dtype}: {_name_of(what)} differs from that "
                        f"of its first call in {int((ours != once).sum())} of {ours.numel()} values, "
                        f"by up to {most:.2e}"
                    )
        return world.late(share)

    while done < len(order):
        fault, late = world.all_do(some_calls)
        if fault:
            return Check("calls", transport, "wrong", fault)
        done = min(done + AT_ONCE, len(order))
        if late[0]:
            break
    cut_short = f" (of {len(order)}: the time was over; --seconds gives more)" * (done < len(order))
    said = f"{done} delayed calls{cut_short}, forward and backward, have the bits of the first"
    return Check("calls", transport, "right", said)
