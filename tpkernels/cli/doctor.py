"""`python -m tpkernels doctor`: checks this installation and environment variables, and reports problems.

Code that could crash runs in a process of its own: a torch that dies on import is a finding, too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from io import TextIOWrapper

from tpkernels import __version__
from tpkernels.cli.probe import PREFIX, SELF_TEST, Finding, note, ok, problem
from tpkernels.gate.child import ending, started

PROBE_SECONDS = 120
SELF_TEST_SECONDS = 120
OUR_VARIABLES = ("TPKERNELS_", "TRITON_", "TORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MASTER_")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

ALIKE = 0.85  # similarity from which a name without the prefix counts as a misspelling of ours


@dataclass(frozen=True)
class AllowedValues:
    """Allowed values of a variable, as a pattern and in words."""

    pattern: str
    expected: str
    words: tuple[str, ...] = ()  # all allowed values, if these are few

    def has(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None


def _one_of(*words: str, or_empty: bool = True) -> AllowedValues:
    pattern = "|".join(map(re.escape, words)) + "|" * or_empty
    return AllowedValues(pattern, f"{'one of ' * bool(words[1:])}{', '.join(words)}", words)


_SWITCH = AllowedValues("[01]?", "0 or 1", ("0", "1"))
_ANYTHING = AllowedValues("(?s:.*)", "anything")
POWERS_OF_TWO = tuple(str(2**power) for power in range(11))  # up to tp_invariance.MOST_SEGMENTS
VARIABLES = {
    "TPKERNELS_BACKEND": _one_of("auto", "torch", "triton", or_empty=False),
    "TPKERNELS_BACKEND_SUMS": _SWITCH,
    "TPKERNELS_BATCH_INVARIANT": _SWITCH,
    "TPKERNELS_CACHE_DIR": _ANYTHING,
    "TPKERNELS_CHECK_REPLICAS": AllowedValues("[0-9]*", "a number of optimizer steps, or 0 for never"),
    "TPKERNELS_CXXFLAGS": _ANYTHING,  # of setup.py
    "TPKERNELS_DEBUG": _SWITCH,
    "TPKERNELS_LIFELINE": _ANYTHING,  # from a launcher to its ranks
    "TPKERNELS_LOG": _one_of("choices"),
    "TPKERNELS_QUALIFY_PROGRESS": _ANYTHING,  # from `qualify` to its ranks
    "TPKERNELS_REQUIRE_EXT": _SWITCH,  # of setup.py
    "TPKERNELS_TP_INVARIANT": AllowedValues(
        f"0*({'|'.join(('0', *POWERS_OF_TWO))})?", "0 (off) or a power of two", ("0", *POWERS_OF_TWO)
    ),
    "TPKERNELS_TRANSPORT": _one_of("auto", "c10d", "shared", "symmetric", "symmetric-rounds", or_empty=False),
    "TPKERNELS_TUNE": _SWITCH,
}


def add_options(parser: ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def main(options: Namespace) -> int:
    version = ".".join(map(str, sys.version_info[:3]))
    python = ok("python", f"{version} at {sys.executable}")
    findings = [python, *_probes(), _compiler(), *_environment()]
    if isinstance(sys.stdout, TextIOWrapper):  # continue on terminals that cannot show a character
        sys.stdout.reconfigure(errors="backslashreplace")
    # without torch there is nothing to test, and there is a finding already
    if not any(finding.name == "torch" and finding.health == "problem" for finding in findings):
        findings.append(_self_test())
    problems = [finding for finding in findings if finding.health == "problem"]
    if options.json:
        report = {
            "version": __version__,
            "healthy": not problems,
            "findings": [asdict(f) for f in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        _print(findings, problems)
    return 1 if problems else 0


def _probes() -> list[Finding]:
    """Return the findings of `tpkernels.cli.probe`, with a finding of its failure if it failed."""
    lines, failure = _run("tpkernels.cli.probe", PROBE_SECONDS)
    findings: list[Finding] = []
    probing = "probe"
    for line in lines:
        try:
            said = json.loads(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else None
        except ValueError:
            said = None
        if isinstance(said, str):
            probing = said
        elif isinstance(said, dict):
            findings.append(Finding(**said))
        # other lines are output of libraries
    if failure:
        findings.append(problem(probing, f"looking at it {failure}"))
    return findings


def _compiler() -> Finding:
    name = os.environ.get("CXX", "").strip()
    name = name or next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), "")
    if not name or not shutil.which(name.split()[0]):
        return note("compiler", f"{name or 'none'} not found: the C++ extension cannot be built here")
    try:
        command = [*name.split(), "--version"]
        told = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return note("compiler", f"{name} does not run: {error}")
    if told.returncode != 0:
        return note("compiler", f"{name} --version fails with exit code {told.returncode}")
    return ok("compiler", next(iter(told.stdout.splitlines()), name))


def _environment() -> list[Finding]:
    wrong = dict(mistakes())
    findings = [problem("variable", text) for text in wrong.values()]
    for name in sorted(os.environ.keys() - wrong):
        if name.startswith(OUR_VARIABLES) or name in LAUNCHER_VARIABLES:
            findings.append(ok("variable", f"{name}={os.environ[name]}"))
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        findings.append(
            note(
                "variable",
                "CUDA_DEVICE_MAX_CONNECTIONS=1 is not needed here: overlap uses streams and events",
            )
        )
    return findings


def _self_test() -> Finding:
    # words: a rank's, and its launcher's
    lines, failure = _run("tpkernels.cli.probe", SELF_TEST_SECONDS, SELF_TEST, words=2)
    if failure:
        return problem("self-test", f"two gloo processes on this machine: {failure}")
    return ok("self-test", lines[-1] if lines else "two gloo processes agree")


def _run(module: str, seconds: float, *arguments: str, words: int = 1) -> tuple[list[str], str]:
    """Run `python -m module arguments`; return its lines, and its failure in words, "" for none.

    words: how many of its last lines on stderr to cite
    """
    lines: list[str] = []
    with started([sys.executable, "-m", module, *arguments]) as child:
        try:
            for line in child.lines_until_end(seconds):
                lines.append(line)
            code = child.end()
            failure = f"{'failed' if code > 0 else 'ended'} {ending(code)}" if code else ""
        except TimeoutError as error:
            failure = str(error)
        last_words = child.last_words(words)
    return lines, f"{failure}: {last_words}" if failure and last_words else failure


def _print(findings: Sequence[Finding], problems: Sequence[Finding]) -> None:
    print(f"tpkernels {__version__}")
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"  {finding.health:<7}  {finding.name:<{width}}  {finding.text}")
    if problems:
        print(f"{len(problems)} problem{'s' * (len(problems) > 1)}: {', '.join(f.name for f in problems)}")
    else:
        print("healthy")


# Checks of environment variables TPKERNELS_*: their names and values, with suggestions.


def mistakes(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Yield unknown variables and variables with invalid values, each with advice."""
    for name, value in sorted(environment.items()):
        if name in VARIABLES:
            if not VARIABLES[name].has(value):
                yield name, f"{name}={value}: expected {VARIABLES[name].expected}{_meant_value(name, value)}"
        elif name.startswith("TPKERNELS_"):
            yield name, f"{name}={value}: nothing reads it; did you mean {_nearest(name)[1]}?"
        else:
            alike, nearest = _nearest(name)
            if alike >= ALIKE:
                yield name, f"{name}={value}: nothing reads it; did you mean {nearest}?"


def _nearest(name: str) -> tuple[float, str]:
    """Return the similarity of the most similar variable, 1 for equal, and its name."""
    return max((_likeness(name.upper(), known), known) for known in VARIABLES)


def _meant_value(name: str, value: str) -> str:
    words = VARIABLES[name].words
    if not words:
        return ""
    alike, nearest = max((_likeness(value.strip().lower(), word), word) for word in words)
    return f"; did you mean {nearest}?" if alike else ""


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
