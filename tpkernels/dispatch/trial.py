"""Kernels that this GPU never ran, tried in a child process: one may wait for ever, and its process with it.

The parent reads what its child tells (see `trial_child`), and looks at the clock. A stage that lasts too long
is a hang: the child is killed, and another one tries the rest. All of it ends within `Limits.all`.

Each rank tries on its own GPU, although those of a machine come here at once: nobody waits for another
process, so none can wait for ever, and it costs all of them the same seconds at the same time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tpkernels.dispatch.variant import Variant
from tpkernels.files import parsed
from tpkernels.gate.child import ending, started

Outcome = Literal["passed", "wrong", "hung", "crashed"]
Stage = Literal["compiling", "running"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How many seconds a trial, and each of its stages, may take."""

    compiling: float = 60.0
    running: float = 20.0  # for microseconds of work: the GPU may be shared, and the machine busy
    all: float = 120.0
    poll: float = 0.02


LIMITS = Limits()
OVER = "seconds are over"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a variant."""

    outcome: Outcome
    said: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}{': ' * bool(self.said)}{self.said}"


@dataclass(slots=True)
class TrialReport:
    """What a trial found, and what ended it before all had a verdict, if something did."""

    verdicts: dict[Variant, Verdict] = field(default_factory=dict)
    obstacle: str = ""


# With the parent's sys.path: it may have found this package where no child would look.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tpkernels.dispatch.trial_child import main; main()"
)


def trial(
    variants: Sequence[Variant],
    device: torch.device,
    limits: Limits = LIMITS,
    command: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> TrialReport:
    """Try variants on a device of this process.

    command: of a child; by default the real one
    """
    report, left = TrialReport(), list(variants)
    deadline = clock() + limits.all
    command = command or (sys.executable or "python", "-c", _PROGRAM, json.dumps(list(map(str, sys.path))))
    while left and not report.obstacle:
        watch = _ChildReport(left, limits, clock, deadline)
        try:
            with started(command, _asked(left, device, limits), _environment()) as child:
                # whether it has ended is asked before its lines are read, of which none is missed so
                while watch.goes_on(ended=child.ended(), lines=child.lines()):
                    time.sleep(limits.poll)
                watch.conclude(child.end(), child.last_words())
        except OSError as error:  # no room for files, or for a process
            report.obstacle = str(error)
            break
        report.verdicts |= watch.verdicts
        report.obstacle = watch.obstacle
        left = [variant for variant in left if variant not in watch.verdicts]
    return report


def _asked(variants: Sequence[Variant], device: torch.device, limits: Limits) -> str:
    """What the child reads: the index that the environment gives the device, and its UUID to be sure."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    fields = [variant.as_json() for variant in variants]
    return json.dumps({"device": str(device), "uuid": uuid, "seconds": limits.all, "variants": fields})


def _environment() -> dict[str, str]:
    """The parent's, but that a launch returns at once, and a fault stays in its process.

    Processes that share a GPU through MPS share a fault, too. Without its daemon the driver does without it.
    """
    ours = {name: value for name, value in os.environ.items() if name != "CUDA_LAUNCH_BLOCKING"}
    return {**ours, "CUDA_MPS_PIPE_DIRECTORY": os.devnull}


class _ChildReport:
    """What the lines of a child mean, and its silence."""

    def __init__(
        self, variants: Sequence[Variant], limits: Limits, clock: Callable[[], float], deadline: float
    ) -> None:
        self.verdicts: dict[Variant, Verdict] = {}
        self.obstacle = ""
        self._variants = variants
        self._limits = limits
        self._clock = clock
        self._deadline = deadline
        self._ended = False
        self._busy: Variant | None = None  # what the child is at
        self._stage: Stage = "compiling"
        self._since = 0.0

    def goes_on(self, *, ended: bool, lines: Sequence[str]) -> bool:
        """Whether there is more to wait for."""
        for line in lines:
            if not self.obstacle:  # nothing counts that comes after one
                self._read(line)
        self._ended = ended
        if ended or self.obstacle or len(self.verdicts) == len(self._variants):
            return False
        now = self._clock()
        if self._busy is not None:
            limit = self._limits.running if self._stage == "running" else self._limits.compiling
            if now - self._since > limit:
                owed = "no result after its launch" if self._stage == "running" else "not compiled"
                self.verdicts[self._busy] = Verdict("hung", f"{owed} within {limit:g} seconds")
                return False
        if now > self._deadline:
            self.obstacle = f"{self._limits.all:g} {OVER}"
        return not self.obstacle

    def conclude(self, exit_code: int | None, last_words: str) -> None:
        """Judge a child that ended by itself, and one that cannot be made to end."""
        if exit_code is None:
            self.obstacle = "a child process that was killed does not end"
        elif self._ended and len(self.verdicts) < len(self._variants) and not self.obstacle:
            _, _, how = ending(exit_code).partition(" ")
            said = f"{how}{': ' * bool(last_words)}{last_words}"
            if -exit_code in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP):  # from outside
                self.obstacle = f"the child process was ended: {said}"
            elif self._busy is not None:
                self.verdicts[self._busy] = Verdict("crashed", said)
            elif not self.verdicts:  # else another one tries the rest
                self.obstacle = f"the child process ended: {said}"

    def _read(self, line: str) -> None:
        """Take a line; one that a child cannot mean is rubbish, and is passed over."""
        try:
            told = parsed(line)
        except ValueError:
            return
        match told:
            case {"cannot": str(why)}:
                self.obstacle = why
            case {"number": int(number), "stage": "compiling" | "running" as stage}:
                if not isinstance(number, bool) and 0 <= number < len(self._variants):
                    self._busy, self._stage, self._since = self._variants[number], stage, self._clock()
            case {"number": int(number), "outcome": "untried", "said": str(why)} if self._is_at(number):
                self.obstacle = why
            case {
                "number": int(number),
                "outcome": "passed" | "wrong" | "crashed" as outcome,
                "said": str(said),
            } if self._is_at(number):
                self.verdicts[self._variants[number]] = Verdict(outcome, said)
                self._busy = None

    def _is_at(self, number: int) -> bool:
        return self._busy is not None and self._busy in self._variants[number : number + 1]
